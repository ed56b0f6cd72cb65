"""What `verify` prints of differences: nearest to the limit first, weak passes by name, NaN is never equal."""

import io
import json
from dataclasses import dataclass

from rich.console import Console, RenderableType

from shardwright.planner.verify_report import fault_table, verification_json, verification_table


@dataclass(frozen=True)
class Item:
    kind: str
    name: str
    difference: float
    limit: float
    second_term: bool = False


@dataclass(frozen=True)
class Found:
    differences: tuple[Item, ...]
    passed: bool


def printed(renderable: RenderableType) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=100, highlight=False).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_largest_share_of_a_limit_comes_first_and_the_verdict_last() -> None:
    items = (
        Item("gradient", "a.weight", 1e-6, 1e-5),
        Item("loss", "step 1", 2e-6, 1e-6),
        Item("gradient", "b", 0.0, 0.0),
    )
    lines = printed(verification_table(Found(items, False), "net.plan"))
    assert lines[1].split() == ["loss", "step", "1", "2.00e-06", "1.00e-06", "2.00"]
    assert "a.weight" in lines[2]
    assert lines[-1] == "net.plan: differs"


def test_what_passed_only_by_the_second_term_is_named() -> None:
    items = (Item("gradient", "k_proj.bias", 1e-9, 1e-6, second_term=True), Item("gradient", "w", 1e-9, 1e-6))
    lines = printed(verification_table(Found(items, True), "net.plan"))
    assert "passed only by the size of all gradients together (1): k_proj.bias" in lines
    assert lines[-1] == "net.plan: equal"


def test_nan_is_past_every_limit() -> None:
    items = (Item("gradient", "w", 0.9, 1.0), Item("gradient", "nan", float("nan"), 1.0))
    assert "nan" in printed(verification_table(Found(items, False), "net.plan"))[1]


def test_only_the_ten_nearest_are_listed() -> None:
    items = tuple(Item("gradient", f"w{number}", number * 1e-3, 1.0) for number in range(25))
    lines = printed(verification_table(Found(items, True), "net.plan"))
    assert "w24" in lines[1]
    assert "and 15 more, all nearer to zero" in lines


def test_faults_that_were_missed_are_named() -> None:
    lines = printed(fault_table({"drop:0": True, "scale:0": False}))
    assert lines == ["scale:0: not noticed", "1 of 2 faults noticed"]


def test_json_holds_everything_compared() -> None:
    value = json.loads(json.dumps(verification_json(Found((Item("loss", "step 1", 0.0, 1.0),), True))))
    assert value["passed"] is True
    assert value["differences"][0]["name"] == "step 1"
