"""All ranks of a rank graph in one process, node by node: the oracle for emission and for rewriting.

A collective is computed directly from the ranks' tensors; there is no process group. What a start makes is unusable
until its wait (poison: NaN, or the smallest integer), so a program that reads too early gives a wrong answer here,
every time. Copies to host are plain copies.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.ir import Graph, GraphError, InputError, Mesh, Node
from shardwright.ir.ops import is_async_start, is_collective
from shardwright.runtime.faults import Fault, Injector, broken_collective
from shardwright.runtime.kernels import STRIDE_SAFE, merge, own, pack, stack, unpack
from shardwright.runtime.shards import reduce_terms
from shardwright.runtime.torch_ops import torch_arg, torch_op

__all__ = ["Lockstep", "run_lockstep"]

Values = dict[str, Tensor]


def run_lockstep(
    graph: Graph,
    mesh: Mesh,
    inputs_per_rank: Sequence[Mapping[str, Tensor]],
    *,
    fault: Fault | None = None,
    watch: Collection[str] = (),
) -> list[Values]:
    """One step of all ranks: for each rank the values of `graph.returned` and those named in `watch`.

    `inputs_per_rank` has, in the order of ranks, the local tensor of every graph input, tangents included.
    """
    return Lockstep(graph, mesh, fault).run(inputs_per_rank, watch=watch)


class Lockstep:
    """The same over several steps: a stale collective remembers the step before."""

    def __init__(self, graph: Graph, mesh: Mesh, fault: Fault | None = None) -> None:
        self._graph = graph
        self._mesh = mesh
        self._broken = broken_collective(graph, fault) if fault else ""
        self._injectors = self._make_injectors(fault) if fault else []
        self._last_use = {name: positions[-1] for name, positions in graph.users.items()}

    @torch.no_grad()
    def run(self, inputs_per_rank: Sequence[Mapping[str, Tensor]], *, watch: Collection[str] = ()) -> list[Values]:
        kept = {*self._graph.returned, *watch}
        step = _Step(self._mesh, [self._given(inputs) for inputs in self._checked(inputs_per_rank)])
        for position, node in enumerate(self._graph.nodes):
            self._run_node(step, node)
            for name in {*node.operands, *node.results}:
                if name not in kept and self._last_use.get(name, position) <= position:
                    step.free(name)
        return [{name: values[name] for name in kept} for values in step.values]

    def _run_node(self, step: "_Step", node: Node) -> None:
        try:
            if node.name == self._broken:
                for injector, values in zip(self._injectors, step.values, strict=True):
                    injector.start(values[node.operands[0]])
            step.run(node)
            if node.op == "mesh.wait" and node.operands[0] == self._broken:
                for injector, values in zip(self._injectors, step.values, strict=True):
                    injector.finish(values[node.name])
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            where = f"{node.name} ({node.module or 'top'}) {node.source}".rstrip()
            raise GraphError(f"expected {node.op} of {where} to run on local tensors, found: {error}") from error

    def _checked(self, inputs_per_rank: Sequence[Mapping[str, Tensor]]) -> Sequence[Mapping[str, Tensor]]:
        if len(inputs_per_rank) != self._mesh.num_ranks:
            raise InputError(f"expected inputs for {self._mesh.num_ranks} ranks, found {len(inputs_per_rank)}")
        return inputs_per_rank

    def _given(self, inputs: Mapping[str, Tensor]) -> Values:
        missing = [i.name for i in self._graph.inputs if i.name not in inputs]
        if missing:
            raise InputError(f"expected a tensor for every input of {self._graph.name}, found none for {missing}")
        return {i.name: inputs[i.name].detach() for i in self._graph.inputs}

    def _make_injectors(self, fault: Fault) -> list[Injector]:
        node = self._graph.producers[self._broken]
        axis = _text(node, 1)
        where = self._mesh.axes.index(axis)
        return [
            Injector(fault.kind, node.op, self._mesh.size(axis), self._mesh.coordinate(rank)[where])
            for rank in range(self._mesh.num_ranks)
        ]


@dataclass
class _Step:
    """The values of all ranks while a step runs."""

    mesh: Mesh
    values: list[Values]
    """Of each rank, those alive."""
    _finished: dict[str, list[Tensor]] = field(default_factory=dict)
    """Name of a start to the ranks' results that its wait will reveal."""

    def free(self, name: str) -> None:
        for values in self.values:
            values.pop(name, None)

    def run(self, node: Node) -> None:
        if is_async_start(node.op):
            self._start(node)
        elif node.op in ("mesh.wait", "tier.wait"):
            self._wait(node)
        else:
            for rank, values in enumerate(self.values):
                self._local(node, values, rank)

    def _start(self, node: Node) -> None:
        sent = [values[node.operands[0]] for values in self.values]
        finished = self._communicate(node, sent) if is_collective(node.op) else [_copy(tensor) for tensor in sent]
        in_place = node.op == "mesh.all_reduce_"
        for values, tensor, result in zip(self.values, sent, finished, strict=True):
            values[node.name] = _poison(tensor if in_place else torch.empty_like(result))
        self._finished[node.name] = finished

    def _wait(self, node: Node) -> None:
        started = node.operands[0]
        for values, result in zip(self.values, self._finished.pop(started), strict=True):
            values[node.name] = values[started].copy_(result)

    def _communicate(self, node: Node, sent: list[Tensor]) -> list[Tensor]:
        axis = self.mesh.axes.index(_text(node, 1))
        reduce = _text(node, 2) if len(node.args) > 2 else "sum"
        results: list[Tensor | None] = [None] * len(sent)
        for ranks in _groups(self.mesh, axis):
            members = [sent[rank] for rank in ranks]
            for rank, result in zip(ranks, _collective(node.op, members, reduce), strict=True):
                results[rank] = result
        return [result for result in results if result is not None]

    def _local(self, node: Node, values: Values, rank: int) -> None:
        found = _call(node, values, self.mesh, rank)
        tensors = [found] if isinstance(found, Tensor) else list(found)
        values.update({name: t for name, t in zip(node.results, tensors, strict=False) if name and t is not None})


