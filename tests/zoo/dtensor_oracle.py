"""The captured graph run by DTensor, placements forced as a plan says: an oracle that shares no code with the rewriter.

Each node's operands are brought by DTensor to the layouts in which the plan reads them; DTensor runs the operator by
its own rules. What it cannot run so is computed whole and cut again; those nodes are counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as TorchPlacement

from shardwright.ir import Decisions, Graph, Layout, Mesh, Node
from shardwright.passes.lower import lower
from shardwright.runtime.lockstep import run_lockstep
from shardwright.runtime.parameters import torch_placements
from shardwright.runtime.shards import shard, unshard
from shardwright.runtime.torch_ops import torch_arg, torch_op

__all__ = ["Verdict", "compare_with_dtensor"]

RTOL = 1e-4
CPU = torch.device("cpu")


@dataclass
class Verdict:
    """What one rank found."""

    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    by_hand: list[str] = field(default_factory=list)
    """Nodes that DTensor would not run on the planned operands, with their operator."""


def compare_with_dtensor(graph: Graph, decisions: Decisions, given: Mapping[str, Tensor]) -> Verdict:
    """Every value of the lowered graph against DTensor's. Collective."""
    mesh, rank = decisions.mesh, dist.get_rank()
    lowered = lower(graph, decisions)
    made = {result for node in lowered.nodes for result in node.results} & set(graph.producers)
    inputs = [
        {name: shard(value, decisions.layouts[name], mesh, r) for name, value in given.items()}
        for r in range(mesh.num_ranks)
    ]
    ranks = run_lockstep(lowered, mesh, inputs, watch=made)
    verdict = Verdict()
    walk = _Walk(decisions, init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.axes), rank, verdict)
    for name, value in given.items():
        walk.put(name, value)
    for node in graph.nodes:
        walk.run(node)
        for name in node.results:  # in one order on all ranks: putting a value together is a collective
            if name in made and not node.op.startswith("aten.empty"):
                ours = unshard([values[name] for values in ranks], decisions.layouts[name], mesh)
                _note(verdict, name, node, ours, walk.values[name].full_tensor())
    return verdict


def _note(verdict: Verdict, name: str, node: Node, ours: Tensor, theirs: Tensor) -> None:
    verdict.compared += 1
    if not torch.allclose(ours, theirs, rtol=RTOL, atol=1e-5, equal_nan=True):
        verdict.wrong.append(f"{name} ({node.op})")


@dataclass
class _Walk:
    decisions: Decisions
    devices: DeviceMesh
    rank: int
    verdict: Verdict
    values: dict[str, DTensor] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.decisions.mesh

    def put(self, name: str, whole: Tensor) -> None:
        layout = self.decisions.layouts[name]
        local = shard(whole, layout, self.mesh, self.rank)
        self.values[name] = DTensor.from_local(local, self.devices, self._placements(layout), run_check=False)

    def _placements(self, layout: Layout) -> tuple[TorchPlacement, ...]:
        return torch_placements(layout, self.mesh)

    def run(self, node: Node) -> None:
        names = tuple(f"#{number}" for number in range(len(node.operands)))
        reads = self.decisions.reads[node.name]
        operands = dict(zip(names, map(self._read, node.operands, reads), strict=True))
        numbered = node.with_operands(names)
        try:
            found = _call(numbered, operands) if operands else None
        except (RuntimeError, NotImplementedError, ValueError, AssertionError, IndexError, TypeError):
            found = None
        if found is None:
            self.verdict.by_hand.extend([f"{node.name} {node.op}"] if operands else [])
            found = _call(numbered, {name: value.full_tensor() for name, value in operands.items()})
        for name, result in zip(node.results, found, strict=False):
            if name and result is not None:
                self._keep(name, result)

    def _read(self, name: str, layout: Layout) -> DTensor:
        value, wanted = self.values[name], self._placements(layout)
        return value if tuple(value.placements) == wanted else value.redistribute(placements=wanted)

    def _keep(self, name: str, result: Tensor) -> None:
        wanted = self._placements(self.decisions.layouts[name])
        if isinstance(result, DTensor) and tuple(result.placements) == wanted:
            self.values[name] = result
        else:
            self.put(name, result.full_tensor() if isinstance(result, DTensor) else result)


@torch.no_grad()
def _call(node: Node, operands: Mapping[str, Tensor]) -> list[Tensor | None]:
    args = [torch_arg(arg, dict(operands), CPU) for arg in node.args]
    kwargs = {key: torch_arg(arg, dict(operands), CPU) for key, arg in node.kwargs}
    found = torch_op(node.op)(*args, **kwargs)
    return list(found) if isinstance(found, tuple | list) else [found]
