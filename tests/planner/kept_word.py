"""What a plan says of memory, against what was measured on a rank."""

from tests.planner.measured_step import Measured

from shardwright.ir import Plan

__all__ = ["PRECISION", "require_kept"]

PRECISION = 0.01


def require_kept(plan: Plan, measured: Measured) -> None:
    """The peak is within the predicted one and close to it, also on the first step; both are within the budget."""
    predicted, budget = plan.prediction, plan.budget
    assert predicted.device_bytes <= budget.device_bytes
    assert predicted.host_bytes <= budget.host_bytes
    assert measured.first_bytes <= predicted.device_bytes
    assert (1 - PRECISION) * predicted.device_bytes <= measured.device_bytes <= predicted.device_bytes
    assert measured.pool_bytes <= predicted.host_bytes
