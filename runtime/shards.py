"""Cutting a whole tensor into what each rank holds, and putting it together again, as `ir.placements` defines it.

Axes cut from left to right and are put together from right to left. Only even splits exist.
"""

import math

import torch
from torch import Tensor

from shardwright.ir import GraphError, Layout, Mesh, Partial, Placement, Replicate, Shard, Strided, format_layout
from shardwright.runtime.kernels import merge, own

__all__ = ["local_outer", "reduce_terms", "shard", "unshard"]


def shard(tensor: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """What `rank` holds of the whole `tensor`. A term of P(sum) is the whole on the first rank of the axis and zeros on
    the others; of P(avg), P(max) and P(min) it is the whole on every rank. Raises GraphError for an uneven split."""
    local = tensor
    for axis, (placement, size, index) in enumerate(zip(layout, mesh.sizes, mesh.coordinate(rank), strict=True)):
        if isinstance(placement, Shard | Strided):
            local = _cut(local, layout, axis, size, index, mesh)
        elif placement == Partial("sum") and index:
            local = torch.zeros_like(local)
    return local


def unshard(parts: list[Tensor], layout: Layout, mesh: Mesh) -> Tensor:
    """The whole from every rank's part, in the order of ranks. Of replicas the first is taken."""
    for axis in reversed(range(len(mesh.sizes))):
        size = mesh.sizes[axis]
        parts = [_join(parts[at : at + size], layout, axis, mesh) for at in range(0, len(parts), size)]
    return parts[0]


def local_outer(layout: Layout, axis: int, mesh: Mesh) -> int:
    """The outer size of the split on `axis` when the axes before it have already cut; 1 for a plain split."""
    placement = layout[axis]
    if not isinstance(placement, Strided):
        return 1
    before = zip(layout[:axis], mesh.sizes[:axis], strict=True)
    cut = math.prod(size for other, size in before if _cuts_outer(other, placement))
    if placement.outer % cut:
        raise GraphError(f"expected {placement} on an outer part that {cut} divides, in {format_layout(layout)}")
    return placement.outer // cut


def _cuts_outer(other: Placement, placement: Strided) -> bool:
    if isinstance(other, Shard):
        return other.dim == placement.dim
    return isinstance(other, Strided) and other.dim == placement.dim and other.outer < placement.outer


def _cut(local: Tensor, layout: Layout, axis: int, size: int, index: int, mesh: Mesh) -> Tensor:
    placement = layout[axis]
    if not isinstance(placement, Shard | Strided):
        return local
    outer = local_outer(layout, axis, mesh)
    dim = placement.dim
    if dim >= local.dim() or local.shape[dim] % (outer * size):
        raise GraphError(
            f"expected a shape that {format_layout(layout)} splits evenly over {mesh}, found {list(local.shape)} on the"
            f" way at axis {mesh.axes[axis]}; plan only placements that divide"
        )
    return own(local, index, size, dim, outer)


def _join(parts: list[Tensor], layout: Layout, axis: int, mesh: Mesh) -> Tensor:
    placement = layout[axis]
    if isinstance(placement, Replicate):
        return parts[0]
    if isinstance(placement, Partial):
        return reduce_terms(parts, placement.reduce)
    return merge(torch.cat(parts), len(parts), placement.dim, local_outer(layout, axis, mesh))


def reduce_terms(terms: list[Tensor], reduce: str) -> Tensor:
    """The reduction of one term per rank, in a fresh tensor. Raises GraphError for an unknown one."""
    stacked = torch.stack(terms)
    match reduce:
        case "sum":
            return stacked.sum(0, dtype=stacked.dtype)
        case "avg":
            return stacked.sum(0, dtype=stacked.dtype) / len(terms)
        case "max":
            return stacked.amax(0)
        case "min":
            return stacked.amin(0)
        case _:
            raise GraphError(f"expected sum, avg, max or min, found {reduce!r}")
