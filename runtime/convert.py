"""The fx graph of forward, loss and backward as IR: one name per result, concrete sizes, no constants from outside.

Needs the joint graph of `aot_export_joint_with_descriptors` and what its placeholders and outputs are called. Gives a
`Graph` whose values still have fx's names and whose nodes are all marked forward; `Node.module` holds call paths
(`naming.call_path`). Operators that only check values, and have no results, are dropped.
"""

import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import fx
from torch._ops import OpOverload

from shardwright.ir import Arg, CaptureError, Graph, GraphError, Input, InputKind, Node, Ref, TensorType, Token
from shardwright.ir.ops import SHAPE_ARGUMENT, is_random
from shardwright.runtime.naming import call_path, source_line
from shardwright.runtime.torch_ops import constant_arg, op_name, tensor_type

__all__ = ["Converted", "convert"]

NO_TENSOR: Final = TensorType("u8", (0,))
"""Type of a result that is None (a gradient nobody asked for) or a number: it has a name and is never read."""


@dataclass(frozen=True)
class Converted:
    """The graph so far, and what fx returned."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, TensorType]
    returned: tuple[str | None, ...]
    """Value of every output of the fx graph, None where it returns none."""
    tensors: Mapping[str, torch.Tensor]
    """Values of the inputs that were constants of the fx graph."""

    def graph(self, name: str, loss: str) -> Graph:
        return Graph(name, self.inputs, self.nodes, self.types, loss)


@dataclass
class _Work:
    """What has been read so far."""

    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    values: dict[fx.Node, str] = field(default_factory=dict)
    """The value that an fx node stands for."""
    results: dict[fx.Node, tuple[str, ...]] = field(default_factory=dict)
    """The values of an fx node with several."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    modules: dict[str, str] = field(default_factory=dict)
    """Call path of the node that makes a value."""

    def add(self, node: Node, *types: TensorType) -> None:
        self.nodes.append(node)
        self.modules.update(dict.fromkeys(node.results, node.module))
        self.types.update(zip(node.results, types, strict=True))


def convert(module: fx.GraphModule, describe: Callable[[fx.Node], Input]) -> Converted:
    """Read the whole graph. Raises CaptureError for what cannot be planned."""
    work = _Work()
    returned: tuple[str | None, ...] = ()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            given = describe(node)
            work.inputs.append(given)
            work.values[node] = given.name
            work.types[given.name] = _type(node.meta["val"], node)
        elif node.op == "get_attr":
            _constant(work, node, _attribute(module, str(node.target)))
        elif node.op == "call_function":
            _call(work, node)
        elif node.op == "output":
            returned = tuple(None if out is None else work.values[out] for out in node.args[0])
    return Converted(tuple(work.inputs), tuple(work.nodes), work.types, returned, work.tensors)


def _call(work: _Work, node: fx.Node) -> None:
    if node.target is operator.getitem:
        source, position = node.args
        work.values[node] = work.results[source][position]  # type: ignore[index]
        return
    if not isinstance(node.target, OpOverload):
        raise CaptureError(
            f"expected plain operators, found {node.target} {_where(node)}, which holds a program of its own. "
            "Write that part without control flow operators"
        )
    if not node.target._schema.returns or node.target.namespace == "profiler":
        return
    _refuse_random(node)
    value = node.meta["val"]
    several = isinstance(value, tuple | list)
    types = [_type(item, node) for item in (value if several else (value,))]
    names = tuple(f"{node.name}.{i}" if several else node.name for i in range(len(types)))
    made = Node(
        op=op_name(node.target),
        args=tuple(_arg(work, arg, node) for arg in node.args),
        kwargs=tuple((key, _arg(work, arg, node)) for key, arg in node.kwargs.items()),
        results=names,
        module=_path(node) if _has_stack(node) else _module_of_operand(work, node),
        source=source_line(node.meta.get("stack_trace")),
    )
    if several:
        work.results[node] = names
    else:
        work.values[node] = names[0]
    work.add(_with_concrete_sizes(made, work.types, types[0]), *types)


def _arg(work: _Work, arg: object, node: fx.Node) -> Arg:
    if isinstance(arg, fx.Node):
        if arg in work.values:
            return Ref(work.values[arg])
        raise CaptureError(
            f"expected {node.target} {_where(node)} to read tensors, found one that reads a number computed from "
            "values. Sizes and branches must not depend on the values of tensors"
        )
    if isinstance(arg, list | tuple):
        return tuple(_arg(work, item, node) for item in arg)
    if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise CaptureError(f"expected sizes known before the step, found {arg} {_where(node)}")
    try:
        return constant_arg(arg)
    except GraphError as error:
        raise CaptureError(f"{error} {_where(node)}") from error


