"""What `verify` prints: the largest differences, what passed only by the second term, the verdict.

Needs what `runtime.verify` found, described here by what is read of it. Differences and limits are in the units of
docs/numerics.md: for a gradient the norm of the difference, for the loss its absolute difference.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.planner.json_export import Json

__all__ = ["Difference", "Verification", "fault_table", "verification_json", "verification_table"]

SHOWN = 10
"""Differences listed, those nearest to their limits first."""


class Difference(Protocol):
    """One thing that was compared."""

    @property
    def kind(self) -> str:
        """`loss`, `gradient`, `parameter`."""
        ...

    @property
    def name(self) -> str:
        """Of the tensor; of the step for a loss."""
        ...

    @property
    def difference(self) -> float: ...

    @property
    def limit(self) -> float:
        """Largest difference that passes."""
        ...

    @property
    def second_term(self) -> bool:
        """Whether it passes only because all gradients of the model allow it, not by its own size."""
        ...


class Verification(Protocol):
    """One run against the plain model."""

    @property
    def differences(self) -> Sequence[Difference]: ...

    @property
    def passed(self) -> bool: ...


def verification_table(found: Verification, title: str) -> RenderableType:
    """Differences by how near they are to their limits, then the verdict."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("compared", no_wrap=True)
    table.add_column("name", overflow="fold")
    for column in ("difference", "limit", "of limit"):
        table.add_column(column, justify="right", no_wrap=True)
    ordered = sorted(found.differences, key=_share, reverse=True)
    for item in ordered[:SHOWN]:
        style = "" if _share(item) <= 1 else "red"
        share = f"{_share(item):.2f}"
        table.add_row(item.kind, Text(item.name, style), f"{item.difference:.2e}", f"{item.limit:.2e}", share)
    parts: list[RenderableType] = [table]
    if len(ordered) > SHOWN:
        parts.append(Text(f"and {len(ordered) - SHOWN:,} more, all nearer to zero", style="dim"))
    weak = [item.name for item in found.differences if item.second_term and _share(item) <= 1]
    if weak:
        parts.append(Text(f"passed only by the size of all gradients together ({len(weak)}): {', '.join(weak)}"))
    parts.append(Text(f"{title}: {'equal' if found.passed else 'differs'}", style="bold"))
    return Group(*parts)


def _share(item: Difference) -> float:
    """Difference in parts of the limit; past 1 it differs. NaN differs."""
    if item.difference != item.difference:
        return float("inf")
    if item.limit > 0:
        return item.difference / item.limit
    return 0.0 if item.difference == 0 else float("inf")


def fault_table(caught: Mapping[str, bool]) -> RenderableType:
    """Which collectives, broken on purpose, were noticed."""
    missed = [fault for fault, noticed in caught.items() if not noticed]
    lines = [Text(f"{fault}: not noticed", style="red") for fault in missed]
    return Group(*lines, Text(f"{len(caught) - len(missed)} of {len(caught)} faults noticed", style="bold"))


def verification_json(found: Verification) -> dict[str, Json]:
    """Everything compared."""
    differences: list[Json] = [
        {
            "kind": item.kind,
            "name": item.name,
            "difference": item.difference,
            "limit": item.limit,
            "second_term": item.second_term,
        }
        for item in found.differences
    ]
    return {"passed": found.passed, "differences": differences}
