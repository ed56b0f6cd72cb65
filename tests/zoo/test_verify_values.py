"""Every value of a rank graph is the whole graph's value: all models, solved and drawn plans, ranks in lockstep."""

import pytest
from tests.zoo.drawn import drawn_decisions
from tests.zoo.models import MORE, ZOO
from tests.zoo.planned import BUDGETS, EXACT, LONG, PlannedZoo
from tests.zoo.solved import MESHES
from tests.zoo.whole import differences

from shardwright.ir import Fate, Mesh

FOUR = Mesh(("dp",), (4,))


def _case(name: str, num_ranks: int) -> object:
    """Four ranks are left to the study, too."""
    studied = num_ranks == 4 or (name, num_ranks) in LONG
    return pytest.param(name, num_ranks, marks=pytest.mark.study if studied else ())


@pytest.mark.parametrize(("name", "num_ranks"), [_case(name, num_ranks) for num_ranks in (1, 2, 4) for name in ZOO])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_solved_plan_computes_every_value_of_the_model(
    zoo: PlannedZoo, name: str, num_ranks: int, budget: str
) -> None:
    plan = zoo.plan(name, num_ranks, budget)
    assert plan.prediction.device_bytes <= plan.budget.device_bytes
    assert not differences(zoo.subject(name), plan.decisions)


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("mesh", [*MESHES.values(), FOUR], ids=str)
def test_a_plan_drawn_at_random_computes_every_value_of_the_model(zoo: PlannedZoo, name: str, mesh: Mesh) -> None:
    subject = zoo.subject(name)
    decisions = drawn_decisions(subject.graph, mesh, zoo.rules, seed=len(name), offload=True)
    assert not differences(subject, decisions)


@pytest.mark.study
@pytest.mark.parametrize("name", MORE)
def test_models_of_the_same_kinds_compute_the_same_under_drawn_plans(zoo: PlannedZoo, name: str) -> None:
    subject = zoo.subject(name)
    decisions = drawn_decisions(subject.graph, MESHES[4], zoo.rules, seed=1)
    assert not differences(subject, decisions)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.study)])
def test_in_float64_only_roundings_differ(zoo: PlannedZoo, name: str, num_ranks: int) -> None:
    """What float32 could hide: an epsilon, a mean over another count."""
    subject = zoo.subject(f"{name}.f64")
    for budget in BUDGETS:
        assert not differences(subject, zoo.plan(f"{name}.f64", num_ranks, budget).decisions)


@pytest.mark.study
@pytest.mark.parametrize("name", ["llama", "resnet", "decoder"])
def test_the_plans_of_four_ranks_split_in_many_ways(zoo: PlannedZoo, name: str) -> None:
    """As below."""
    assert len(set(zoo.plan(name, 4, "loose").decisions.layouts.values())) >= 5


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_the_plans_tested_here_split_and_recompute(zoo: PlannedZoo, name: str) -> None:
    """Else the tests above would prove little."""
    split = zoo.plan(name, 2, "loose").decisions
    assert len(set(split.layouts.values())) >= 3
    assert set(zoo.plan(name, 1, "tight").decisions.fates.values()) == {Fate.RECOMPUTE}
