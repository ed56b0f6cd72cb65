"""`sweep` on a small model for machines that are not here: table, JSON, picture and plans tell one monotone curve."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.planner.command_line import NET

from shardwright.ir import format_size, load_plan, parse_size
from shardwright.ir.units import parse_seconds
from shardwright.planner.sweep import spaced

Run = Callable[..., tuple[int, str, str]]
TARGET = ("net.py:build", "--cluster", "h100x8")
NUM_POINTS = 5
SVG = "{http://www.w3.org/2000/svg}"


def call(*arguments: str) -> tuple[int, str, str]:
    from shardwright.planner.cli import main

    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
    return int(exit_info.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that commands run in, with the model."""
    path = tmp_path_factory.mktemp("sweep")
    (path / "net.py").write_text(NET)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path


@pytest.fixture(scope="module")
def swept(folder: Path) -> dict[str, Any]:
    """JSON of a sweep that also wrote `curve.svg` and `plans/`."""
    options = ("--points", str(NUM_POINTS), "--save", "plans", "-o", "curve.svg", "--json")
    code, out, err = call("sweep", *TARGET, *options)
    assert code == 0, err
    assert "Traceback" not in err
    value: dict[str, Any] = json.loads(out)
    return value


def test_time_never_falls_and_the_peak_never_rises_as_the_budget_tightens(swept: dict[str, Any]) -> None:
    points = swept["points"]
    assert len(points) == NUM_POINTS
    for looser, tighter in pairwise(points):
        assert tighter["budget_bytes"] < looser["budget_bytes"]
        assert tighter["step_seconds"] >= looser["step_seconds"]
        assert tighter["peak_bytes"] <= looser["peak_bytes"]
    assert all(point["peak_bytes"] <= point["budget_bytes"] for point in points)
    assert points[-1]["step_seconds"] > points[0]["step_seconds"]


def test_its_ends_are_those_that_plan_finds(swept: dict[str, Any]) -> None:
    """The peak of the plan under a budget that binds nothing, and the smallest budget that a refusal names."""
    _, out, _ = call("plan", *TARGET, "--budget", "1GiB", "--json")
    fastest = json.loads(out)["prediction"]
    first, last = swept["points"][0], swept["points"][-1]
    assert first["step_seconds"] == fastest["step_seconds"]
    assert first["peak_bytes"] == fastest["device_bytes"]
    assert fastest["device_bytes"] <= first["budget_bytes"] < 1.01 * fastest["device_bytes"]
    _, _, err = call("plan", *TARGET, "--budget", "1B")
    assert last["budget_bytes"] == swept["smallest_bytes"] == parse_size(smallest_named(err))


def test_every_plan_that_it_saves_is_the_one_it_reports_and_passes_check(swept: dict[str, Any]) -> None:
    for point in swept["points"]:
        path = Path(point["file"])
        assert path.parent == Path("plans")
        assert parse_size(path.stem) == point["budget_bytes"]
        plan, graph = load_plan(path)
        assert "up.weight" in graph.types
        assert plan.budget.device_bytes == point["budget_bytes"]
        assert plan.prediction.device_bytes == point["peak_bytes"]
        code, _, err = call("check", str(path))
        assert code == 0, err
        assert "nothing to change" in err


def test_baselines_are_compared_in_the_memory_that_they_need(swept: dict[str, Any]) -> None:
    """The plan named beside a baseline is at least as fast as every point that fits there, and as the baseline."""
    figures = {row["name"]: row for row in swept["baselines"] if row["step_seconds"] is not None}
    assert {"ddp", "fsdp", "fsdp+recompute", "tp+sp"} <= figures.keys()
    for row in figures.values():
        fitting = [p["step_seconds"] for p in swept["points"] if p["peak_bytes"] <= row["peak_bytes"]]
        assert row["planned_seconds"] <= min([*fitting, row["step_seconds"]])
        assert row["dominated"]
        assert row["beaten"] == (row["planned_seconds"] < row["step_seconds"])
    assert swept["baselines"][-1]["name"] == "zero-1"
    assert not swept["baselines"][-1]["dominated"]


