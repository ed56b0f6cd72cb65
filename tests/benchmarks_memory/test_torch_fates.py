"""What torch's partitioner saves, as fates of ours: the same memory and the same recomputation as in its own graphs."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from fx_joint import joint_program
from fx_liveness import measure
from tests.zoo.models import ZOO
from torch_budget import recompute_seconds, step_of, torchs_peak_bytes, torchs_recompute_seconds
from torch_fates import fates_of, partition

from shardwright.ir import Budget, Decisions, Fate, load_cluster, replicated
from shardwright.planner.candidates import Candidate, evaluate
from shardwright.planner.problem import Problem, pose

UNLIMITED = Budget(2**40, 0)
TOLERANCE_BYTES = 4 * 512
"""Order within one operator's temporaries, on tensors of a block or two."""
TOLERANCE_SECONDS = 3 * 7e-6
"""Launches: torch merges equal operators, the fates repeat each of them."""


@cache
def problem_of(name: str) -> Problem:
    module, args, kwargs = ZOO[name]()
    if name == "mixtral":
        module = module.to(torch.bfloat16)  # the only type whose grouped products fake tensors know
    one = replace(load_cluster("h100x8"), name="h100", ranks_per_node=1)
    return pose(module, args, kwargs, cluster=one, budget=2**40)


def judged(problem: Problem, fates: dict[str, Fate]) -> Candidate:
    decisions = replace(step_of(problem.request.graph), fates=fates)
    return evaluate("", problem.request.graph, decisions, problem.request.machine, UNLIMITED)


@pytest.mark.parametrize("name", ["llama", "vit", "t5", "mixtral"])
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_replay_of_the_fates_is_what_torchs_own_graphs_hold_and_repeat(name: str, budget: float) -> None:
    problem = problem_of(name)
    graph = problem.request.graph
    found = partition(joint_program(graph, step_of(graph)), graph, budget)
    translated, kept = judged(problem, dict(fates_of(found, graph))), judged(problem, {})
    own_bytes = torchs_peak_bytes(measure(found, 512), translated, problem)
    assert own_bytes == pytest.approx(translated.replay.peak_bytes, abs=TOLERANCE_BYTES)
    own_seconds = torchs_recompute_seconds(found, problem)
    assert own_seconds == pytest.approx(recompute_seconds(translated, kept), abs=TOLERANCE_SECONDS)


def test_a_budget_of_nothing_saves_inputs_alone() -> None:
    graph = problem_of("llama").request.graph
    found = partition(joint_program(graph, step_of(graph)), graph, 0.0)
    assert not found.saved & graph.producers.keys()
    assert measure(found, 512).saved_bytes == 0


def test_more_budget_saves_more() -> None:
    graph = problem_of("vit").request.graph
    program = joint_program(graph, step_of(graph))
    saved = [measure(partition(program, graph, budget), 512).saved_bytes for budget in (0.0, 0.3, 1.0)]
    assert saved == sorted(saved)
    assert saved[0] < saved[-1]


def test_a_storage_of_which_a_view_is_saved_is_kept() -> None:
    graph = problem_of("llama").request.graph
    found = partition(joint_program(graph, step_of(graph)), graph, 1.0)
    fates = fates_of(found, graph)
    assert fates
    assert not fates.keys() & found.saved
    assert set(fates.values()) == {Fate.RECOMPUTE}


def test_decisions_of_one_device_are_whole() -> None:
    graph = problem_of("perceptron").request.graph
    decisions: Decisions = step_of(graph)
    assert set(decisions.layouts.values()) == {replicated(decisions.mesh)}
