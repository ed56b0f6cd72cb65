"""How much state an optimizer keeps: measured by one step of a twin on a small parameter, so any class will do."""

import inspect
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["num_state_tensors"]

_SIDE = 32
"""Of the square parameter that is tried: large enough that scalars and factored state count as little."""


def num_state_tensors(optimizer: Optimizer) -> float:
    """State elements for each parameter element, of the group that keeps most; 2 for Adam. Hooks are not called."""
    return max((_of_group(optimizer, group) for group in optimizer.param_groups), default=0.0)


def _of_group(optimizer: Optimizer, group: dict[str, object]) -> float:
    parameter = nn.Parameter(torch.ones(_SIDE, _SIDE))
    parameter.grad = torch.ones(_SIDE, _SIDE)
    twin = _twin(optimizer, {**group, "params": [parameter], "capturable": False})
    step = getattr(type(twin).step, "__wrapped__", type(twin).step)  # without the wrapper that calls hooks
    closure = [_no_loss] if len(inspect.signature(step).parameters) > 1 else []
    step(twin, *closure)  # type: ignore[arg-type]
    tensors = [value for value in _flat(twin.state[parameter]) if value.numel() > 1]
    return sum(tensor.numel() for tensor in tensors) / _SIDE**2


def _no_loss() -> Tensor:
    """A closure for optimizers that want one."""
    return torch.ones(())


def _twin(optimizer: Optimizer, group: dict[str, object]) -> Optimizer:
    """The same class and options, with that one group and no state."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the original
    twin.state = defaultdict(dict)
    twin.param_groups = [group]
    return twin


def _flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _flat(item)]
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, list | tuple) else []
