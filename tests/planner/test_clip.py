"""Declared `clip=None`: what has its state on the host is planned as stepped within backward."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planner.command_line import NET, Command
from tests.planner.small_graphs import machine
from tests.planner.solving import captured, formulated, known_rules, peak_bytes, solved

from shardwright.ir import Budget, Clip, Mesh, PlanError, Tier, load_plan
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.candidates import Candidate, evaluate
from shardwright.planner.decode import decode
from shardwright.planner.fates import FateOptions
from shardwright.planner.formulation import Formulation
from shardwright.planner.linear import Solution
from shardwright.planner.problem import clip_for

MODEL, ALONE, ROOM = "perceptron", Mesh(("dp",), (1,)), Budget(10**9, 10**9)


def formulation(clip: Clip) -> Formulation:
    """For a host apart from the device: what it does can hide."""
    adam = machine(1, host_bytes=10**9, optimizer=optimizer_spec("adamw-fused"))
    device = replace(adam.cluster.device, kind="cuda")
    adam = replace(adam, cluster=replace(adam.cluster, device=device), clip=clip)
    return formulated(captured(MODEL), ALONE, adam, FateOptions(recompute=False), rules=known_rules())


def all_on_host(clip: Clip) -> tuple[Formulation, Solution, Candidate]:
    """Every parameter's state there; solved, decoded and replayed."""
    made = formulation(clip)
    found = solved(made, bounds={v: (made.model.upper[v],) * 2 for v in made.host.values()})
    decisions = decode(made, found.values)
    assert decisions.clip is clip and set(decisions.tiers.values()) == {Tier.HOST}
    return made, found, evaluate(MODEL, captured(MODEL), decisions, made.machine, ROOM)


def test_gradients_that_die_in_backward_lower_rows_and_replay() -> None:
    (late, late_found, late_plan), (early, early_found, early_plan) = map(all_on_host, Clip)
    assert peak_bytes(early, early_found) < peak_bytes(late, late_found)
    assert early_plan.replay.curve_bytes[-1] < late_plan.replay.curve_bytes[-1]
    assert early_plan.replay.peak_bytes <= late_plan.replay.peak_bytes


def test_steps_on_the_host_cost_what_backward_does_not_hide() -> None:
    (_, late, late_plan), (_, early, early_plan) = map(all_on_host, Clip)
    saved = late_plan.replay.step_seconds - early_plan.replay.step_seconds
    assert 0 < saved <= late_plan.replay.timeline.end_seconds
    assert early.objective < late.objective
    assert early_plan.replay.optimizer_seconds == 0 and early_plan.replay.exposed_host_seconds > 0


def test_what_is_declared_is_none_or_unknown() -> None:
    assert [clip_for(said, 1) for said in (None, "none", "unknown")] == [Clip.NONE, Clip.NONE, Clip.UNKNOWN]
    assert clip_for("unknown", 4) is Clip.UNKNOWN
    with pytest.raises(PlanError, match="expected accumulate 1 with clip none, found 4"):
        clip_for(None, 4)
    with pytest.raises(PlanError, match=r"expected clip None, or one of unknown, none, found '1\.0'"):
        clip_for("1.0", 1)


def test_the_command_line_writes_what_is_declared_and_check_reads_it(run: Command, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    arguments = ("plan", "net.py:build", "--cluster", "h100x8", "--budget", "1GiB", "--mesh", "dp=8")
    assert run(*arguments, "--clip", "none")[0] == 0
    assert load_plan(tmp_path / "net.plan")[0].decisions.clip is Clip.NONE
    assert "accumulate 1, clip none" in (tmp_path / "net.plan").read_text()
    assert run("check", "net.plan")[0] == 0
    assert "clip none" in run("show", "net.plan")[1]
    code, _, err = run(*arguments, "--clip", "1.0")
    assert code == 2 and "expected one of unknown, none, found '1.0'" in err
