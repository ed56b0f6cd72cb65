"""Every pass makes the text that its cases expect, and that text computes what the text before it computes."""

from pathlib import Path

import pytest
import torch
from tests.passes.golden import CASES, Case, read_case

from shardwright.ir import Graph, InputKind
from shardwright.ir.parse import parse_graph
from shardwright.passes.schedule_check import check_schedule
from shardwright.runtime.lockstep import run_lockstep


@pytest.mark.parametrize("path", CASES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_case(path: Path, update_golden: bool) -> None:
    """As expected, read back as printed, well scheduled, and equal in numbers."""
    case = read_case(path)
    if update_golden:
        case.rewrite()
        case = read_case(path)
    assert case.found == case.expected
    assert parse_graph(case.found) == case.after
    check_schedule(case.after)
    for before, after in zip(results(case, case.before), results(case, case.after), strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert torch.equal(value, after[name]), name


def results(case: Case, graph: Graph) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ranks = [
        {i.name: tensor(graph, i.name, i.kind, generator) for i in graph.inputs} for _ in range(case.mesh.num_ranks)
    ]
    named = {"loss": graph.loss, **graph.gradients, **graph.outputs, **graph.updates}
    found = run_lockstep(graph, case.mesh, ranks)
    return [{key: values[name] for key, name in named.items() if name} for values in found]


def tensor(graph: Graph, name: str, kind: InputKind, generator: torch.Generator) -> torch.Tensor:
    """Small integers: sums are exact in any order."""
    shape = graph.types[name].shape
    return torch.ones(shape) if kind is InputKind.TANGENT else torch.randint(-2, 3, shape, generator=generator).float()


def test_every_pass_has_cases() -> None:
    assert {path.parent.name for path in CASES} == {
        "bucket", "bucket_gathers", "copy_room", "early_starts", "in_place", "late_waits", "prefetch",
    }  # fmt: skip
