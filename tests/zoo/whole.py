"""Every value of a rank graph against the whole captured graph: all ranks in lockstep, in one process.

The whole graph runs once, as captured, on global tensors. Then the lowered graph runs on all ranks, and each value
that has a name of the captured graph (made again in backward or not) is put together by its planned layout and
compared. The scheduled graph must return exactly what the lowered one does, gradients cut as their parameters rest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tests.zoo.models import Example
from torch import Tensor, nn

from shardwright.ir import Decisions, Graph, InputKind, Layout, Node, format_layout
from shardwright.passes.lower import lower
from shardwright.passes.pipeline import scheduled
from shardwright.runtime.capture import capture
from shardwright.runtime.captured import Captured
from shardwright.runtime.lockstep import run_lockstep
from shardwright.runtime.shards import shard, unshard
from shardwright.runtime.torch_ops import TORCH_DTYPES, torch_arg, torch_op

__all__ = ["Subject", "differences", "subject"]

AGAIN = "~again"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Subject:
    """A captured model and all its values on one global batch."""

    captured: Captured
    given: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    rtol: float

    @property
    def graph(self) -> Graph:
        return self.captured.graph


def subject(example: Example, rtol: float = 1e-4) -> Subject:
    """Capture and run once."""
    module, args, kwargs = example
    captured = capture(module, args, kwargs).keeping(())
    given = _given(captured, module, captured.bind(args, kwargs))
    return Subject(captured, given, _values(captured.graph, given), rtol)


def _given(captured: Captured, module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    held = {**state, **captured.tensors, **batch}
    loss = captured.graph.types[captured.graph.loss]
    return {
        i.name: torch.ones(loss.shape, dtype=TORCH_DTYPES[loss.dtype])
        if i.kind is InputKind.TANGENT
        else held[i.name].detach()
        for i in captured.graph.inputs
    }


@torch.no_grad()
def _values(graph: Graph, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values = dict(given)
    for node in graph.nodes:
        pairs = zip(node.results, _call(node, values), strict=False)
        values.update({name: value for name, value in pairs if name and value is not None})
    return values


def _call(node: Node, values: dict[str, Tensor]) -> list[Tensor | None]:
    kwargs = {key: torch_arg(arg, values, CPU) for key, arg in node.kwargs}
    found = torch_op(node.op)(*(torch_arg(arg, values, CPU) for arg in node.args), **kwargs)
    return list(found) if isinstance(found, tuple | list) else [found]


def differences(subject: Subject, decisions: Decisions) -> list[str]:
    """What the plan computes wrong, in execution order; empty where it is the same."""
    lowered = lower(subject.graph, decisions)
    mesh = decisions.mesh
    inputs = [
        {name: shard(value, decisions.layouts[name], mesh, rank) for name, value in subject.given.items()}
        for rank in range(mesh.num_ranks)
    ]
    # What `empty` holds is undefined, also after it went to the host and came back.
    undefined = {r for node in subject.graph.nodes if node.op.startswith("aten.empty") for r in node.results}
    known = subject.values.keys() - undefined
    names = [result for node in lowered.nodes for result in node.results if _original(result) in known]
    found = run_lockstep(lowered, mesh, inputs, watch=names)
    wrong = []
    for name in names:
        layout = decisions.layouts[_original(name)]
        problem = _difference(subject, name, [values[name] for values in found], layout, decisions)
        wrong.extend([problem] if problem else [])
    return wrong + _changed_by_scheduling(lowered, decisions, inputs, found)


def _original(name: str) -> str:
    return name.removesuffix(AGAIN)


def _difference(subject: Subject, name: str, parts: list[Tensor], layout: Layout, decisions: Decisions) -> str:
    whole, expected = unshard(parts, layout, decisions.mesh), subject.values[_original(name)]
    if whole.shape != expected.shape:
        return f"{name}: shape {tuple(whole.shape)}, expected {tuple(expected.shape)}"
    if not torch.is_floating_point(expected):
        return "" if torch.equal(whole, expected) else f"{name}: other integers {format_layout(layout)}"
    # Values of inf are masks; they must stand in the same places.
    ours, theirs = whole.double(), expected.double()
    finite = theirs.isfinite()
    same = torch.equal(ours[~finite], theirs[~finite])
    distance, scale = (ours[finite] - theirs[finite]).norm().item(), theirs[finite].norm().item()
    if same and distance <= subject.rtol * (scale + 1e-2 * theirs.numel() ** 0.5):
        return ""
    node = subject.graph.producers[_original(name)]
    reads = ", ".join(f"({format_layout(read)})" for read in decisions.reads[node.name])
    return f"{name}: differs by {distance:.2e} of {scale:.2e}; {node.op} reads {reads}, makes {format_layout(layout)}"


def _changed_by_scheduling(
    lowered: Graph, decisions: Decisions, inputs: list[dict[str, Tensor]], found: list[dict[str, Tensor]]
) -> list[str]:
    """Passes behind `lower` only merge and move: what is returned is bitwise the same on every rank."""
    program = scheduled(lowered, decisions.schedule)
    again = run_lockstep(program, decisions.mesh, inputs)
    pairs = [(program.loss, lowered.loss)]
    pairs += [(program.gradients[name], gradient) for name, gradient in lowered.gradients.items()]
    pairs += [(program.updates[name], update) for name, update in lowered.updates.items()]
    return [
        f"{ours}: changed by scheduling on rank {rank}"
        for rank, (after, before) in enumerate(zip(again, found, strict=True))
        for ours, theirs in pairs
        if not torch.equal(after[ours], before[theirs])
    ]
