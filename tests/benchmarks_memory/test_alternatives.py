"""The alternatives to joint planning: each does what its name says, and is judged as the joint plan is."""

from dataclasses import replace
from functools import cache
from xml.etree import ElementTree

import pytest
from memory_alternatives import Outcome, Rivals
from memory_picture import study_svg
from memory_study import points, table, verdict
from tests.zoo.models import ZOO

from shardwright.ir import Fate, Gather, load_cluster
from shardwright.planner.candidates import judge
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Search

HOST_BYTES = 2**20
WAYS = (
    "sequence",
    "sequence, best alpha",
    "torch",
    "fsdp+selective",
    "fsdp+recompute",
    "greedy offload",
    "offload all",
)
TWO = load_cluster("h100x8")
TWO = replace(TWO, name="h100x2", ranks_per_node=2, host=replace(TWO.host, smallest_offload_bytes=512))


@cache
def problem() -> Problem:
    module, args, kwargs = ZOO["llama"]()
    return pose(module, args, kwargs, cluster=TWO, budget=2**30, host=HOST_BYTES)


@cache
def loosely() -> tuple[Search, Rivals]:
    search = Search(problem().request)
    search.under(2**30)
    return search, Rivals(search)


@cache
def tight_bytes() -> int:
    """Less than everything kept needs, more than everything recomputed does."""
    search, rivals = loosely()
    sharding = rivals.best_sharding(2**30, 1.0)
    assert sharding is not None
    request = search.request
    kept = judge("", request.graph, sharding.decisions, request.machine, request.budget)
    return round(0.7 * kept.replay.peak_bytes)


@cache
def outcomes() -> dict[str, Outcome]:
    _, rivals = loosely()
    return {outcome.name: outcome for outcome in rivals.under(tight_bytes())}


@pytest.mark.study
def test_every_alternative_is_there_and_what_is_said_to_fit_fits() -> None:
    assert list(outcomes()) == list(WAYS)
    for outcome in outcomes().values():
        assert outcome.candidate is not None or outcome.note
        if outcome.candidate is not None:
            again = judge("", problem().request.graph, outcome.candidate.decisions, problem().request.machine,
                          replace(problem().request.budget, device_bytes=tight_bytes()))  # fmt: skip
            assert again.fits
            assert again.replay.step_seconds == outcome.candidate.replay.step_seconds


@pytest.mark.study
@pytest.mark.parametrize("name", ["sequence", "greedy offload"])
def test_the_layouts_are_those_chosen_alone(name: str) -> None:
    _, rivals = loosely()
    sharding, found = rivals.best_sharding(tight_bytes(), 1.0), outcomes()[name].candidate
    assert sharding is not None
    assert found is not None
    assert found.decisions.layouts == sharding.decisions.layouts
    assert found.decisions.reads == sharding.decisions.reads


def test_a_smaller_share_of_the_budget_splits_parameters() -> None:
    _, rivals = loosely()
    graph = problem().request.graph
    resident = [
        sum(graph.types[p].num_bytes for p in graph.gradients if "S(" in str(sharding.decisions.layouts[p]))
        for alpha in (1.0, 1e-3)
        if (sharding := rivals.best_sharding(2**28, alpha)) is not None
    ]
    assert len(resident) == 2
    assert resident[1] >= resident[0]
    assert rivals.best_sharding(1, 1.0) is None


@pytest.mark.study
def test_the_joint_plan_is_no_slower_than_layouts_first_and_fates_afterwards() -> None:
    search, _ = loosely()
    sequence = outcomes()["sequence"].candidate
    assert sequence is not None
    assert search.under(tight_bytes()).chosen.replay.step_seconds <= sequence.replay.step_seconds * (1 + 1e-6)


@pytest.mark.study
def test_greedy_moves_no_more_than_it_must() -> None:
    found, request = outcomes()["greedy offload"].candidate, problem().request
    assert found is not None
    assert Gather.KEEP not in found.decisions.gathers.values()
    fates, tiers = dict(found.decisions.fates), dict(found.decisions.tiers)
    assert set(fates.values()) == {Fate.OFFLOAD}
    sizes = [request.graph.types[name].num_bytes for name in fates]
    assert sizes == sorted(sizes, reverse=True)
    last = tiers if tiers else fates  # activations go first
    last.popitem()
    fewer = replace(found.decisions, fates=fates, tiers=tiers)
    budget = replace(request.budget, device_bytes=tight_bytes())
    assert not judge("", request.graph, fewer, request.machine, budget).fits


@pytest.mark.study
def test_a_study_says_for_each_budget_what_is_better() -> None:
    found = list(points(problem(), "llama", [tight_bytes(), 2**30]))
    assert [point.budget_bytes for point in found] == [2**30, tight_bytes()]
    text = table(found)
    assert all(name in text for name in outcomes())
    assert "strictly better" in verdict(found)
    picture = ElementTree.fromstring(study_svg("title", "setting", found))
    drawn = len(picture.findall(".//{*}circle")) + len(picture.findall(".//{*}polygon"))
    assert drawn == sum(e.step_seconds is not None for point in found for e in (point.joint, *point.rivals))