def _with_concrete_sizes(node: Node, types: Mapping[str, TensorType], result: TensorType) -> Node:
    """No -1 among sizes, no slice end past the size: rules and local shapes are then plain arithmetic."""
    position = SHAPE_ARGUMENT.get(node.op)
    if position is not None and position < len(node.args):
        return replace(node, args=(*node.args[:position], result.shape, *node.args[position + 1 :]))
    if node.op != "aten.slice.Tensor":
        return node
    defaults: tuple[Arg, ...] = (0, None, None, 1)
    dim, start, end, step = (*node.args[1:], *defaults[len(node.args) - 1 :])
    if not isinstance(dim, int):
        return node
    size = types[node.operands[0]].shape[dim]
    first, last = (_clipped(bound, default, size) for bound, default in ((start, 0), (end, size)))
    bounds = (first, last) if step == 1 else (first, last, step)
    return replace(node, args=(node.args[0], dim % len(result.shape), *bounds))


def _clipped(bound: Arg, default: int, size: int) -> int:
    value = bound if isinstance(bound, int) else default
    return min(max(value + size if value < 0 else value, 0), size)


def _constant(work: _Work, node: fx.Node, tensor: torch.Tensor) -> None:
    """A number becomes `full`; a larger constant an input of kind buffer, called by its content."""
    if tensor.numel() == 1 and tensor.dim() == 0:
        value = tensor.item()
        kwargs = (("dtype", constant_arg(tensor.dtype)), ("device", Token("device.cpu")))
        work.values[node] = node.name
        module, source = _path(node), source_line(node.meta.get("stack_trace"))
        made = Node("aten.full.default", ((), value), kwargs, (node.name,), module=module, source=source)
        work.add(made, tensor_type(tensor))
        return
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    name = f"constant/{hashlib.sha256(content + str((plain.dtype, plain.shape)).encode()).hexdigest()[:12]}"
    work.values[node] = name
    if name not in work.tensors:
        work.inputs.append(Input(name, InputKind.BUFFER))
        work.tensors[name], work.types[name] = plain, tensor_type(plain)


def _attribute(module: fx.GraphModule, target: str) -> torch.Tensor:
    found: object = module
    for part in target.split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor):
        raise CaptureError(f"expected constants to be tensors, found {target} of type {type(found).__name__}")
    return found


def _type(value: object, node: fx.Node) -> TensorType:
    if not isinstance(value, torch.Tensor):
        return NO_TENSOR
    if any(not isinstance(size, int) for size in value.shape):
        raise CaptureError(
            f"expected sizes known before the step, found {node.target} {_where(node)} whose result has as many "
            "elements as some tensor's values say (nonzero, masked_select, unique, ...). Use a fixed size, as with "
            "torch.where or a mask that multiplies"
        )
    try:
        return tensor_type(value)
    except GraphError as error:
        raise CaptureError(f"{error} {_where(node)}") from error


def _refuse_random(node: fx.Node) -> None:
    op = node.target
    if not isinstance(op, OpOverload):
        return
    if is_random(op_name(op)) or torch.Tag.nondeterministic_seeded in op.tags and not _attention_without_dropout(node):
        raise CaptureError(
            f"dropout above 0 is not supported yet: expected no random numbers, found {op} {_where(node)}. "
            "Set every dropout (attention's and drop path too) to 0 and draw random inputs outside the model"
        )


def _attention_without_dropout(node: fx.Node) -> bool:
    """Attention is tagged random for its dropout only."""
    if not isinstance(node.target, OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return False
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return bool(given.get("dropout_p", 0.0) == 0.0)


def _path(node: fx.Node) -> str:
    return call_path(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))


def _has_stack(node: fx.Node) -> bool:
    return bool(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))


def _module_of_operand(work: _Work, node: fx.Node) -> str:
    """Autograd adds gradients of a value that is used twice, outside any module: where the last of them came from."""
    read = (work.values.get(source, "") for source in reversed(node.all_input_nodes))
    return next((work.modules[name] for name in read if name in work.modules), "")


def _where(node: fx.Node) -> str:
    return f"in module {_path(node) or '(top)'} at {source_line(node.meta.get('stack_trace')) or 'an unknown line'}"
