"""What was made before planning keeps working: optimizers (and their schedulers), and weight averages.

An optimizer is bound to the new parameters at its next step, by a hook that torch calls before every step: parameters
are exchanged in `param_groups`, whose dicts stay the same (schedulers go on), and state moves over, tensors of the
parameter's shape cut like the parameter. At an optimizer's first step what state it keeps is compared with the plan.
An `AveragedModel` is found and, at its next update, becomes what one made after planning is.
"""

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from shardwright.ir import PlanError
from shardwright.passes.optimizers import optimizer_spec
from shardwright.runtime.optimizer import TieredOptimizer
from shardwright.runtime.optimizer_state import num_state_tensors
from shardwright.runtime.parameters import Home, as_dtensor, local_part
from shardwright.runtime.stale import StaleParameter, make_stale

__all__ = ["follow_averages", "follow_optimizers"]


def follow_optimizers(
    module: nn.Module, replaced: Mapping[nn.Parameter, nn.Parameter], home: Home, planned: str
) -> None:
    """From now on, before any optimizer steps: bind it to `module`'s parameters, and check its state against `planned`
    (a name of `passes.optimizers`; empty for no check)."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    for old, new in replaced.items():
        make_stale(old, module, names[new])
    follower = _Follower(weakref.ref(module), home, planned)
    handle = register_optimizer_step_pre_hook(follower)
    weakref.finalize(module, handle.remove)


class _Follower:
    """The hook of one planned module."""

    def __init__(self, module: "weakref.ref[nn.Module]", home: Home, planned: str) -> None:
        self._module = module
        self._home = home
        self._planned = planned
        self._states: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers seen, with the identity of their state table: load_state_dict makes a new one."""

    def __call__(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        stale = any(isinstance(p, StaleParameter) for group in optimizer.param_groups for p in group["params"])
        module = self._module()
        if module is None or (not stale and self._states.get(optimizer) == id(optimizer.state)):
            return
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for group in optimizer.param_groups:
            group["params"] = [self._rebound(optimizer, parameter, names) for parameter in group["params"]]
        ours = any(id(parameter) in names for group in optimizer.param_groups for parameter in group["params"])
        if ours and self._planned and optimizer not in self._states:
            _check_state(optimizer, self._planned)
        self._states[optimizer] = id(optimizer.state)

    def _rebound(self, optimizer: Optimizer, parameter: Tensor, names: Mapping[int, str]) -> Tensor:
        """The module's own parameter, with its state cut like it; others as they are."""
        new = parameter._successor() if isinstance(parameter, StaleParameter) else parameter
        if id(new) not in names:
            return parameter  # of another module; if that one is planned, its own hook sees to it
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[new] = {key: self._cut(value, names[id(new)], new) for key, value in state.items()}
        return new

    def _cut(self, value: object, name: str, new: Tensor) -> object:
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != new.shape or value.dim() == 0:
            return value
        return as_dtensor(local_part(value, name, self._home), new.shape, self._home.layout(name), self._home)


_STATE_TOLERANCE = 0.1
"""Factored state, rows and columns, counts as none."""


def _check_state(optimizer: Optimizer, planned: str) -> None:
    """Raises PlanError for an optimizer that keeps more than was planned; one that keeps less is told once."""
    sample = optimizer.sample() if isinstance(optimizer, TieredOptimizer) else optimizer
    spec, found, kind = optimizer_spec(planned), num_state_tensors(sample), type(sample).__name__
    if found > spec.num_state_tensors + _STATE_TOLERANCE:
        raise PlanError(
            f"expected an optimizer with at most {spec.num_state_tensors} state tensors a parameter, as planned for "
            f"{planned}, found {kind} with {found:g}; plan again with the optimizer you use (--optimizer)"
        )
    if spec.is_fused and not all(group.get("fused") for group in sample.param_groups):
        raise PlanError(
            f"expected a fused optimizer, as planned for {planned}, found {kind} without fused=True, whose step takes "
            f"more memory; add fused=True, or plan again with --optimizer {planned.removesuffix('-fused')}"
        )
    if found < spec.num_state_tensors - _STATE_TOLERANCE:
        warnings.warn(
            f"the plan keeps memory for {planned} ({spec.num_state_tensors} state tensors a parameter), and {kind} "
            f"keeps {found:g}: it fits, and a plan for {kind} may be faster",
            stacklevel=5,
        )


def follow_averages(module: nn.Module, adopt: Callable[[nn.Module, nn.Module], None]) -> None:
    """Let weight averages made before planning take the planned module: `adopt(copy, module)` plans their copy."""
    for found in gc.get_objects():
        # type() and not isinstance: dead weak proxies raise when asked for their class.
        if issubclass(type(found), AveragedModel) and type(found.module) in type(module).__mro__:
            found.update_parameters = functools.partial(_update, weakref.ref(found), adopt)


def _update(
    averaged: "weakref.ref[AveragedModel]", adopt: Callable[[nn.Module, nn.Module], None], model: nn.Module
) -> None:
    """`AveragedModel.update_parameters`, for one made before `model` was planned."""
    found = averaged()
    if found is None:
        return
    if any(isinstance(p, DTensor) for p in model.parameters()):
        if not any(isinstance(p, DTensor) for p in found.module.parameters()):
            adopt(found.module, model)
        del found.update_parameters  # from here on it is an ordinary one
    AveragedModel.update_parameters(found, model)