def test_the_picture_has_a_mark_for_every_point_and_every_baseline(swept: dict[str, Any]) -> None:
    root = ElementTree.parse(swept["picture"]).getroot()
    assert root.tag == f"{SVG}svg"
    groups = [group.get("class", "").split() for group in root.iter(f"{SVG}g")]
    assert sum("point" in kinds for kinds in groups) == NUM_POINTS
    judged = [row["name"] for row in swept["baselines"] if row["step_seconds"] is not None]
    assert sum("rival" in kinds for kinds in groups) == len(judged) > 0
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert "net.py:build on h100x8" in texts
    assert any("x f32[32, 64]" in text for text in texts)
    assert any(text.startswith("step time, ") for text in texts)
    assert any(text.startswith("peak memory of a rank, ") for text in texts)
    for name in judged:
        assert any(name in text for text in texts), name


def test_the_table_tells_the_same_as_the_json(swept: dict[str, Any], folder: Path) -> None:
    code, out, err = call("sweep", *TARGET, "--points", str(NUM_POINTS))
    assert code == 0, err
    assert f"{NUM_POINTS} of {NUM_POINTS}" in err
    assert all(len(line) <= 100 for line in out.splitlines())
    rows = [line.split() for line in out.splitlines() if re.match(r"\s*[\d.]+[KM]iB ", line)]
    assert [row[0] for row in rows] == [format_size(point["budget_bytes"]) for point in swept["points"]]
    assert [row[1] for row in rows] == [format_size(point["peak_bytes"]) for point in swept["points"]]
    times = [parse_seconds(row[2]) for row in rows]
    assert times == sorted(times)
    assert times == pytest.approx([point["step_seconds"] for point in swept["points"]], rel=5e-3)
    assert "dominated: " in out
    assert "zero-1" in out


def test_a_budget_that_nothing_fits_exits_1_as_plan_does_and_names_one_that_works(folder: Path) -> None:
    code, out, err = call("sweep", *TARGET, "--budgets", "1GiB,4KiB", "-o", "none.svg", "--save", "none")
    assert (code, out) == (1, "")
    assert refusal(err) == refusal(call("plan", *TARGET, "--budget", "4KiB")[2])
    assert not Path("none.svg").exists()
    assert not Path("none").exists()

    smallest = smallest_named(err)
    code, out, err = call("sweep", *TARGET, "--budgets", f"{smallest}, 1GiB", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [point["budget_bytes"] for point in found["points"]] == [2**30, parse_size(smallest)]
    assert found["smallest_bytes"] is None


def refusal(err: str) -> str:
    return err[err.index("error: ") :]


def smallest_named(err: str) -> str:
    found = re.search(r"the smallest that works is (\S+)$", err, re.MULTILINE)
    assert found is not None, err
    return found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budgets", "1GiB", "--points", "3"), "found both"),
        (("--budgets", "1GiB,70"), "unit"),
        (("--points", "1"), "--points"),
        (("-o", "curve.png"), ".svg"),
        (("-o", "gone/curve.svg"), "gone"),
        (("--save", "broken.py"), "broken.py"),
        (("--optimizer", "adamx"), "adamw"),
    ],
)
def test_usage_errors_exit_2_before_the_target_is_imported(
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    Path("broken.py").write_text("raise RuntimeError('imported')\n")
    code, out, err = call("sweep", "broken.py:build", *TARGET[1:], *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_budgets_are_spaced_by_equal_factors_and_print_as_they_are() -> None:
    largest, smallest = 123_456_789, 10_000_001
    sizes = spaced(largest, smallest, 6)
    assert (sizes[0], sizes[-1], len(sizes)) == (largest, smallest, 6)
    factors = [looser / tighter for looser, tighter in pairwise(sizes)]
    assert max(factors) < 1.01 * min(factors)
    assert all(parse_size(format_size(size)) == size for size in sizes[1:-1])
    assert spaced(512, 512, 6) == [512]
    assert spaced(102, 100, 6) == [102, 101, 100]
