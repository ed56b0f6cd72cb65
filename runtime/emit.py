"""Rank graph to torch: two fx functions, forward and backward, one torch call per operator, in the graph's order.

Only here a program becomes that of a rank: coordinates, group names and the device are filled in. Values that forward
makes, or is given, and backward reads are saved. Nothing is reordered, fused or dropped: the graph is the schedule.
"""

import builtins
import keyword
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from shardwright.ir import Arg, Graph, GraphError, InputKind, Mesh, Node, Phase, Ref, Tier
from shardwright.ir.ops import is_collective
from shardwright.passes.copies import tier_of
from shardwright.passes.host_steps import stepped_in_backward
from shardwright.runtime import kernels
from shardwright.runtime.compat import BoxedCodeGen
from shardwright.runtime.copies import Copies
from shardwright.runtime.disk_copies import DiskCopies
from shardwright.runtime.faults import Fault, Injector, broken_collective
from shardwright.runtime.host_buffers import disk_copy_sizes, host_buffer_sizes
from shardwright.runtime.host_steps import HostSteps
from shardwright.runtime.program import Program
from shardwright.runtime.torch_ops import torch_arg, torch_op

__all__ = ["emit", "saved_values"]


def emit(
    graph: Graph,
    mesh: Mesh,
    rank: int,
    groups: Mapping[str, str],
    device: torch.device,
    *,
    copies: Copies | None = None,
    disk: DiskCopies | None = None,
    steps: HostSteps | None = None,
    fault: Fault | None = None,
) -> Program:
    """The program of `rank`. `groups` has the process group's name of every axis that collectives run over.

    `copies` moves storages to host and back, `disk` to disk, `steps` steps parameters on the host; needed where the
    graph does. Raises GraphError, and PlanError or DiskError where there is no room for what it moves.
    """
    broken = broken_collective(graph, fault) if fault else ""
    target = _Target(graph, mesh, mesh.coordinate(rank), groups, device, copies, disk, steps, broken)
    injector = _injector(target, fault) if fault else None
    inputs = graph.inputs_of(InputKind.PARAM, InputKind.FROZEN, InputKind.BUFFER, InputKind.INPUT)
    tangents = graph.inputs_of(InputKind.TANGENT)
    returned = tuple(dict.fromkeys(filter(None, (graph.loss, *graph.outputs.values(), *graph.updates.values()))))
    saved = saved_values(graph)
    if disk is not None:
        disk.reserve(disk_copy_sizes(graph))
    if copies is not None:
        copies.pool.reserve(host_buffer_sizes(graph))
    forward = tuple(node for node in graph.nodes if node.phase is Phase.FORWARD)
    backward = tuple(node for node in graph.nodes if node.phase is Phase.BACKWARD)
    return Program(
        name=graph.name,
        inputs=inputs,
        returned=returned,
        saved=saved,
        tangents=tangents,
        parameters=tuple(graph.gradients),
        stepped=frozenset(stepped_in_backward(graph)),
        steps=steps,
        forward_module=_function(target, injector, inputs, forward, (*returned, *saved)),
        backward_module=_function(target, injector, (*saved, *tangents), backward, tuple(graph.gradients.values())),
    )


def saved_values(graph: Graph) -> tuple[str, ...]:
    """What forward hands to backward: inputs first, then values in the order they are made."""
    backward = [node for node in graph.nodes if node.phase is Phase.BACKWARD]
    read = {name for node in backward for name in node.operands} | set(graph.gradients.values())
    made_late = {name for node in backward for name in node.results}
    given = [i.name for i in graph.inputs if i.kind is not InputKind.TANGENT]
    made = [name for node in graph.nodes for name in node.results]
    return tuple(name for name in (*given, *made) if name in read and name not in made_late)


@dataclass(frozen=True)
class _Target:
    """What the rank graph leaves open."""

    graph: Graph
    mesh: Mesh
    coordinate: tuple[int, ...]
    groups: Mapping[str, str]
    device: torch.device
    copies: Copies | None
    disk: DiskCopies | None
    steps: HostSteps | None
    broken: str
    """Name of the start that a fault breaks, or nothing."""

    def place(self, node: Node, position: int) -> tuple[int, int]:
        """Size of the axis named by an argument, and this rank's index on it."""
        axis = node.args[position] if position < len(node.args) else None
        if axis not in self.mesh.axes:
            raise GraphError(f"expected an axis of {self.mesh} in {node.op} for {node.name}, found {axis!r}")
        at = self.mesh.axes.index(axis)
        return self.mesh.sizes[at], self.coordinate[at]

    def group(self, node: Node) -> str:
        axis = node.args[1]
        if not isinstance(axis, str) or axis not in self.groups:
            raise GraphError(
                f"expected a process group for axis {axis!r} of {node.op} for {node.name}, found groups of"
                f" {', '.join(self.groups) or 'no axis'}; pass the name of the axis's group"
            )
        return self.groups[axis]


