"""Operators that average over data, written as sums, so that each part of a split batch gives a term of the sum.

Mean-like reductions hide a division by a *local* count: split over the batch, DTensor's rules for them give wrong
gradients (`mse_loss`), wrong losses (`nll_loss` with unevenly ignored labels) or an average that must not be mixed
with sums. Written as sum and division by a global count, every split is exact. Everything else stays one operator.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardwright.runtime.compat import get_decompositions

__all__ = ["decomposition_table"]

aten: Any = torch.ops.aten  # torch gives its operators no types
_MEAN: Final = 1
"""Torch's number for reduction="mean"."""
_SUM: Final = 2

Decomposition: TypeAlias = "Callable[..., Tensor | tuple[Tensor, ...]]"

_FROM_TORCH: Final = (
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten.batch_norm_backward,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
)
"""Torch's own decompositions: elementwise operators and means or variances, which are decomposed below in turn."""


def decomposition_table() -> dict[OpOverload, Decomposition]:
    """What capture replaces, by overload."""
    return {
        **_from_torch(),
        aten.mean.default: _mean,
        aten.mean.dim: _mean_dim,
        aten.var.correction: _var,
        aten.var_mean.correction: _var_mean,
        aten.std.correction: _std,
        aten.std_mean.correction: _std_mean,
        aten.nll_loss_forward.default: _nll_loss(aten.nll_loss_forward.default),
        aten.nll_loss2d_forward.default: _nll_loss(aten.nll_loss2d_forward.default),
    }


def _from_torch() -> dict[OpOverload, Decomposition]:
    found = get_decompositions(list(_FROM_TORCH))
    return {op: decomposition for op, decomposition in found.items() if isinstance(op, OpOverload)}


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    mean: Tensor = aten.div.Scalar(aten.sum.default(x, dtype=dtype), x.numel())
    return mean


def _mean_dim(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    total = aten.sum.dim_IntList(x, dim, keepdim, dtype=dtype)
    mean: Tensor = aten.div.Scalar(total, _count(x, dim))
    return mean


def _count(x: Tensor, dim: Sequence[int] | None) -> int:
    """Elements that a reduction over `dim` puts together; none named means all, as in torch."""
    return math.prod(x.shape[d] for d in dim) if dim else x.numel()


def _var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = list(dim) if dim else list(range(x.dim()))
    count = _count(x, dims)
    mean = aten.div.Scalar(aten.sum.dim_IntList(x, dims, True), count)
    centred = aten.sub.Tensor(x, mean)
    squares = aten.sum.dim_IntList(aten.mul.Tensor(centred, centred), dims, keepdim)
    divisor = max(0.0, count - (1 if correction is None else correction))
    variance = aten.div.Scalar(squares, divisor) if divisor else aten.mul.Scalar(squares, math.inf)
    if not keepdim:
        mean = aten.view.default(mean, list(variance.shape))
    return variance, mean


def _var(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _std(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _std_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    variance, mean = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return variance.sqrt(), mean


def _nll_loss(op: OpOverload) -> Decomposition:
    """Sum over the labels that count, divided by their total weight. Backward stays as it is: given the total weight,
    it is pointwise."""

    def forward(
        x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        if reduction != _MEAN:
            return NotImplemented  # type: ignore[no-any-return]  # stays as it is
        total: Tensor
        total_weight: Tensor
        total, total_weight = op(x, target, weight, _SUM, ignore_index)
        return total / total_weight, total_weight

    return forward
