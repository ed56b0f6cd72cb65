"""What the `mesh.*` operators of the IR do on one rank, in plain torch.

Needs nothing but torch, and knows nothing of meshes: sizes, indices and group names come as numbers and text, filled
in at emission. So an exported program takes this one file along. Collectives only start here; their result is there
after `wait`.

A dim that is seen as [outer, n, rest] is whole along `n`; a part holds [outer, rest]. `outer` is 1 for a plain split.
"""

from typing import Final

import torch
from torch import Tensor

__all__ = [
    "STRIDE_SAFE",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "merge",
    "own",
    "pack",
    "reduce_scatter",
    "stack",
    "unpack",
    "wait",
]

STRIDE_SAFE: Final = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}
"""Operators that are legal on a whole tensor but may not be on a part with other strides, and what to call instead:
the same view where it is legal, a copy where it is not."""


def merge(x: Tensor, n: int, dim: int, outer: int) -> Tensor:
    """`n` parts stacked on dim 0 to one whole along `dim`. A view for (0, 1), else fresh and contiguous.

    >>> merge(torch.tensor([[1], [2], [3], [4]]), 2, 1, 1)
    tensor([[1, 3],
            [2, 4]])
    """
    if (dim, outer) == (0, 1):
        return x
    part = (x.shape[0] // n, *x.shape[1:])
    # [n, ..., outer, rest, ...] to [..., outer, n, rest, ...]
    seen = torch.unflatten(torch.unflatten(x, 0, (n, part[0])), dim + 1, (outer, part[dim] // outer))
    whole = seen.movedim(0, dim + 1).clone(memory_format=torch.contiguous_format)
    return whole.view(*part[:dim], n * part[dim], *part[dim + 1 :])


def stack(x: Tensor, n: int, dim: int, outer: int) -> Tensor:
    """Inverse of `merge`: the `n` parts of a whole dim, stacked on dim 0.

    >>> stack(torch.tensor([[1, 3], [2, 4]]), 2, 1, 1).flatten()
    tensor([1, 2, 3, 4])
    """
    if (dim, outer) == (0, 1):
        return x
    rest = x.shape[dim] // (outer * n)
    seen = torch.unflatten(x, dim, (outer, n, rest))
    parts = seen.movedim(dim + 1, 0).clone(memory_format=torch.contiguous_format)
    part = (*x.shape[:dim], outer * rest, *x.shape[dim + 1 :])
    return parts.view(n * part[0], *part[1:])


def own(x: Tensor, index: int, n: int, dim: int, outer: int) -> Tensor:
    """Part `index` of `n` of a whole dim, fresh and contiguous.

    >>> own(torch.arange(6), 1, 3, 0, 1)
    tensor([2, 3])
    """
    rest = x.shape[dim] // (outer * n)
    seen = torch.unflatten(x, dim, (outer, n, rest))
    part = seen.select(dim + 1, index).clone(memory_format=torch.contiguous_format)
    return part.view(*x.shape[:dim], outer * rest, *x.shape[dim + 1 :])


def pack(tensors: list[Tensor]) -> Tensor:
    """One flat buffer with all of them, in order; they have one dtype.

    >>> pack([torch.tensor([[1, 2]]), torch.tensor(3)])
    tensor([1, 2, 3])
    """
    if all(tensor.is_contiguous() for tensor in tensors):
        return torch.cat([tensor.view(-1) for tensor in tensors])
    # Piece by piece: flattening all first would hold a copy of each that does not lie in order.
    buffer = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    for piece, tensor in zip(unpack(buffer, [list(tensor.shape) for tensor in tensors]), tensors, strict=True):
        piece.copy_(tensor)
    return buffer


def unpack(buffer: Tensor, shapes: list[list[int]]) -> list[Tensor]:
    """Inverse of `pack`: views of the buffer."""
    found: list[Tensor] = []
    start = 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        found.append(buffer.narrow(0, start, size).view(shape))
        start += size
    return found


def all_gather(x: Tensor, n: int, group: str) -> Tensor:
    # Not all_gather_into_tensor: torch makes that a coalesced gather, and of gloo's, two in flight corrupt the heap.
    sent = _dense(x)
    out = sent.new_empty((n * sent.shape[0], *sent.shape[1:]))
    return torch.ops._c10d_functional.all_gather_into_tensor_out.default(sent, n, group, out=out)  # type: ignore[no-any-return]


def reduce_scatter(x: Tensor, reduce: str, n: int, group: str) -> Tensor:
    return torch.ops._c10d_functional.reduce_scatter_tensor.default(_dense(x), reduce, n, group)  # type: ignore[no-any-return]


def all_reduce(x: Tensor, reduce: str, group: str) -> Tensor:
    return torch.ops._c10d_functional.all_reduce.default(x, reduce, group)  # type: ignore[no-any-return]


def all_reduce_(x: Tensor, reduce: str, group: str) -> Tensor:
    return torch.ops._c10d_functional.all_reduce_.default(x, reduce, group)  # type: ignore[no-any-return]


def all_to_all(x: Tensor, n: int, group: str) -> Tensor:
    parts = [x.shape[0] // n] * n
    return torch.ops._c10d_functional.all_to_all_single.default(_dense(x), parts, parts, group)  # type: ignore[no-any-return]


def wait(h: Tensor, x: Tensor) -> Tensor:
    """The finished result of a start. `x`, what was sent, is named so that it lives until here."""
    return torch.ops._c10d_functional.wait_tensor.default(h)  # type: ignore[no-any-return]


def _dense(x: Tensor) -> Tensor:
    """Collectives read memory in order (the rewriter sees to it); a scalar counts as one row."""
    return x.contiguous() if x.dim() else x.view(1)
