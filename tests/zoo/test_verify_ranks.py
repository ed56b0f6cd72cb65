"""Planned steps of every model on real gloo ranks against plain PyTorch: what `shardwright verify` does."""

import pytest
from tests.zoo.models import ZOO
from tests.zoo.planned import BUDGETS, EXACT, LONG, PlannedZoo

from shardwright.ir import Clip, Fate, Plan, Tier
from shardwright.runtime.rank_pool import RankPool
from shardwright.runtime.verify import verify
from shardwright.runtime.verify_rank import Comparison, Job, verify_rank

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

MIB = 2**20
FEW = ("perceptron", "llama", "resnet", "mixtral")
"""Models that are run on four ranks each time; the others are left to `pytest -m study`."""


def _case(name: str, num_ranks: int, budget: str) -> object:
    each_time = num_ranks < 4 and budget == "tight" and (name, num_ranks) not in LONG
    each_time |= num_ranks == 4 and budget == "loose" and name in FEW
    return pytest.param(name, num_ranks, budget, marks=() if each_time else pytest.mark.study)


CASES = [_case(name, num_ranks, budget) for num_ranks in (1, 2, 4) for name in ZOO for budget in BUDGETS]


@pytest.fixture
def pools(two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {2: two_ranks, 4: four_ranks}


def compared(zoo: PlannedZoo, name: str, plan: Plan, pools: dict[int, RankPool]) -> Comparison:
    """One rank needs no processes."""
    subject, num_ranks = zoo.subject(name), plan.decisions.mesh.num_ranks
    if num_ranks == 1:
        return verify_rank(Job(plan, subject.graph, plan.target, subject.captured), ())[0]
    return verify(plan, subject.graph, pool=pools[num_ranks], captured=subject.captured).clean


@pytest.mark.parametrize(("name", "num_ranks", "budget"), CASES)
def test_a_planned_step_is_the_plain_step(
    zoo: PlannedZoo, pools: dict[int, RankPool], name: str, num_ranks: int, budget: str
) -> None:
    found = compared(zoo, name, zoo.plan(name, num_ranks, budget), pools)
    assert not found.failures


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.study)])
def test_in_float64_it_is_so_to_ten_digits(
    zoo: PlannedZoo, pools: dict[int, RankPool], name: str, num_ranks: int
) -> None:
    for budget in BUDGETS:
        found = compared(zoo, f"{name}.f64", zoo.plan(f"{name}.f64", num_ranks, budget), pools)
        assert found.rtol == 1e-10
        assert not found.failures


@pytest.mark.parametrize("name", ["llama", "resnet"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_plan_that_offloads_is_bitwise_the_one_that_keeps(
    zoo: PlannedZoo, pools: dict[int, RankPool], name: str, num_ranks: int
) -> None:
    plan = zoo.plan(name, num_ranks, "tight", host_bytes=MIB)
    assert Fate.OFFLOAD in plan.decisions.fates.values()
    found = compared(zoo, name, plan, pools)
    assert found.bitwise
    assert not found.failures


HOSTED = [
    pytest.param(
        name, num_ranks, marks=() if (name, num_ranks) in (("perceptron", 2), ("resnet", 1)) else pytest.mark.study
    )
    for num_ranks in (1, 2, 4)
    for name in ZOO
]


@pytest.mark.parametrize(("name", "num_ranks"), HOSTED)
def test_a_plan_with_parameters_on_the_host_is_bitwise_the_one_without(
    zoo: PlannedZoo, pools: dict[int, RankPool], name: str, num_ranks: int
) -> None:
    """And the plain step, also when backward steps them there."""
    plan = zoo.plan(name, num_ranks, "tight", host_bytes=2**30, clip=Clip.NONE)
    assert Tier.HOST in plan.decisions.parameters.values()
    found = compared(zoo, name, plan, pools)
    assert found.bitwise
    assert not found.failures


def test_ranks_that_capture_for_themselves_find_the_planned_graph(zoo: PlannedZoo, two_ranks: RankPool) -> None:
    """As the command does: a plan comes from a file, and whoever made it is not there."""
    plan = zoo.plan("llama", 2, "tight")
    assert verify(plan, zoo.subject("llama").graph, pool=two_ranks).equal
