"""`check` on plan files: untouched, with a line taken out, with a line that no rule allows."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.planner.command_line import Command, build_decoder, command
from tests.planner.fast_host import fast_host

from shardwright.ir import Cluster, load_plan
from shardwright.ir.cluster_text import print_cluster
from shardwright.planner.api import check_plan, plan

TIGHT_SHARE = 0.7
"""Of what keeping everything takes."""
BUDGET = re.compile(r"^(budget +device )\S+(?=,)", re.MULTILINE)
RECOMPUTE = re.compile(r"^recompute .*\n", re.MULTILINE)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return command(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Texts of a plan that recomputes, with a budget of just its peak, and of its graph."""
    folder = tmp_path_factory.mktemp("tight")
    module, args = build_decoder()
    (folder / "two.toml").write_text(print_cluster(fast_host()))
    cluster = replace(fast_host(), name="two.toml")
    loose = plan(module, args, cluster=cluster, budget="1GiB").plan.prediction.device_bytes
    found = plan(module, args, cluster=cluster, budget=int(TIGHT_SHARE * loose))
    found.save(folder / "net.plan")
    text = (folder / "net.plan").read_text()
    peak = found.plan.prediction.device_bytes
    return BUDGET.sub(rf"\g<1>{peak}B", text), (folder / "net.graph").read_text()


def without_line(text: str, number: int) -> str:
    """Without that `recompute` line."""
    line = RECOMPUTE.findall(text)[number]
    return text.replace(line, "")


def checked(run: Command, text: str, graph: str) -> tuple[int, str, str]:
    """Exit code, stderr, and the plan file afterwards."""
    Path("net.plan").write_text(text)
    Path("net.graph").write_text(graph)
    code, _, err = run("check", "net.plan")
    assert "Traceback" not in err
    return code, err, Path("net.plan").read_text()


@pytest.mark.timeout(120)
def test_a_plan_that_nobody_edited_stays_as_it_is(run: Command, tight: tuple[str, str]) -> None:
    code, err, after = checked(run, *tight)
    assert code == 0, err
    assert "nothing to change" in err
    assert after == tight[0]


@pytest.mark.timeout(120)
def test_a_recompute_line_less_is_refused_where_it_no_longer_fits(run: Command, tight: tuple[str, str]) -> None:
    """At least one line holds the plan within its budget; the reason has both sizes and what takes the room."""
    text, graph = tight
    refusals = 0
    for number in range(len(RECOMPUTE.findall(text))):
        edited = without_line(text, number)
        code, err, after = checked(run, edited, graph)
        if code == 0:
            continue
        refusals += 1
        assert code == 1
        assert re.search(r"expected a plan within device \S+, host 0B; found a peak of device \S+, host 0B in", err)
        assert "are the largest. Recompute or offload more, or raise the budget" in err
        assert after == edited, "a refused file is not touched"
    assert refusals


@pytest.mark.timeout(120)
def test_a_recompute_line_less_is_accepted_where_it_still_fits(run: Command, tight: tuple[str, str]) -> None:
    """A line that the tight budget cannot do without, under a large one: with a new prediction, not slower, and of what
    it now holds; the certificate was another plan's."""
    text, graph = tight
    lines = range(len(RECOMPUTE.findall(text)))
    needed = next(i for i in lines if checked(run, without_line(text, i), graph)[0] == 1)
    assert checked(run, text, graph)[0] == 0
    before, _ = load_plan(Path("net.plan"))
    edited = BUDGET.sub(r"\g<1>1GiB", without_line(text, needed))
    code, err, _ = checked(run, edited, graph)
    assert code == 0, err
    assert "rewritten" in err
    after, _ = load_plan(Path("net.plan"))
    assert len(after.decisions.fates) < len(before.decisions.fates)
    assert after.prediction.step_seconds <= before.prediction.step_seconds
    assert after.prediction.device_bytes >= before.prediction.device_bytes
    assert after.certificate is None
    assert checked(run, Path("net.plan").read_text(), graph)[1].endswith("nothing to change\n")


@pytest.mark.timeout(120)
def test_a_layout_that_no_rule_allows_is_refused_naming_the_operator_and_what_is_allowed(
    run: Command, tight: tuple[str, str]
) -> None:
    """GELU of shards has shards as results, never sums to be added up."""
    text, graph = tight
    edited = text.replace("\nplace ", "\nplace layers.*/gelu P(sum)\nplace ", 1)
    assert edited != text
    code, err, after = checked(run, edited, graph)
    assert code == 1
    assert "expected layers.0/gelu (aten.gelu.default) to run on axis dp in a way its rules allow" in err
    assert "allowed: " in err.split("found", 1)[1]
    assert after == edited


@pytest.mark.timeout(120)
def test_prices_that_were_measured_are_read_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For this machine's ranks `check` finds what planning wrote to the database, and changes nothing."""
    from shardwright.runtime import device_prices
    from shardwright.runtime.measured_prices import MeasuredPrices
    from shardwright.runtime.profile_db import ProfileDb

    database = ProfileDb(tmp_path / "prices.sqlite")
    made: list[MeasuredPrices] = []

    def prices(cluster: Cluster, _: None, *, measure: bool, progress: Callable[[str], None] | None) -> MeasuredPrices:
        made.append(MeasuredPrices(cluster, database, measure=measure, progress=progress, budget_seconds=2.0))
        return made[-1]

    monkeypatch.setattr(device_prices, "MeasuredPrices", prices)
    monkeypatch.setattr(device_prices, "ProfileDb", lambda: None)
    module, args = build_decoder()
    found = plan(module, args, cluster="cpu:1", budget="1GiB")
    assert check_plan(found.plan, found.graph) == found.plan
    assert [part.num_measured > 0 for part in made] == [True, False]
