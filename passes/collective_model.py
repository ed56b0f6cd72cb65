"""Seconds of a collective by alpha-beta over the levels its group crosses, where nothing is measured.

Needs a `Cluster`, the bytes of the whole tensor, and the axis of a mesh whose ranks are numbered row-major (the last
axis is innermost: neighbours). Ring for everything; an all-reduce takes the better of ring and tree.
"""

import math
from dataclasses import dataclass
from typing import Final

from shardwright.ir.cluster import Cluster

__all__ = ["Span", "collective_seconds", "span_of"]


@dataclass(frozen=True, slots=True)
class Span:
    """How a group lies on the nodes."""

    num_members: int
    members_per_node: int

    @property
    def num_nodes(self) -> int:
        return -(-self.num_members // self.members_per_node)


def span_of(group_sizes: tuple[int, ...], axis: int, ranks_per_node: int) -> Span:
    """Members stand `stride` ranks apart, so a node of `ranks_per_node` holds every so many of them.

    >>> span_of((2, 4, 2), 1, 8)
    Span(num_members=4, members_per_node=4)
    >>> span_of((8, 8), 0, 8)
    Span(num_members=8, members_per_node=1)
    """
    stride = math.prod(group_sizes[axis + 1 :])
    members = group_sizes[axis]
    return Span(members, max(1, min(members, -(-ranks_per_node // stride))))


_BASE_SECONDS: Final = 8.4e-6
"""NCCL's base latency of a ring with the Simple protocol (tuning.cc)."""
_TREE_BANDWIDTH: Final = 0.92
"""Of a tree relative to a ring (tuning.cc)."""
_RAMP_BYTES: Final = 2 * 2**20
_SMALL_HOP, _LARGE_HOP = 0.5, 2.0
"""A hop costs half its latency with small messages (LL protocols) and twice with large ones (chunks queue up): fits the
plateau of 8 A100, 44 us at 32 KiB, about 100 us from 1 to 4 MiB, half the peak at 16 to 32 MiB."""

_GLOO_FACTORS: Final = {"reduce_scatter": 3.2, "all_gather": 1.6, "all_to_all": 1.1}
"""gloo on one machine: seconds per byte moved relative to its all-reduce (2 ranks, 16 and 64 MiB, fresh results)."""


def collective_seconds(cluster: Cluster, kind: str, num_bytes: int, group_sizes: tuple[int, ...], axis: int) -> float:
    """One collective of `num_bytes`, the size of the whole tensor; 0 for a group of one."""
    span = span_of(group_sizes, axis, cluster.ranks_per_node)
    if span.num_members == 1:
        return 0.0
    if kind.startswith("all_reduce"):
        return min(_ring(cluster, num_bytes, span, rounds=2), _tree(cluster, num_bytes, span))
    factor = _GLOO_FACTORS[kind] if cluster.device.kind == "cpu" else 1.0
    if kind == "all_to_all":
        return _all_to_all(cluster, num_bytes, span, factor)
    return _ring(cluster, num_bytes, span, rounds=1, factor=factor)


def _bytes_per_second(cluster: Cluster, span: Span) -> float:
    """Of the ring: a group that holds k ranks of each node drives k NICs, never more than the link inside."""
    inside = cluster.intra.bytes_per_second
    if span.num_nodes == 1:
        return inside
    crossing = span.members_per_node * cluster.inter.bytes_per_second
    return crossing if span.members_per_node == 1 else min(inside, crossing)


def _hop(cluster: Cluster, num_bytes: int) -> float:
    """Multiple of a link's latency that one step takes."""
    if cluster.device.kind == "cpu":
        return 1.0
    return _SMALL_HOP + (_LARGE_HOP - _SMALL_HOP) * num_bytes / (num_bytes + _RAMP_BYTES)


def _base(cluster: Cluster) -> float:
    return cluster.device.launch_seconds + (0.0 if cluster.device.kind == "cpu" else _BASE_SECONDS)


def _ring(cluster: Cluster, num_bytes: int, span: Span, rounds: int, factor: float = 1.0) -> float:
    steps = span.num_members - 1
    crossings = span.num_nodes - 1
    latency = (steps - crossings) * cluster.intra.latency_seconds + crossings * cluster.inter.latency_seconds
    moved_bytes = num_bytes * steps / span.num_members * factor
    seconds = latency * _hop(cluster, num_bytes) + moved_bytes / _bytes_per_second(cluster, span)
    return _base(cluster) + rounds * seconds


def _tree(cluster: Cluster, num_bytes: int, span: Span) -> float:
    inside = (span.members_per_node - 1) * cluster.intra.latency_seconds
    across = math.ceil(math.log2(span.num_nodes)) * cluster.inter.latency_seconds
    bandwidth = _bytes_per_second(cluster, span) * _TREE_BANDWIDTH
    moved_bytes = 2 * num_bytes * (span.num_members - 1) / span.num_members
    return _base(cluster) + 2 * (inside + across) * _hop(cluster, num_bytes) + moved_bytes / bandwidth


def _all_to_all(cluster: Cluster, num_bytes: int, span: Span, factor: float) -> float:
    """Every rank sends a part to each other one, over its own NIC to those on other nodes."""
    part_bytes = num_bytes * factor / span.num_members
    inside = part_bytes * (span.members_per_node - 1) / cluster.intra.bytes_per_second
    across = part_bytes * (span.num_members - span.members_per_node) / cluster.inter.bytes_per_second
    latency = cluster.intra.latency_seconds if span.num_nodes == 1 else cluster.inter.latency_seconds
    steps = max(1, span.num_nodes - 1) if span.num_nodes > 1 else span.num_members - 1
    return _base(cluster) + steps * latency * _hop(cluster, num_bytes) + max(inside, across)
