"""One operator call as a graph, from types and arguments; results are learned by running the operator once."""

import torch

from shardwright.ir import Arg, Graph, Input, InputKind, Node, Ref, TensorType
from shardwright.passes.strategies import Strategy
from shardwright.runtime.torch_ops import TORCH_DTYPES, tensor_type, torch_arg, torch_op

CPU = torch.device("cpu")
CallArg = Arg | TensorType | tuple["CallArg", ...]


def f32(*shape: int) -> TensorType:
    return TensorType("f32", shape)


def i64(*shape: int) -> TensorType:
    return TensorType("i64", shape)


def one_call(op: str, *args: CallArg, **kwargs: CallArg) -> tuple[Graph, Node]:
    """A graph of one node: every type among the arguments becomes an input `x0`, `x1`, ... in order."""
    types: list[TensorType] = []
    given = tuple(_named(arg, types) for arg in args)
    named = tuple((key, _named(arg, types)) for key, arg in kwargs.items())
    inputs = {f"x{i}": t for i, t in enumerate(types)}
    results = _run(op, given, named, inputs)
    made = {f"y{i}": t for i, t in enumerate(results)}
    node = Node(op, given, named, tuple(made), module="layer", source="model.py:7")
    graph = Graph("call", tuple(Input(n, InputKind.INPUT) for n in inputs), (node,), {**inputs, **made})
    return graph, node


def _named(arg: CallArg, types: list[TensorType]) -> Arg:
    if isinstance(arg, TensorType):
        types.append(arg)
        return Ref(f"x{len(types) - 1}")
    return tuple(_named(item, types) for item in arg) if isinstance(arg, tuple) else arg


def _run(
    op: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], inputs: dict[str, TensorType]
) -> list[TensorType]:
    values = {name: torch.ones(t.shape, dtype=TORCH_DTYPES[t.dtype]) for name, t in inputs.items()}
    found = torch_op(op)(
        *(torch_arg(a, values, CPU) for a in args), **{k: torch_arg(a, values, CPU) for k, a in kwargs}
    )
    several = found if isinstance(found, tuple | list) else (found,)
    return [tensor_type(x) if isinstance(x, torch.Tensor) else TensorType("u8", (0,)) for x in several]


def texts(strategies: tuple[Strategy, ...]) -> list[str]:
    """`S(0), R -> S(0)`, in the order given."""
    return [f"{', '.join(map(str, s.reads))} -> {', '.join(map(str, s.results))}" for s in strategies]
