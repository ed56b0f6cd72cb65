"""A copy of a module whose parameters and buffers are fake CPU tensors: shapes without memory.

The user's own module is only read: captured parameters keep weak references that would later block replacing them, and
tracing may change Python state. Weights on `meta` or on an accelerator become CPU: on `meta` attention falls apart into
matmuls, and fake CUDA tensors abort in a CPU build of torch.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shardwright.ir import CaptureError, TensorType
from shardwright.runtime.compat import FakeTensor, FakeTensorMode
from shardwright.runtime.own_forward import keep_own_forward
from shardwright.runtime.torch_ops import TORCH_DTYPES, tensor_type

__all__ = ["FakeModule", "fake_copy", "fake_tensor"]


@dataclass(frozen=True)
class FakeModule:
    """The copy and how its tensors are called."""

    module: nn.Module
    names: Mapping[int, str]
    """`id` of each fake parameter and buffer to its canonical name, the first that `named_parameters` or
    `named_buffers` gives."""
    aliases: Mapping[str, str]
    """Every name of every parameter and buffer, tied ones too, to the canonical name."""
    parameters: Mapping[str, TensorType]
    """Canonical names of parameters only, in order. Tracing may replace the copy's tensors: do not look there."""
    buffers: Mapping[str, TensorType]
    """The same of buffers, but for those of a dtype that graphs do not have."""


def fake_tensor(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake CPU tensor of the same shape, dtype and, where it is dense, strides."""
    with mode:
        if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
            return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")


def fake_copy(module: nn.Module, mode: FakeTensorMode) -> FakeModule:
    """Copy everything but the tensors' memory, in train mode (submodules set to eval in a training module stay so).

    Raises CaptureError for a module that cannot be copied.
    """
    memo: dict[int, object] = {}
    for name, parameter in module.named_parameters():
        _check_plain(name, parameter)
        memo[id(parameter)] = nn.Parameter(fake_tensor(parameter, mode), requires_grad=parameter.requires_grad)
    for name, buffer in module.named_buffers():
        _check_plain(name, buffer)
        memo[id(buffer)] = fake_tensor(buffer, mode)
    # The originals live as long as the module, so their ids stay theirs.
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise CaptureError(
            f"expected a module that copy.deepcopy can copy (its weights are not), found {type(module).__name__}, "
            f"which raises {type(error).__name__}: {error}. Keep what cannot be copied out of the module's attributes, "
            "or give it a __deepcopy__"
        ) from error
    if not module.training:
        copied.train()
    keep_own_forward(copied)
    return _with_names(copied)


def _with_names(module: nn.Module) -> FakeModule:
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in named:
        aliases[name] = names.setdefault(id(tensor), name)
    parameters = {name: tensor_type(parameter) for name, parameter in module.named_parameters()}
    known = set(TORCH_DTYPES.values())
    buffers = {name: tensor_type(buffer) for name, buffer in module.named_buffers() if buffer.dtype in known}
    return FakeModule(module, names, aliases, parameters, buffers)


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise CaptureError(f"expected {name} to have a shape, found a lazy one. Run the module once before planning")
    kind = type(tensor.data) if isinstance(tensor, nn.Parameter) else type(tensor)
    if kind not in (torch.Tensor, nn.Parameter, FakeTensor) or tensor.layout != torch.strided:
        raise CaptureError(
            f"expected {name} to be a plain dense tensor, found {kind.__name__} of layout {tensor.layout}. "
            "Plan the module before anything shards, quantises or wraps its parameters"
        )
