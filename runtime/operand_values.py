"""Made-up operands for measuring: the exact types, strides respected, and integers that are legal where they stand.

Floats are uniform in (0, 1]: no NaN or denormal changes a kernel's speed. Integers are indices more often than not, so
they are drawn below the size they index where that is known, and zero otherwise.
"""

from typing import Final

import torch
from torch import Tensor

from shardwright.ir import Arg, Node, Ref, TensorType, refs_in
from shardwright.runtime.torch_ops import TORCH_DTYPES

__all__ = ["make_operands", "make_tensor"]


def make_operands(node: Node, operands: tuple[TensorType, ...], device: torch.device) -> dict[str, Tensor]:
    """Operand name to a tensor of its type. The same values every time."""
    generator = torch.Generator(device).manual_seed(0)
    types = dict(zip(node.operands, operands, strict=True))
    return {name: _operand(node, name, types, generator) for name in types}


def _operand(node: Node, name: str, types: dict[str, TensorType], generator: torch.Generator) -> Tensor:
    if node.op == "aten._grouped_mm.default" and len(node.args) > 2 and node.args[2] == Ref(name):
        return _group_ends(types[name], [types[operand] for operand in node.operands[:2]], generator.device)
    return make_tensor(types[name], generator, _index_bound(node, name, types))


def make_tensor(kind: TensorType, generator: torch.Generator, bound: int = 1) -> Tensor:
    """A tensor of that type; integers are in [0, bound)."""
    dtype, device = TORCH_DTYPES[kind.dtype], generator.device
    extent = kind.num_elements if kind.strides is None else _extent(kind.shape, kind.strides)
    if dtype.is_floating_point:
        wide = dtype if dtype.itemsize > 1 else torch.float32
        flat = (1.0 - torch.rand(extent, dtype=wide, device=device, generator=generator)).to(dtype)
    elif dtype.is_complex:
        flat = torch.rand(extent, dtype=dtype, device=device, generator=generator)
    elif dtype is torch.bool:
        flat = torch.randint(0, 2, (extent,), device=device, generator=generator).to(dtype)
    else:
        flat = torch.randint(0, max(1, bound), (extent,), device=device, generator=generator).to(dtype)
    return flat.view(kind.shape) if kind.strides is None else flat.as_strided(kind.shape, kind.strides)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _group_ends(kind: TensorType, factors: list[TensorType], device: torch.device) -> Tensor:
    """Ends of equal groups of the rows (or columns) that `_grouped_mm` cuts."""
    left, right = factors
    total = left.shape[-1] if len(left.shape) == len(right.shape) == 2 else left.shape[0]
    if len(left.shape) == 3:
        total = right.shape[-1]
    groups = kind.shape[0]
    ends = torch.tensor([total * (group + 1) // groups for group in range(groups)], device=device)
    return ends.to(TORCH_DTYPES[kind.dtype])


# By operator: the argument that is indexed and the argument that names the dim (None: dim 0).
_INDEXED: Final[dict[str, tuple[int, int | None]]] = {
    "aten.embedding.default": (0, None),
    "aten.index_select.default": (0, 1),
    "aten.gather.default": (0, 1),
    "aten.scatter.src": (0, 1),
    "aten.scatter.value": (0, 1),
    "aten.scatter_add.default": (0, 1),
    "aten.index_add.default": (0, 1),
}
# By operator: the argument that is the number of classes or rows itself.
_COUNTED: Final = {"aten.embedding_dense_backward.default": 2, "aten.one_hot.default": 1}
# By operator: the argument whose dim 1 (dim 0 of a vector) are the classes that the target names.
_CLASSES: Final = {
    "aten.nll_loss_forward.default": 0,
    "aten.nll_loss_backward.default": 1,
    "aten.nll_loss2d_forward.default": 0,
    "aten.nll_loss2d_backward.default": 1,
    "aten.cross_entropy_loss.default": 0,
}
# Operators whose argument 1 is a list of indices, one per dim of argument 0.
_LISTED: Final = frozenset(
    ("aten.index.Tensor", "aten._unsafe_index.Tensor", "aten.index_put.default", "aten._unsafe_index_put.default")
)


def _index_bound(node: Node, name: str, types: dict[str, TensorType]) -> int:
    """Integers of this operand must be below it; 1, that is zeros, where nothing is known."""
    if node.op in _COUNTED:
        return _integer(node.args[_COUNTED[node.op]])
    if node.op in _INDEXED:
        table, dim = _INDEXED[node.op]
        return _size(_shape(node.args[table], types), 0 if dim is None else _integer(node.args[dim]))
    if node.op in _CLASSES:
        shape = _shape(node.args[_CLASSES[node.op]], types)
        return _size(shape, min(1, len(shape) - 1))
    if node.op in _LISTED and isinstance(node.args[1], tuple):
        shape = _shape(node.args[0], types)
        return min((_size(shape, dim) for dim, index in enumerate(node.args[1]) if name in refs_in(index)), default=1)
    return 1


def _integer(arg: Arg) -> int:
    return arg if isinstance(arg, int) else 1


def _shape(arg: Arg, types: dict[str, TensorType]) -> tuple[int, ...]:
    return types[arg.name].shape if isinstance(arg, Ref) else ()


def _size(shape: tuple[int, ...], dim: int) -> int:
    return shape[dim] if -len(shape) <= dim < len(shape) else 1
