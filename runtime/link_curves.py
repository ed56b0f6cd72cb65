"""What `measure_links` found: seconds by size for each kind of traffic, and their rows in the database.

Sizes are bytes of the whole tensor for collectives, bytes for copies, elements for the optimizer.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["COLLECTIVE_KINDS", "Curve", "LinkCurves", "Point", "group_sizes_of"]

COLLECTIVE_KINDS: Final = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_", "all_to_all")
"""As `Prices.collective_seconds` names them."""

Point = tuple[str, str, float]
"""(what, question, seconds), as the database keeps it."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at ascending sizes."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size: int) -> float:
        """Linear between the logarithms of two points; flat below the first; proportional above the last."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        right = bisect.bisect_right(self.sizes, size)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = math.log(size / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(self.seconds[right - 1]) + share * math.log(self.seconds[right]))


@dataclass(frozen=True)
class LinkCurves:
    """Everything measured with all ranks at work."""

    num_ranks: int
    collectives: dict[tuple[str, int], Curve]
    """(kind, group size) to seconds by bytes of the whole tensor, of ranks that do nothing else."""
    meetings: dict[int, float]
    """Group size to the seconds that every collective between pieces of compute costs beyond that."""
    copies: Curve
    """Mean of a copy into pooled host memory and one back into fresh memory, by bytes, of what is in no cache."""
    adam: Curve
    """A fused AdamW step on float32, by elements of one parameter among several."""
    matmul_contention: float
    """Seconds of a matmul with all ranks busy over seconds of it alone; at least 1."""
    memory_contention: float
    """The same for a large copy."""

    def collective_seconds(self, kind: str, group_size: int, num_bytes: int) -> float:
        """In a program."""
        return self.collectives[kind, group_size].at(num_bytes) + self.meetings[group_size]

    def points(self) -> tuple[Point, ...]:
        """As rows for the database; `from_points` is the inverse."""
        named = {f"{kind} group={size}": curve for (kind, size), curve in self.collectives.items()}
        named |= {f"meeting group={size}": Curve((1,), (seconds,)) for size, seconds in self.meetings.items()}
        named |= {"cold copy": self.copies, "adam": self.adam}
        named |= {"matmul contention": Curve((1,), (self.matmul_contention,))}
        named |= {"memory contention": Curve((1,), (self.memory_contention,))}
        return tuple(
            (name, f"ranks={self.num_ranks} size={size}", seconds)
            for name, curve in named.items()
            for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
        )

    @classmethod
    def from_points(cls, num_ranks: int, points: Sequence[Point]) -> "LinkCurves | None":
        """None where the points are not complete for that many ranks."""
        found: dict[str, dict[int, float]] = {}
        for name, question, seconds in points:
            ranks, _, size = question.partition(" ")
            if ranks == f"ranks={num_ranks}":
                found.setdefault(name, {})[int(size.removeprefix("size="))] = seconds
        curves = {name: Curve(tuple(sorted(by)), tuple(by[s] for s in sorted(by))) for name, by in found.items()}
        groups = {
            f"{kind} group={size}": (kind, size) for kind in COLLECTIVE_KINDS for size in group_sizes_of(num_ranks)
        }
        meetings = {f"meeting group={size}": size for size in group_sizes_of(num_ranks)}
        wanted = {*groups, *meetings, "cold copy", "adam", "matmul contention", "memory contention"}
        if not wanted <= curves.keys():
            return None
        return cls(
            num_ranks,
            {key: curves[name] for name, key in groups.items()},
            {size: curves[name].seconds[0] for name, size in meetings.items()},
            curves["cold copy"],
            curves["adam"],
            curves["matmul contention"].seconds[0],
            curves["memory contention"].seconds[0],
        )


def group_sizes_of(num_ranks: int) -> tuple[int, ...]:
    """Sizes that an axis of a mesh of that many ranks can have, without 1."""
    return tuple(size for size in range(2, num_ranks + 1) if num_ranks % size == 0)
