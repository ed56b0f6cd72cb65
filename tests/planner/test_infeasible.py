"""Where nothing fits, the answer names a budget that does, what takes the room and ways out; and it keeps its word."""

import math
import re
from pathlib import Path

import pytest
from tests.planner.command_line import SMALL, Command, build_decoder, command
from tests.planner.fast_host import fast_host
from tests.planner.kept_word import require_kept
from tests.planner.measured_step import measured_peak

from shardwright.ir import InfeasibleError, PlanError, format_size, load_plan, parse_size
from shardwright.planner.api import plan
from shardwright.planner.linear import Solution, Status
from shardwright.runtime.capture import capture
from shardwright.runtime.rank_pool import RankPool

PLAN = ("plan", "tests.planner.command_line:build_llama", "--cluster", "two.toml")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return command(monkeypatch, capsys, tmp_path)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_the_smallest_budget_it_names_is_one_that_plans_and_runs(
    run: Command, tmp_path: Path, two_ranks: RankPool
) -> None:
    code, out, err = run(*PLAN, "--budget", "64KiB")
    assert (code, out) == (1, "")
    assert "Traceback" not in err
    assert not (tmp_path / "net.plan").exists()
    smallest = re.search(r"the smallest that works is (\S+)$", err, re.MULTILINE)
    assert smallest is not None

    code, _, err = run(*PLAN, "--budget", smallest[1])
    assert code == 0, err
    found, graph = load_plan(tmp_path / "net.plan")
    assert found.budget.device_bytes == parse_size(smallest[1])
    assert found.prediction.device_bytes <= found.budget.device_bytes
    for measured in two_ranks.run(measured_peak, found, graph, SMALL, True, timeout_seconds=120):
        require_kept(found, measured)


def refusal(budget: int, host: int = 0) -> InfeasibleError:
    module, args = build_decoder()
    with pytest.raises(InfeasibleError) as found:
        plan(module, args, cluster=fast_host(), budget=budget, host=host)
    return found.value


@pytest.mark.timeout(120)
def test_three_consumers_and_the_ways_out_are_named_with_sizes() -> None:
    error = refusal(1000)
    lines = str(error).splitlines()
    consumers = lines[lines.index("largest consumers at its peak:") + 1 : lines.index("ways out:")]
    ways = lines[lines.index("ways out:") + 1 :]
    assert len(consumers) == 3
    sizes = [parse_size(line.split("  ")[-1]) for line in consumers]
    assert sizes == sorted(sizes, reverse=True)
    module, args = build_decoder()
    known = capture(module, args).graph.types
    names = [re.sub(r"~.*", "", line.split()[0]) for line in consumers]  # without what the rewriter appends
    assert all(name in known for name in names), consumers
    given = re.search(r"give (\S+) a rank", ways[0])
    assert given is not None
    assert parse_size(given[1]) == error.smallest_bytes
    assert any("--host" in way for way in ways)
    assert any("ranks" in way for way in ways)
    with_plenty = str(refusal(1000, host=2**30))
    assert "raise --host" not in with_plenty and "--clip none" in with_plenty


@pytest.mark.timeout(120)
def test_it_says_when_not_even_parameters_gradients_and_state_fit() -> None:
    """Half of each parameter, its gradient and AdamW's two moments on each of two ranks, and a count of steps."""
    module, _ = build_decoder()
    held = sum(4 * parameter.numel() * 4 // 2 + 4 for parameter in module.parameters())
    said = f"parameters, gradients and optimizer state alone take {format_size(held)} of it"
    assert said in str(refusal(1000)).splitlines()
    assert "alone take" not in str(refusal(held + 10_000))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("host", [0, pytest.param(20_000, marks=pytest.mark.study)], ids=["host-0", "host-too-small"])
def test_planning_again_at_the_smallest_budget_succeeds_with_any_host(host: int) -> None:
    """Also where the host is too small for what the smallest plans would put there."""
    smallest = refusal(1000, host).smallest_bytes
    module, args = build_decoder()
    found = plan(module, args, cluster=fast_host(), budget=smallest, host=host).plan
    assert found.prediction.device_bytes <= smallest
    assert found.prediction.host_bytes <= host


def test_where_the_clock_runs_out_before_anything_is_found_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Solution(Status.UNKNOWN, math.inf, -math.inf, ())
    monkeypatch.setattr("shardwright.planner.search.solve", lambda *_args, **_kwargs: nothing)
    module, args = build_decoder()
    with pytest.raises(PlanError, match="within 7 s, found none in that time; give a longer time limit"):
        plan(module, args, cluster=fast_host(), budget=1000, time_limit=7)


@pytest.mark.study
@pytest.mark.timeout(300)
def test_a_larger_host_needs_a_smaller_device() -> None:
    """From the first bytes on: what passes through the host while the optimizer steps is counted in."""
    sizes = [refusal(1000, host).smallest_bytes for host in (0, 20_000, 60_000, 100_000, 200_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
