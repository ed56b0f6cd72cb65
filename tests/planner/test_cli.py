"""The command line: exit codes, messages, JSON, speed of help; commands that need a plan file only."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwright.ir import Graph, save_plan
from shardwright.ir.plan import Plan

Run = Callable[..., tuple[int, str, str]]
PLAN = ("plan", "m.py:build", "--cluster", "cpu:2", "--budget", "1GiB")


@pytest.fixture
def run(run: Run, tmp_path: Path) -> Run:
    """In a folder with `m.py`, which cannot be imported."""
    (tmp_path / "m.py").write_text("raise RuntimeError('imported')\n")
    return run


@pytest.fixture
def plan_file(llama_plan: Plan, llama_graph: Graph, tmp_path: Path) -> Path:
    path = tmp_path / "net.plan"
    save_plan(path, llama_plan, llama_graph)
    return path


def test_help_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for command in ("plan", "sweep", "show", "check", "verify", "doctor"):
        assert f"  {command} " in out


def test_every_command_has_json(run: Run) -> None:
    for command in ("plan", "sweep", "show", "check", "verify", "doctor"):
        assert "--json" in run(command, "--help")[1]


def test_help_loads_neither_torch_nor_the_solver() -> None:
    """What makes it answer at once."""
    code = (
        "import sys; sys.argv = ['shardwright', '--help']\n"
        "from shardwright.planner.cli import main\n"
        "try: main()\n"
        "except SystemExit: print([m for m in ('torch', 'ortools', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plam",), "Did you mean 'plan'"),
        (("show", "--nonsense"), "--nonsense"),
        (("plan", "m.py:build", "--cluster", "cpu:2"), "--budget"),
        ((*PLAN[:-1], "70"), "unit"),
        ((*PLAN[:-1], "70GoB"), "GoB"),
        ((*PLAN, "--host", "lots"), "--host"),
        ((*PLAN[:3], "h100x9", *PLAN[4:]), "h100x9"),
        ((*PLAN, "--mesh", "dp2"), "dp=2,tp=4"),
        ((*PLAN, "--mesh", "dp=2,dp=2"), "each axis once"),
        ((*PLAN, "--dtype", "fp8"), "bfloat16"),
        ((*PLAN, "--optimizer", "adamx"), "adamw"),
        (("plan", "nothing", *PLAN[2:]), "file.py:function"),
        (("plan", "gone.py:build", *PLAN[2:]), "gone.py"),
        (("plan", "m.py:not a name", *PLAN[2:]), "not a name"),
        (("plan", "hf:m.py", *PLAN[2:]), "--batch"),
        (("show", "gone.plan"), "gone.plan"),
        (("verify", "m.py", "--inject", "drop"), "drop:K"),
    ],
)
def test_usage_errors_exit_2_and_say_what_is_wrong(run: Run, arguments: tuple[str, ...], message: str) -> None:
    """Without importing the target: `m.py` raises when it is imported."""
    code, out, err = run(*arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not out


def test_no_arguments_is_help(run: Run) -> None:
    code, out, err = run()
    assert code == 2
    assert "Usage: shardwright" in out + err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_text_that_is_no_plan_is_refused_without_traceback(run: Run, tmp_path: Path, as_json: bool) -> None:
    (tmp_path / "bad.plan").write_text("plan 1\nnonsense\n")
    code, out, err = run("show", "bad.plan", *(["--json"] if as_json else []))
    assert code == 1
    assert err.startswith("error: ")
    assert "bad.plan" in err
    assert "Traceback" not in err
    if as_json:
        assert json.loads(out)["message"] in err


def test_show_prints_the_modules(run: Run, plan_file: Path) -> None:
    code, out, _ = run("show", str(plan_file))
    assert code == 0
    assert "model.layers.* x32" in out
    assert "baseline" in out
    assert "\x1b" not in out  # not a terminal: no colours


def test_show_of_some_modules(run: Run, plan_file: Path) -> None:
    _, out, _ = run("show", str(plan_file), "--module", "model.layers.3.mlp*")
    assert "model.layers.3.mlp" in out
    assert "lm_head" not in out


def test_show_as_json(run: Run, plan_file: Path) -> None:
    code, out, _ = run("show", str(plan_file), "--json")
    assert code == 0
    assert json.loads(out)["mesh"] == {"dp": 8, "tp": 8}


def test_show_needs_neither_torch_nor_the_model(plan_file: Path) -> None:
    code = (
        f"import sys; sys.argv = ['shardwright', 'show', {str(plan_file)!r}]\n"
        "from shardwright.planner.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: print(e.code, [m for m in ('torch', 'ortools') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_doctor_reports_this_machine(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["healthy"]
    assert report["versions"]["torch"].startswith("2.13.")
    assert report["cores"] >= 1
    assert report["memory_bytes"] > 2**28
    assert report["engines"]["gloo"]


def test_doctor_for_people(run: Run) -> None:
    code, out, _ = run("doctor")
    assert code == 0
    assert "torch" in out
    assert "prices" in out
