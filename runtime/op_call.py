"""One operator call without its names: what a sharding rule is asked about, and the key it is cached by.

Operands are numbered in the order of `Node.operands`, repeats repeated, so that equal calls of equal layers are equal
keys. Shapes are global.
"""

from dataclasses import dataclass
from typing import Final

from shardwright.ir import Arg, Graph, Mesh, Node, Partial, Placement, Ref, TensorType, divides
from shardwright.passes.strategies import Strategy
from shardwright.runtime.torch_ops import torch_op

__all__ = ["OpCall", "even", "op_call"]


_DIM_ARGUMENTS: Final = frozenset(("dim", "dims", "dim0", "dim1", "dim2"))
"""Names of arguments that are dims in every ATen operator that has them."""
_ADDS_A_DIM: Final = frozenset(("aten.unsqueeze.default", "aten.stack.default", "aten.select_backward.default"))
"""Their dim counts in the result."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """An operator, its constant arguments, and the types around it."""

    op: str
    args: tuple[Arg, ...]
    """Refs are `Ref("0")`, `Ref("1")`, ...: positions in `operands`."""
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    num_shards: int

    def argument(self, name: str, default: Arg = None) -> Arg:
        """The argument by its name in the operator's schema."""
        for position, argument in enumerate(torch_op(self.op)._schema.arguments):
            if argument.name == name:
                return self.args[position] if position < len(self.args) else dict(self.kwargs).get(name, default)
        return dict(self.kwargs).get(name, default)

    def integer(self, name: str, default: int = 0) -> int:
        """The same where it is a whole number."""
        value = self.argument(name, default)
        return value if isinstance(value, int) else default

    def slots(self) -> tuple[int | None, ...]:
        """Operand of each tensor argument of the schema, None where it is left out; a list's tensors one by one."""
        found: list[int | None] = []
        given = dict(self.kwargs)
        for position, argument in enumerate(torch_op(self.op)._schema.arguments):
            if "Tensor" not in str(argument.type):
                continue
            value = self.args[position] if position < len(self.args) else given.get(argument.name)
            found.extend(_operand(item) for item in (value if isinstance(value, tuple) else (value,)))
        return tuple(found)


def _operand(arg: Arg) -> int | None:
    return int(arg.name) if isinstance(arg, Ref) else None


def op_call(graph: Graph, node: Node, num_shards: int) -> OpCall:
    """The question that `node` asks of the rules. Dims count from the front: some of DTensor's rules take no others
    (`cumsum` along -1 is offered with the last dim split, which is wrong)."""
    numbered = node.with_operands(tuple(map(str, range(len(node.operands)))))
    operands = tuple(graph.types[name] for name in node.operands)
    results = tuple(graph.types[name] for name in node.results)
    rank = len(operands[0].shape) if operands else 0
    rank += node.op in _ADDS_A_DIM
    names = [argument.name for argument in torch_op(node.op)._schema.arguments]
    args = tuple(_from_front(name, arg, rank) for name, arg in zip(names, numbered.args, strict=False))
    kwargs = tuple((name, _from_front(name, arg, rank)) for name, arg in numbered.kwargs)
    return OpCall(node.op, args, kwargs, operands, results, num_shards)


def _from_front(name: str, arg: Arg, rank: int) -> Arg:
    if name not in _DIM_ARGUMENTS or rank == 0:
        return arg
    if isinstance(arg, tuple):
        return tuple(_from_front(name, item, rank) for item in arg)
    return arg + rank if isinstance(arg, int) and not isinstance(arg, bool) and arg < 0 else arg


def even(call: OpCall, strategy: Strategy) -> bool:
    """Whether every split of the strategy cuts its tensor into equal parts, and sums are of what can be summed."""
    mesh = Mesh(("axis",), (call.num_shards,))
    pairs = (*zip(call.operands, strategy.reads, strict=True), *zip(call.results, strategy.results, strict=True))
    return all(divides(t.shape, (p,), mesh) and _summable(t, p) for t, p in pairs)


def _summable(type_: TensorType, placement: Placement) -> bool:
    """A sum of truth values is not a truth value."""
    return not (placement == Partial("sum") and type_.dtype == "bool")
