"""The time-memory curve of a model on a cluster: one plan a budget, and where the baselines lie beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardwright.ir import Budget
from shardwright.ir.plan import Plan
from shardwright.planner.api import PlanResult
from shardwright.planner.point_costs import Costs

__all__ = ["Begin", "Curve", "Point", "Rival"]


@dataclass(frozen=True)
class Point:
    """The plan of one budget."""

    result: PlanResult
    costs: Costs

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def budget(self) -> Budget:
        return self.plan.budget

    @property
    def peak_bytes(self) -> int:
        """What the plan really needs: at most its budget."""
        return self.plan.prediction.device_bytes

    @property
    def step_seconds(self) -> float:
        return self.plan.prediction.step_seconds

    @property
    def gap(self) -> float | None:
        """Proven; of the solver's objective."""
        return None if self.plan.certificate is None else self.plan.certificate.gap

    @property
    def is_cut(self) -> bool:
        """Whether the clock or Ctrl-C ended the search."""
        return self.plan.certificate is not None and self.plan.certificate.interrupted


@dataclass(frozen=True, slots=True)
class Rival:
    """A baseline, and the best plan that needs no more memory than it."""

    name: str
    step_seconds: float | None = None
    """None, as the other figures, where the baseline cannot be had."""
    peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    planned_seconds: float | None = None
    """Step of the best plan found that fits in the baseline's peak."""
    note: str = ""

    @property
    def is_beaten(self) -> bool:
        """Whether a plan is faster in the same memory."""
        if self.step_seconds is None or self.planned_seconds is None:
            return False
        return self.planned_seconds < self.step_seconds

    @property
    def is_dominated(self) -> bool:
        """Whether a plan is at least as fast in the same memory; it may be the baseline itself."""
        if self.step_seconds is None or self.planned_seconds is None:
            return False
        return self.planned_seconds <= self.step_seconds


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a way to save memory is first used, coming from large budgets."""

    what: str
    """`weights split`, `recompute`, `offload`, `offload to disk`, `state on host`, `weights on host`."""
    point: Point


@dataclass(frozen=True)
class Curve:
    """From the largest budget to the smallest: time never falls, the peak never rises."""

    points: tuple[Point, ...]
    rivals: tuple[Rival, ...]
    smallest_bytes: int | None
    """No smaller budget is known to work; None where nobody looked."""

    @property
    def fastest_seconds(self) -> float:
        return min(point.step_seconds for point in self.points)

    @property
    def begins(self) -> tuple[Begin, ...]:
        """What no budget uses is left out."""
        using = ((what, [p for p in self.points if uses(p.costs)]) for what, uses in _WAYS)
        return tuple(Begin(what, points[0]) for what, points in using if points)


_WAYS: Final[tuple[tuple[str, Callable[[Costs], bool]], ...]] = (
    ("weights split", lambda costs: costs.weight_bytes < costs.whole_weight_bytes),
    ("recompute", lambda costs: costs.recomputed_bytes > 0),
    ("offload", lambda costs: costs.offloaded_bytes > 0),
    ("offload to disk", lambda costs: costs.spilled_bytes > 0),
    ("state on host", lambda costs: costs.state_host_bytes > 0),
    ("weights on host", lambda costs: costs.weight_host_bytes > 0),
)