def _groups(mesh: Mesh, axis: int) -> list[list[int]]:
    """The ranks that differ in one coordinate only, in its order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.num_ranks):
        where = mesh.coordinate(rank)
        found.setdefault((*where[:axis], *where[axis + 1 :]), []).append(rank)
    return list(found.values())


def _collective(op: str, sent: list[Tensor], reduce: str) -> list[Tensor]:
    """What each member of one group receives: dense, as `kernels` makes it; only an all-reduce keeps strides."""
    if op == "mesh.all_gather":
        gathered = torch.cat([tensor.reshape(tensor.shape or (1,)) for tensor in sent])
        return [_dense_copy(gathered) for _ in sent]
    if op == "mesh.all_to_all":
        parts = zip(*(tensor.chunk(len(sent)) for tensor in sent), strict=True)
        return [_dense_copy(torch.cat(part)) for part in parts]
    total = reduce_terms(sent, reduce)
    if op == "mesh.reduce_scatter":
        return [_dense_copy(part) for part in total.chunk(len(sent))]
    return [total.clone() for _ in sent]


def _dense_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _call(node: Node, values: Values, mesh: Mesh, rank: int) -> Tensor | Sequence[Tensor | None]:
    """One operator on one rank's tensors."""
    operands = [values[name] for name in node.operands]
    match node.op:
        case "mesh.own":
            axis, index = _place(node, 1, mesh, rank)
            return own(operands[0], index, mesh.sizes[axis], _number(node, 2), _number(node, 3))
        case "mesh.merge":
            return merge(operands[0], _number(node, 1), _number(node, 2), _number(node, 3))
        case "mesh.stack":
            return stack(operands[0], _number(node, 1), _number(node, 2), _number(node, 3))
        case "mesh.coordinate":
            return torch.tensor(_place(node, 0, mesh, rank)[1], device=_device(values))
        case "mesh.pack":
            return pack(operands)
        case "mesh.unpack":
            return unpack(operands[0], torch_arg(node.args[1], {}, torch.device("cpu")))  # type: ignore[arg-type]
    op = torch_op(STRIDE_SAFE.get(node.op, node.op))
    device = operands[0].device if operands else _device(values)
    args = [torch_arg(arg, values, device) for arg in node.args]
    kwargs = {key: torch_arg(arg, values, device) for key, arg in node.kwargs}
    return op(*args, **kwargs)  # type: ignore[no-any-return]


def _place(node: Node, position: int, mesh: Mesh, rank: int) -> tuple[int, int]:
    axis = mesh.axes.index(_text(node, position))
    return axis, mesh.coordinate(rank)[axis]


def _device(values: Values) -> torch.device:
    return next((tensor.device for tensor in values.values()), torch.device("cpu"))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _poison(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min)


def _text(node: Node, position: int) -> str:
    found = node.args[position]
    if not isinstance(found, str):
        raise GraphError(f"expected text as argument {position} of {node.op} for {node.name}, found {found!r}")
    return found


def _number(node: Node, position: int) -> int:
    found = node.args[position]
    if not isinstance(found, int):
        raise GraphError(f"expected a number as argument {position} of {node.op} for {node.name}, found {found!r}")
    return found
