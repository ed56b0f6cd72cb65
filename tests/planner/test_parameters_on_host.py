"""Parameters that lie on the host: plans need less of the device, and ranks hold what plans say."""

from functools import partial

import pytest
from tests.planner.fast_host import fast_host
from tests.planner.kept_word import require_kept
from tests.planner.measured_models import Model
from tests.planner.measured_step import measured_peak

import shardwright
from shardwright.ir import InfeasibleError, Tier
from shardwright.planner.api import PlanResult
from shardwright.runtime.rank_pool import RankPool

GIB = 2**30


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_the_smallest_plan_has_them_there_and_keeps_its_word(two_ranks: RankPool) -> None:
    require_lying_and_kept(two_ranks, Model("perceptron"))


@pytest.mark.study
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama", "bert", "vit", "mixtral", "gemma2", "resnet"])
def test_the_smallest_plan_has_them_there_for_many_models(two_ranks: RankPool, name: str) -> None:
    require_lying_and_kept(two_ranks, Model(name))


def require_lying_and_kept(ranks: RankPool, model: Model) -> None:
    """At the smallest budget with and without gradients that are left to the optimizer."""
    lying, there = (smallest(model, clip) for clip in (None, "unknown"))
    assert Tier.HOST in lying.plan.decisions.parameters.values()
    assert not there.plan.decisions.parameters
    assert lying.plan.prediction.device_bytes < there.plan.prediction.device_bytes
    for measured in ranks.run(measured_peak, lying.plan, lying.graph, model, False, timeout_seconds=300):
        require_kept(lying.plan, measured)


def smallest(model: Model, clip: str | None) -> PlanResult:
    module, args, kwargs = model()
    plan = partial(
        shardwright.plan, module, args, kwargs, cluster=fast_host(), host=GIB, optimizer="adamw-fused", clip=clip
    )
    with pytest.raises(InfeasibleError) as error:
        plan(budget=1)
    return plan(budget=error.value.smallest_bytes)
