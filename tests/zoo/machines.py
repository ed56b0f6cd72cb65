"""Machines to plan tiny models for: launches and latencies next to nothing, so that a plan follows bytes and flops.

On a real preset a model of a few thousand parameters is all launch overhead: replicating everything is best, and a
test of such a plan proves nothing. Rates here are slow enough that seconds add up to milliseconds.
"""

from dataclasses import replace

from shardwright.ir import Cluster, load_cluster
from shardwright.ir.cluster import Link

__all__ = ["compute_bound", "link_bound"]

NOTHING_SECONDS = 1e-9


def compute_bound(num_ranks: int) -> Cluster:
    """Links next to free: every matmul is split somehow, and so is most of what is between."""
    return _machine(num_ranks, 1e9, 1e12)


def link_bound(num_ranks: int) -> Cluster:
    """Bytes on links are dear: work is split only where little moves, as data parallel does."""
    return _machine(num_ranks, 1e10, 2e9)


def _machine(num_ranks: int, flops_per_second: float, link_bytes_per_second: float) -> Cluster:
    preset = load_cluster("h100x8")
    link = Link(link_bytes_per_second, NOTHING_SECONDS, 0.8)
    device = replace(
        preset.device,
        kind="cpu",  # its matmuls have no tiles that a tiny product could not fill
        memory_bytes_per_second=flops_per_second,
        flops_per_second={"f32": flops_per_second},
        launch_seconds=NOTHING_SECONDS,
        block_bytes=64,
    )
    host = replace(
        preset.host, copy_bytes_per_second=1e10, copy_latency_seconds=NOTHING_SECONDS, smallest_offload_bytes=1024
    )
    return replace(preset, ranks_per_node=num_ranks, device=device, intra=link, inter=link, host=host)
