"""Lowering makes the text that its cases expect, and that text computes on all ranks what the captured graph computes.

A case is decisions, a captured graph, `---`, and the rank graph. Decisions are comments; what is not said is whole on
every rank, read as it is made, kept:

    # mesh: dp=2, tp=2
    # place VALUE LAYOUT
    # read NODE LAYOUT; LAYOUT
    # recompute VALUE      # offload VALUE      # offload VALUE disk      # gather PARAM keep      # parameter PARAM
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.ir import (
    Clip,
    Decisions,
    Fate,
    Gather,
    Graph,
    InputKind,
    Mesh,
    Phase,
    PlanError,
    Tier,
    parse_graph,
    parse_layout,
    print_graph,
    replicated,
)
from shardwright.passes.lower import lower
from shardwright.passes.schedule_check import check_schedule
from shardwright.runtime.lockstep import run_lockstep
from shardwright.runtime.shards import shard, unshard

CASES = sorted((Path(__file__).parent.parent / "cases" / "lower").glob("*.ir"))
ONE = Mesh((), ())


@dataclass(frozen=True)
class Case:
    before: Graph
    decisions: Decisions
    text: str
    expected: str


def read_case(path: Path) -> Case:
    text, _, expected = path.read_text().partition("---\n")
    graph = parse_graph(text)
    axes = [part.split("=") for part in text.splitlines()[0].removeprefix("# mesh: ").split(", ")]
    mesh = Mesh(tuple(axis for axis, _ in axes), tuple(int(size) for _, size in axes))
    said = {
        kind: dict(re.findall(rf"^# {kind} (\S+) ?(.*)$", text, re.MULTILINE))
        for kind in ("place", "read", "recompute", "offload", "gather", "parameter")
    }
    layouts = {name: replicated(mesh) for name in graph.types}
    layouts.update({name: parse_layout(layout) for name, layout in said["place"].items()})
    reads = {node.name: tuple(layouts[name] for name in node.operands) for node in graph.nodes}
    reads.update({name: tuple(map(parse_layout, told.split(";"))) for name, told in said["read"].items()})
    fates = dict.fromkeys(said["recompute"], Fate.RECOMPUTE) | dict.fromkeys(said["offload"], Fate.OFFLOAD)
    gathers = {name: Gather(kept) for name, kept in said["gather"].items()}
    tiers = {name: Tier(tier) for name, tier in said["offload"].items() if tier}
    lying = dict.fromkeys(said["parameter"], Tier.HOST)
    decisions = Decisions(mesh, layouts, reads, fates, gathers, tiers | lying, lying, clip=Clip.NONE)
    return Case(graph, decisions, text, expected)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path: Path, update_golden: bool) -> None:
    """As expected, well formed, and equal in numbers."""
    case = read_case(path)
    after = lower(case.before, case.decisions)
    if update_golden:
        path.write_text(f"{case.text}---\n{print_graph(after)}")
        case = read_case(path)
    assert print_graph(after) == case.expected
    assert parse_graph(case.expected) == after
    check_schedule(after)
    assert_same_numbers(case.before, after, case.decisions)


def assert_same_numbers(before: Graph, after: Graph, decisions: Decisions) -> None:
    """Small integers: sums are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    mesh = decisions.mesh
    whole = {
        given.name: torch.ones(before.types[given.name].shape)
        if given.kind is InputKind.TANGENT
        else torch.randint(-2, 3, before.types[given.name].shape, generator=generator).float()
        for given in before.inputs
    }
    ranks = [
        {name: shard(value, decisions.layouts[name], mesh, rank) for name, value in whole.items()}
        for rank in range(mesh.num_ranks)
    ]
    (expected,), found = run_lockstep(before, ONE, [whole]), run_lockstep(after, mesh, ranks)
    for key, name in returned(before).items():
        layout = decisions.layouts.get(key, replicated(mesh))
        parts: list[Tensor] = [values[returned(after)[key]] for values in found]
        assert torch.equal(unshard(parts, layout, mesh), expected[name]), key


def returned(graph: Graph) -> dict[str, str]:
    """Gradients by parameter; outputs by path, which names no value."""
    loss = {".loss": graph.loss} if graph.loss else {}
    return {**loss, **graph.outputs, **graph.gradients}


def test_decisions_that_are_missing_or_cannot_be_are_refused_by_name() -> None:
    case = read_case(next(path for path in CASES if path.stem == "offload"))
    decisions = case.decisions
    layouts = {name: layout for name, layout in decisions.layouts.items() if name != "h"}
    with pytest.raises(PlanError, match="`place` line for h"):
        lower(case.before, replace(decisions, layouts=layouts))
    with pytest.raises(PlanError, match="each of the 2 operands of y, found 1"):
        lower(case.before, replace(decisions, reads={**decisions.reads, "y": decisions.reads["a"]}))
    with pytest.raises(PlanError, match="offload at"):
        lower(case.before, replace(decisions, fates={"at": Fate.OFFLOAD}))


def test_backward_reads_nothing_that_forward_drops() -> None:
    """In a chain that is made again, no node of backward reads forward's copies."""
    case = read_case(next(path for path in CASES if path.stem == "recompute_chain"))
    after = lower(case.before, case.decisions)
    read = {name for node in after.nodes if node.phase is Phase.BACKWARD for name in node.operands}
    assert not read & {"h", "a", "y"}
