"""The graph: typed, immutable, in execution order; values are named as people name them.

A value's name is its module path and what it is: `model.layers.3.mlp.act_fn/silu`. Names are unique in a graph, and
arguments refer to values by name (`Ref`). Operators with several results have one name per result, so there are
no tuple values and no getitem. The same classes hold the captured graph (global shapes) and the rank graph
(local shapes, with the `mesh.*` and `tier.*` operators of `ir/ops.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from shardwright.ir.types import TensorType

__all__ = ["Arg", "Graph", "Input", "InputKind", "Node", "Phase", "Ref", "Token", "refs_in", "substitute"]


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class InputKind(StrEnum):
    PARAM = "param"
    """A trainable parameter."""
    FROZEN = "frozen"
    """A parameter without a gradient."""
    BUFFER = "buffer"
    INPUT = "input"
    """Part of the batch."""
    TANGENT = "tangent"
    """A gradient handed in: 1.0 for a scalar loss."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Use of a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """A constant that is not a number: `dtype.f32`, `device.cpu`, `layout.strided`, `memory_format.preserve`."""

    text: str


Arg = Ref | Token | int | float | bool | str | None | tuple["Arg", ...]


def refs_in(arg: Arg) -> Iterator[str]:
    """Names of all values in an argument, in order, repeated when used twice."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs_in(item)


def substitute(arg: Arg, names: Iterator[str]) -> Arg:
    """The argument with its refs replaced, in the order of `refs_in`, by the next names."""
    if isinstance(arg, Ref):
        return Ref(next(names))
    if isinstance(arg, tuple):
        return tuple(substitute(item, names) for item in arg)
    return arg


@dataclass(frozen=True, slots=True)
class Input:
    """Something the graph is given."""

    name: str
    kind: InputKind


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call."""

    op: str
    """Overload name, `aten.mm.default`, or an operator of ours, `mesh.wait`."""
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[str, ...]
    phase: Phase = Phase.FORWARD
    module: str = ""
    """Path of the module that the operator came from; "" at the top."""
    source: str = ""
    """`file.py:12` in the user's code, where known."""

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensors it reads, args then kwargs, in order, repeated when read twice."""
        return (*refs_in(self.args), *(n for _, arg in self.kwargs for n in refs_in(arg)))

    @property
    def name(self) -> str:
        """The name of its first result; an operator without result has an empty name."""
        return self.results[0] if self.results else ""

    def with_operands(self, names: tuple[str, ...]) -> "Node":
        """The same call on other values, given in the order of `operands`."""
        stream = iter(names)
        args = tuple(substitute(arg, stream) for arg in self.args)
        kwargs = tuple((key, substitute(arg, stream)) for key, arg in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True)
class Graph:
    """Inputs, nodes in execution order (all forward before all backward), and what is handed back."""

    name: str
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    """Type of every value, inputs included."""
    loss: str = ""
    """The value that is differentiated."""
    gradients: Mapping[str, str] = field(default_factory=dict)
    """Parameter name to the value that holds its gradient."""
    updates: Mapping[str, str] = field(default_factory=dict)
    """Buffer name to its new value (BatchNorm statistics)."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Other outputs of the model: path in the returned structure to value."""

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """Value name to the node that makes it; inputs have none."""
        return {result: node for node in self.nodes for result in node.results}

    @cached_property
    def users(self) -> Mapping[str, tuple[int, ...]]:
        """Value name to positions in `nodes` that read it, ascending, once each."""
        found: dict[str, list[int]] = {}
        for position, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.operands):
                found.setdefault(name, []).append(position)
        return {name: tuple(positions) for name, positions in found.items()}

    def inputs_of(self, *kinds: InputKind) -> tuple[str, ...]:
        return tuple(i.name for i in self.inputs if i.kind in kinds)

    @property
    def returned(self) -> tuple[str, ...]:
        """Every value handed back, in a fixed order, without repeats."""
        loss = (self.loss,) if self.loss else ()
        rest = (*self.outputs.values(), *self.updates.values(), *self.gradients.values())
        return tuple(dict.fromkeys((*loss, *rest)))
