"""`plan`, then what reads its files, on a small model for machines that are not here: nothing is measured."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.planner.command_line import NET

from shardwright.ir import load_plan

Run = Callable[..., tuple[int, str, str]]
MODEL = f"""{NET}
def broken():
    raise ValueError("no data")
"""


@pytest.fixture
def run(run: Run, tmp_path: Path) -> Run:
    (tmp_path / "net.py").write_text(MODEL)
    return run


def plan_arguments(budget: str, function: str = "build") -> tuple[str, ...]:
    return ("plan", f"net.py:{function}", "--cluster", "h100x8", "--budget", budget)


def test_plan_writes_files_that_show_and_check_accept(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*plan_arguments("1GiB"))
    assert code == 0, err
    assert "8 ranks" in out
    assert "ddp" in out
    assert "gap" in err  # progress, one line a stage
    assert "written to net.plan" in err
    before = (tmp_path / "net.plan").read_text()
    shown = run("show", "net.plan")
    assert shown[0] == 0
    assert "up" in shown[1]
    assert "ms modelled" in shown[1]
    code, _, err = run("check", "net.plan")
    assert code == 0, err
    assert "nothing to change" in err
    assert (tmp_path / "net.plan").read_text() == before


def test_plan_as_json_equals_what_is_written(run: Run, tmp_path: Path) -> None:
    code, out, _ = run(*plan_arguments("1GiB"), "-o", "other.plan", "--json", "--mesh", "dp=8")
    value = json.loads(out)
    plan, graph = load_plan(tmp_path / "other.plan")
    assert code == 0
    assert value["file"] == "other.plan"
    assert value["mesh"] == {"dp": 8}
    assert value["identity"]["graph"] == plan.identity.graph_hash
    assert value["prediction"]["device_bytes"] == plan.prediction.device_bytes
    assert "up.weight" in graph.types


def test_dtype_converts_the_model(run: Run, tmp_path: Path) -> None:
    assert run(*plan_arguments("1GiB"), "--dtype", "bfloat16")[0] == 0
    plan, graph = load_plan(tmp_path / "net.plan")
    assert plan.identity.dtype == "bfloat16"
    assert graph.types["up.weight"].dtype == "bf16"


def test_infeasible_exits_1_names_the_smallest_budget_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*plan_arguments("4KiB"), "--json")
    assert code == 1
    assert json.loads(out)["error"] == "InfeasibleError"
    assert "smallest that works" in err
    assert "Traceback" not in err
    assert not (tmp_path / "net.plan").exists()


def test_a_target_that_raises_exits_1_with_its_line(run: Run) -> None:
    code, _, err = run(*plan_arguments("1GiB", "broken"))
    assert code == 1
    assert "no data" in err
    assert "net.py:" in err
    assert "Traceback" not in err


def test_check_refuses_a_budget_that_no_longer_holds(run: Run, tmp_path: Path) -> None:
    assert run(*plan_arguments("1GiB"))[0] == 0
    path = tmp_path / "net.plan"
    edited = path.read_text().replace("device 1GiB", "device 8KiB")
    path.write_text(edited)
    code, _, err = run("check", "net.plan")
    assert code == 1
    assert "8KiB" in err
    assert path.read_text() == edited


def test_defaults_are_those_of_the_python_function(run: Run) -> None:
    from shardwright.planner import defaults

    _, out, _ = run("plan", "--help")
    assert f"[default: {defaults.TIME_LIMIT_SECONDS}" in out
    assert f"[default: {defaults.GAP};" in out
