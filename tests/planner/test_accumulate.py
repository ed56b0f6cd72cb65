"""Steps of several micro-batches: earlier gradients are there throughout, and the optimizer steps once."""

import pytest
from tests.planner.fast_host import fast_host
from tests.planner.measured_step import Size, llama, measured_peak

from shardwright.ir import InfeasibleError
from shardwright.planner.api import PlanResult, check_plan, plan
from shardwright.runtime.rank_pool import RankPool

SIZE = Size(num_layers=2)
LOOSE_BYTES = 32_000_000


def planned(accumulate: int, budget: int = LOOSE_BYTES) -> PlanResult:
    module, args, kwargs = llama(SIZE)
    return plan(module, args, kwargs, cluster=fast_host(), budget=budget, accumulate=accumulate)


def smallest_bytes(accumulate: int) -> int:
    with pytest.raises(InfeasibleError) as refusal:
        planned(accumulate, 1)
    return refusal.value.smallest_bytes


def test_a_step_takes_as_many_forwards_and_backwards_and_one_optimizer() -> None:
    """Measured prices leave something in between: twice the micro-batches are less than twice the step."""
    one, four = (planned(accumulate).plan for accumulate in (1, 4))
    assert four.identity.accumulate == 4
    assert 2.0 < four.prediction.step_seconds / one.prediction.step_seconds < 4.0
    assert four.certificate is not None and one.certificate is not None
    assert four.certificate.objective_seconds > 2.0 * one.certificate.objective_seconds


def test_a_plan_is_checked_as_it_was_made() -> None:
    module, args, kwargs = llama(SIZE)
    found = plan(module, args, kwargs, cluster="h100x8", budget=LOOSE_BYTES, accumulate=3)
    assert check_plan(found.plan, found.graph) == found.plan


@pytest.mark.study
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_at_the_smallest_budget_ranks_hold_no_more_than_predicted(two_ranks: RankPool) -> None:
    """Which is more than one micro-batch needs by at most the gradients."""
    alone, budget = smallest_bytes(1), smallest_bytes(2)
    found = planned(2, budget)
    gradients = sum(p.numel() * p.element_size() for p in llama(SIZE)[0].parameters())
    assert alone < budget <= alone + gradients
    predicted = found.plan.prediction.device_bytes
    for measured in two_ranks.run(measured_peak, found.plan, found.graph, SIZE, True, timeout_seconds=60):
        assert 0.99 * predicted <= measured.device_bytes <= predicted <= budget