def _injector(target: _Target, fault: Fault) -> Injector:
    node = target.graph.producers[target.broken]
    return Injector(fault.kind, node.op, *target.place(node, 1))


def _function(
    target: _Target,
    injector: Injector | None,
    given: tuple[str, ...],
    nodes: tuple[Node, ...],
    wanted: tuple[str, ...],
) -> fx.GraphModule:
    writer = _Writer(target)
    for name in given:
        writer.take(name)
    used = {name for node in nodes for name in node.operands} | set(wanted)
    for node in nodes:
        writer.write(node, used)
    writer.graph.output([writer.value(name, "the end") for name in wanted])
    root = {"copies": target.copies, "disk": target.disk, "fault": injector, "steps": target.steps}
    module = fx.GraphModule({key: root[key] for key in writer.attributes}, writer.graph)
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    return module


@dataclass
class _Writer:
    """One fx graph while it is written."""

    target: _Target
    graph: fx.Graph = field(default_factory=fx.Graph)
    attributes: dict[str, None] = field(default_factory=dict)
    """Names of the objects the function finds on `self`."""
    _values: dict[str, fx.Node] = field(default_factory=dict)
    _identifiers: set[str] = field(default_factory=set)

    def take(self, name: str) -> None:
        identifier = self._identifier(name)
        self._values[name] = self.graph.create_node("placeholder", identifier, name=identifier)

    def value(self, name: str, where: str) -> fx.Node:
        if name not in self._values:
            raise GraphError(f"expected {name} to be made before {where} reads it, found no such value in this phase")
        return self._values[name]

    def write(self, node: Node, used: set[str]) -> None:
        if node.op.startswith(("mesh.", "tier.")):
            self._values.update(self._write_own(node, used))
        else:
            self._values.update(self._write_torch(node, used))

    def _write_torch(self, node: Node, used: set[str]) -> dict[str, fx.Node]:
        op = torch_op(kernels.STRIDE_SAFE.get(node.op, node.op))
        args = tuple(self._arg(arg, node) for arg in node.args)
        kwargs = {key: self._arg(arg, node) for key, arg in node.kwargs}
        returns = op._schema.returns
        if len(returns) == 1 and str(returns[0].type) == "Tensor":
            return {node.name: self._call(op, args, node.name, kwargs)}
        return self._unzip(node, self._call(op, args, f"{node.name}_all", kwargs), used)

    def _unzip(self, node: Node, found: fx.Node, used: set[str]) -> dict[str, fx.Node]:
        """Results of one call under their names; those that nobody reads die with the tuple."""
        return {
            name: self._call(operator.getitem, (found, position), name)
            for position, name in enumerate(node.results)
            if name in used
        }

    def _write_own(self, node: Node, used: set[str]) -> dict[str, fx.Node]:
        operands = tuple(self.value(name, node.name) for name in node.operands)
        if is_collective(node.op):
            return {node.name: self._start(node, operands[0])}
        match node.op:
            case "mesh.wait":
                return {node.name: self._wait(node, operands)}
            case "mesh.own":
                size, index = self.target.place(node, 1)
                return {node.name: self._call(kernels.own, (operands[0], index, size, *node.args[2:]), node.name)}
            case "mesh.merge":
                return {node.name: self._call(kernels.merge, (operands[0], *node.args[1:]), node.name)}
            case "mesh.stack":
                return {node.name: self._call(kernels.stack, (operands[0], *node.args[1:]), node.name)}
            case "mesh.coordinate":
                _, index = self.target.place(node, 0)
                options = {"dtype": torch.int64, "device": self.target.device}
                return {node.name: self._call(torch.ops.aten.full.default, ([], index), node.name, options)}
            case "mesh.pack":
                return {node.name: self._call(kernels.pack, (list(operands),), node.name)}
            case "mesh.unpack":
                shapes = self._arg(node.args[1], node)
                return self._unzip(node, self._call(kernels.unpack, (operands[0], shapes), f"{node.name}_all"), used)
            case "tier.offload" | "tier.reload" | "tier.wait":
                return {node.name: self._copy(node, operands)}
            case "tier.step" | "tier.sent" | "tier.stepped":
                return {node.name: self._host_step(node, operands)}
        raise GraphError(f"expected an operator of ir/ops.py, found {node.op} for {node.name}")

    def _start(self, node: Node, x: fx.Node) -> fx.Node:
        size, _ = self.target.place(node, 1)
        if node.name == self.target.broken:
            x = self._method("fault", "start", (x,), f"{node.name}_sent")
        if size == 1:
            alone = torch.ops.aten.alias if node.op == "mesh.all_reduce_" else torch.ops.aten.clone
            return self._call(alone.default, (x,), node.name)
        group = self.target.group(node)
        reduce = node.args[2] if len(node.args) > 2 else "sum"
        starts: dict[str, tuple[Callable[..., torch.Tensor], tuple[object, ...]]] = {
            "mesh.all_gather": (kernels.all_gather, (x, size, group)),
            "mesh.reduce_scatter": (kernels.reduce_scatter, (x, reduce, size, group)),
            "mesh.all_reduce": (kernels.all_reduce, (x, reduce, group)),
            "mesh.all_reduce_": (kernels.all_reduce_, (x, reduce, group)),
            "mesh.all_to_all": (kernels.all_to_all, (x, size, group)),
        }
        return self._call(*starts[node.op], node.name)

    def _wait(self, node: Node, operands: tuple[fx.Node, ...]) -> fx.Node:
        broken = node.operands[0] == self.target.broken
        waited = self._call(kernels.wait, operands, f"{node.name}_right" if broken else node.name)
        return self._method("fault", "finish", (waited,), node.name) if broken else waited

    def _copy(self, node: Node, operands: tuple[fx.Node, ...]) -> fx.Node:
        owner = "disk" if tier_of(self.target.graph, node) is Tier.DISK else "copies"
        if getattr(self.target, owner) is None:
            raise GraphError(f"expected a copy engine for {node.op} of {node.name}, found none; pass `{owner}`")
        return self._method(owner, node.op.removeprefix("tier."), operands, node.name)

    def _host_step(self, node: Node, operands: tuple[fx.Node, ...]) -> fx.Node:
        if self.target.steps is None:
            raise GraphError(f"expected whoever steps for {node.op} of {node.name}, found nobody; pass `steps`")
        names = tuple(arg for arg in node.args if isinstance(arg, str))
        return self._method("steps", node.op.removeprefix("tier."), (*operands, *names), node.name)

    def _method(self, owner: str, method: str, args: tuple[fx.Node | str, ...], name: str) -> fx.Node:
        self.attributes[owner] = None
        found = self.graph.create_node("get_attr", owner, name=self._identifier(f"{owner}_of_self"))
        return self.graph.create_node("call_method", method, (found, *args), name=self._identifier(name))

    def _call(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        name: str,
        kwargs: Mapping[str, object] | None = None,
    ) -> fx.Node:
        identifier = self._identifier(name or "effect")
        return self.graph.create_node("call_function", function, args, dict(kwargs or {}), name=identifier)  # type: ignore[arg-type]

    def _arg(self, arg: Arg, node: Node) -> object:
        if isinstance(arg, Ref):
            return self.value(arg.name, node.name)
        if isinstance(arg, tuple):
            return [self._arg(item, node) for item in arg]
        return torch_arg(arg, {}, self.target.device)

    def _identifier(self, name: str) -> str:
        """A Python name that people recognise. A placeholder's must not change in fx: the old name would be a second
        reference that keeps the tensor alive."""
        stem = re.sub(r"\W", "_", name)
        stem = f"v{stem}" if stem[:1].isdigit() or stem in _RESERVED else stem
        found, number = stem, 1
        while found in self._identifiers:
            found, number = f"{stem}__{number}", number + 1
        self._identifiers.add(found)
        return found


_RESERVED = frozenset(
    {*keyword.kwlist, *dir(builtins), "self", "torch", "device", "inf", "nan", "args_list", "args_iter"}
    | {"NoneType", "pytree", "fx_pytree", "math"}
)
