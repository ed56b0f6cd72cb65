"""A pass is graph in, graph out."""

from typing import Protocol

from shardwright.ir import Graph

__all__ = ["Pass"]


class Pass(Protocol):
    """Frozen dataclasses implement it; their fields are the pass's options."""

    @property
    def name(self) -> str: ...

    def run(self, graph: Graph) -> Graph: ...
