"""Collectives broken on purpose, to show that `verify` would see it.

A fault acts where the collective is waited for: what was communicated is thrown away and replaced in place, so the
ranks' collectives still match and storages stay what they were planned to be. The same injector serves the emitted
program and lockstep.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from shardwright.ir import Graph, GraphError, InputError
from shardwright.ir.ops import COLLECTIVES

__all__ = ["Fault", "FaultKind", "Injector", "collectives"]


class FaultKind(StrEnum):
    DROP = "drop"
    """Nothing is communicated: the rank uses what it had itself, in the right shape."""
    SCALE = "scale"
    """The result times 1.5."""
    STALE = "stale"
    """The result of the step before; zeros in the first step."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Which collective goes wrong, and how."""

    kind: FaultKind
    collective: int
    """Position among the collective starts of the rank graph, from 0; see `collectives`."""

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """`drop:3` to a fault. Raises InputError."""
        kind, _, position = text.partition(":")
        if kind not in list(FaultKind) or not position.isdecimal():
            raise InputError(f"expected drop:K, scale:K or stale:K with K a number from 0, found {text!r}")
        return cls(FaultKind(kind), int(position))


def collectives(graph: Graph) -> tuple[str, ...]:
    """Names of the started collectives in order: what K counts in `drop:K`."""
    return tuple(node.name for node in graph.nodes if node.op in COLLECTIVES)


def broken_collective(graph: Graph, fault: Fault) -> str:
    """Name of the start that the fault names. Raises GraphError when there are fewer collectives."""
    found = collectives(graph)
    if fault.collective >= len(found):
        raise GraphError(
            f"expected one of the {len(found)} collectives of {graph.name}, counted from 0, found {fault.collective}"
        )
    return found[fault.collective]


class Injector:
    """One rank's view of one broken collective; keeps the last result for stale."""

    def __init__(self, kind: FaultKind, op: str, num_parts: int, index: int) -> None:
        self._kind = kind
        self._op = op
        self._num_parts = num_parts
        self._index = index
        self._own: Tensor | None = None
        self._last: Tensor | None = None

    def start(self, x: Tensor) -> Tensor:
        """Looks at what is sent, and hands it on."""
        if self._kind is FaultKind.DROP:
            self._own = self._contribution(x)
        return x

    def finish(self, result: Tensor) -> Tensor:
        """Spoils the result in place, and hands it on."""
        if self._kind is FaultKind.SCALE:
            return result.copy_(result * 1.5)
        if self._kind is FaultKind.DROP and self._own is not None:
            result.copy_(self._own)
            self._own = None
            return result
        fresh = result.clone()
        result.copy_(torch.zeros_like(result) if self._last is None else self._last)
        self._last = fresh
        return result

    def _contribution(self, x: Tensor) -> Tensor:
        if self._op == "mesh.all_gather":
            return torch.cat([x.reshape(x.shape or (1,))] * self._num_parts)
        if self._op == "mesh.reduce_scatter":
            return x.chunk(self._num_parts)[self._index].clone()
        return x.clone()
