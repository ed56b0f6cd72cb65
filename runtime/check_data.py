"""Random operands for an operator, in ranges that it accepts: indices within their dim, labels within the classes.

Needs a node and the types of its operands. Gives tensors of those shapes and memory layouts; floats are normal
numbers, positive where the operator takes a root or a logarithm.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from shardwright.ir import Node, TensorType, contiguous_strides
from shardwright.runtime.torch_ops import TORCH_DTYPES

__all__ = ["operands_for"]

_Types = tuple[TensorType, ...]
_Bound = Callable[[Node, _Types, int], int]
"""Of a node, its operand types and the position of an integer operand: the first value that is too large."""

_POSITIVE: Final = ("log", "sqrt", "rsqrt", "pow", "batch_norm", "div", "reciprocal", "var", "norm")


def operands_for(node: Node, types: _Types, generator: torch.Generator, widened: bool) -> list[Tensor]:
    """One tensor per operand; floats in float64 where `widened`."""
    return [_operand(node, types, position, generator, widened) for position in range(len(types))]


def _operand(node: Node, types: _Types, position: int, generator: torch.Generator, widened: bool) -> Tensor:
    type_ = types[position]
    dtype = TORCH_DTYPES[type_.dtype]
    memory = _memory_shape(type_)
    if dtype == torch.bool:
        data = torch.rand(memory, generator=generator) < 0.5
    elif dtype.is_floating_point:
        data = torch.randn(memory, generator=generator, dtype=torch.float64)
        data = data.abs() + 0.1 if any(word in node.op for word in _POSITIVE) else data
        data = data if widened else data.to(dtype)
    elif dtype.is_complex:
        data = torch.randn(memory, generator=generator, dtype=dtype)
    else:
        bound = _BOUNDS.get(node.op, _smallest_dim)(node, types, position)
        data = torch.randint(0, max(bound, 1), memory, generator=generator).to(dtype)
        data = (
            _group_ends(data, types[0].shape[0]) if "_grouped_mm" in node.op else _with_ignored(node, data, generator)
        )
    return _laid_out(data, type_)


def _memory_shape(type_: TensorType) -> tuple[int, ...]:
    """Broadcast dims are stored once."""
    strides = type_.strides or contiguous_strides(type_.shape)
    return tuple(1 if stride == 0 else size for size, stride in zip(type_.shape, strides, strict=True))


def _laid_out(data: Tensor, type_: TensorType) -> Tensor:
    """The values in the memory order of the type."""
    strides = type_.strides
    if strides is None:
        return data
    order = sorted(range(data.dim()), key=lambda dim: (-strides[dim], dim))
    back = [order.index(dim) for dim in range(data.dim())]
    return data.permute(order).contiguous().permute(back).expand(type_.shape)


def _with_ignored(node: Node, data: Tensor, generator: torch.Generator) -> Tensor:
    """A quarter of the labels of a loss are ignored, unevenly."""
    if "nll_loss" not in node.op or data.numel() == 0:
        return data
    numbers = [arg for arg in node.args if isinstance(arg, int) and not isinstance(arg, bool)]
    ignored = torch.rand(data.shape, generator=generator) < torch.linspace(0, 0.5, data.numel()).view(data.shape)
    return torch.where(ignored, numbers[1] if len(numbers) > 1 else -100, data)


def _group_ends(data: Tensor, rows: int) -> Tensor:
    """Ascending ends of the groups of rows; the last group ends with the rows."""
    ends = data.sort().values
    ends[-1] = rows
    return ends


def _smallest_dim(node: Node, types: _Types, position: int) -> int:
    """An index that is valid along any dim of any tensor."""
    return min((size for t in types for size in t.shape if size > 1), default=1)


def _rows(node: Node, types: _Types, position: int) -> int:
    return types[0].shape[0]


def _classes(node: Node, types: _Types, position: int) -> int:
    """Dim 1 of the scores, or dim 0 where there is no batch."""
    scores = max(types, key=lambda t: len(t.shape)).shape
    return scores[min(1, len(scores) - 1)]


def _along_dim(node: Node, types: _Types, position: int) -> int:
    dim = node.args[1]
    return types[0].shape[dim] if isinstance(dim, int) and types[0].shape else 1


def _pooled(node: Node, types: _Types, position: int) -> int:
    height, width = types[1].shape[-2:]
    return height * width


def _num_weights(node: Node, types: _Types, position: int) -> int:
    return node.args[2] if isinstance(node.args[2], int) else 1


def _indexed(node: Node, types: _Types, position: int) -> int:
    """The dim that this index stands for, in `index(x, [i0, None, i2])`."""
    indices = node.args[1] if isinstance(node.args[1], tuple) else ()
    given = [dim for dim, index in enumerate(indices) if index is not None]
    return types[0].shape[given[position - 1]] if position - 1 < len(given) else _smallest_dim(node, types, position)


_BOUNDS: Final[Mapping[str, _Bound]] = {
    "aten.embedding.default": _rows,
    "aten.embedding_dense_backward.default": _num_weights,
    "aten.nll_loss_forward.default": _classes,
    "aten.nll_loss_backward.default": _classes,
    "aten.nll_loss2d_forward.default": _classes,
    "aten.nll_loss2d_backward.default": _classes,
    "aten.gather.default": _along_dim,
    "aten.index_select.default": _along_dim,
    "aten.scatter.src": _along_dim,
    "aten.scatter.value": _along_dim,
    "aten.scatter_add.default": _along_dim,
    "aten.index_add.default": _along_dim,
    "aten.max_pool2d_with_indices_backward.default": _pooled,
    "aten.index.Tensor": _indexed,
    "aten.index_put.default": _indexed,
    "aten._unsafe_index.Tensor": _indexed,
}
