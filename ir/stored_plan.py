"""A plan with the graph it is for: what is saved, loaded and put on a model. `shardwright.Plan` is this."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shardwright.ir.files import load_plan, save_plan
from shardwright.ir.graph import Graph
from shardwright.ir.plan import Plan

__all__ = ["StoredPlan"]


@dataclass(frozen=True)
class StoredPlan:
    """Two files: `net.plan`, which people read and edit, and `net.graph` beside it."""

    plan: Plan
    graph: Graph

    @classmethod
    def load(cls, path: str | Path) -> "StoredPlan":
        """Read both files; nothing is imported or executed. Raises TextError, PlanError."""
        return StoredPlan(*load_plan(Path(path)))

    def save(self, path: str | Path) -> Self:
        """Write both files, each whole or not at all; gives the plan itself."""
        save_plan(Path(path), self.plan, self.graph)
        return self
