"""What `verify` prints of a comparison: the differences, weak passes by name, failures, the verdict."""

import io
import json

import pytest
from rich.console import Console, RenderableType

from shardwright.planner.verify_report import comparison_table, exit_code, fault_table, report_json
from shardwright.runtime.faults import Fault
from shardwright.runtime.verify import Report
from shardwright.runtime.verify_rank import Comparison

CLEAN = Comparison(1e-7, (("a.weight", 3e-6), ("b.weight", 1e-8)), ("k_proj.bias",), (), 1e-5, True)
BROKEN = Comparison(0.5, (("a.weight", 1.0),), (), tuple(f"gradient of w{i}: too far" for i in range(12)), 1e-5)


def printed(renderable: RenderableType) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100, highlight=False).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_an_equal_run_shows_its_largest_differences_and_weak_passes() -> None:
    lines = printed(comparison_table(CLEAN, "net.plan"))
    assert lines[1].split() == ["loss", "1.00e-07"]
    assert lines[2].split() == ["a.weight", "3.00e-06"]
    assert "passed only beside the model's other gradients (1): k_proj.bias" in lines
    assert "bitwise equal to the same program with everything kept" in lines
    assert lines[-1] == "net.plan: equal (rtol 1e-05)"


def test_failures_are_listed_before_the_verdict() -> None:
    lines = printed(comparison_table(BROKEN, "net.plan"))
    assert "gradient of w0: too far" in lines
    assert lines[-2:] == ["and 2 more", "net.plan: differs (rtol 1e-05)"]


def test_faults_that_were_missed_are_named() -> None:
    report = Report(CLEAN, ((Fault.parse("drop:0"), BROKEN), (Fault.parse("scale:0"), CLEAN)), ("w~R/all_gather",))
    assert printed(fault_table(report)) == ["MISSED scale:0, w~R/all_gather", "1 of 2 faults caught"]


def test_faults_under_a_step_that_differs_anyway_prove_nothing() -> None:
    report = Report(BROKEN, ((Fault.parse("drop:0"), BROKEN),), ("w~R/all_gather",))
    assert printed(fault_table(report))[0] == "the unbroken step differs: what was noticed proves nothing"
    assert exit_code(report) == 3


@pytest.mark.parametrize(
    ("clean", "broken", "code"),
    [(CLEAN, (), 0), (BROKEN, (), 1), (CLEAN, (BROKEN, BROKEN), 1), (CLEAN, (BROKEN, CLEAN), 3)],
)
def test_the_exit_code_tells_equal_from_differs_and_caught_from_missed(
    clean: Comparison, broken: tuple[Comparison, ...], code: int
) -> None:
    faults = tuple((Fault.parse(f"drop:{number}"), comparison) for number, comparison in enumerate(broken))
    assert exit_code(Report(clean, faults, ("a", "b"))) == code


def test_json_holds_the_clean_run_and_every_fault() -> None:
    value = json.loads(json.dumps(report_json(Report(CLEAN, ((Fault.parse("drop:0"), BROKEN),)))))
    assert value["clean"]["equal"] is True
    assert value["clean"]["largest"]["a.weight"] == 3e-6
    assert value["injected"][0]["fault"] == "drop:0"
    assert value["injected"][0]["noticed"] is True
    assert value["num_missed"] == 0
