"""A batch of the planned shapes, made from the plan alone: what capture needs before the first real batch is there."""

import inspect

import torch
from torch import nn

from shardwright.ir import Plan
from shardwright.runtime.torch_ops import TORCH_DTYPES

__all__ = ["planned_kwargs"]


def planned_kwargs(module: nn.Module, plan: Plan) -> dict[str, torch.Tensor] | None:
    """Keyword arguments on `meta`, or None where an input is nested and its name does not tell the structure."""
    parameters = inspect.signature(module.forward).parameters
    if any(spec.name not in parameters for spec in plan.identity.inputs):
        return None
    return {
        spec.name: torch.empty(spec.type.shape, dtype=TORCH_DTYPES[spec.type.dtype], device="meta")
        for spec in plan.identity.inputs
    }
