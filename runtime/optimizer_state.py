"""How much state an optimizer keeps: measured by one step of a twin on a small parameter, so any class will do.

And a step as it is without the hooks that torch calls around it.
"""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["num_state_tensors", "step_without_hooks"]

_SIDE = 32
"""Of the square parameter that is tried: large enough that scalars and factored state count as little."""


def num_state_tensors(optimizer: Optimizer) -> float:
    """State elements for each parameter element, of the group that keeps most; 2 for Adam. Hooks are not called."""
    return max((_of_group(optimizer, group) for group in optimizer.param_groups), default=0.0)


def _of_group(optimizer: Optimizer, group: dict[str, object]) -> float:
    """On `meta`, without memory, since this comes in the middle of a step; who reads values is tried for real."""
    plain: dict[str, object] = {key: False for key in ("fused", "foreach") if key in group}
    try:
        return _tried(optimizer, {**group, **plain}, "meta")
    except (RuntimeError, NotImplementedError):
        return _tried(optimizer, group, "cpu")


def _tried(optimizer: Optimizer, group: dict[str, object], device: str) -> float:
    parameter = nn.Parameter(torch.ones(_SIDE, _SIDE, device=device))
    parameter.grad = torch.ones(_SIDE, _SIDE, device=device)
    twin = _twin(optimizer, {**group, "params": [parameter], "capturable": False})
    step_without_hooks(twin)
    tensors = [value for value in _flat(twin.state[parameter]) if value.numel() > 1]
    return sum(tensor.numel() for tensor in tensors) / _SIDE**2


def step_without_hooks(optimizer: Optimizer) -> None:
    """`optimizer.step()` without hooks, its own and those for all optimizers."""
    step, wants_closure = _bare_step(type(optimizer).step)
    step(optimizer, *([_no_loss] if wants_closure else []))


@functools.cache
def _bare_step(wrapped: Callable[..., object]) -> tuple[Callable[..., object], bool]:
    """The step without the wrapper that calls hooks, and whether it cannot do without a closure."""
    step: Callable[..., object] = getattr(wrapped, "__wrapped__", wrapped)
    closure = inspect.signature(step).parameters.get("closure")
    return step, closure is not None and closure.default is closure.empty


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
