"""What was made before planning keeps working: optimizers (and their schedulers), and weight averages.

An optimizer is bound to the new parameters at its next step, by a hook that torch calls before every step: parameters
are exchanged in `param_groups`, whose dicts stay the same (schedulers go on), and state moves over, tensors of the
parameter's shape cut like the parameter. At an optimizer's first step what state it keeps is compared with the plan.
An `AveragedModel` is found and, at its next update, becomes what one made after planning is.
"""

import functools
import gc
import weakref
from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from shardwright.runtime.host_steps import HostSteps
from shardwright.runtime.optimizer import TieredOptimizer
from shardwright.runtime.parameters import Home, as_dtensor, local_part
from shardwright.runtime.planned_state import require_no_host_state, require_planned_state
from shardwright.runtime.stale import StaleParameter, make_stale

__all__ = ["follow_averages", "follow_host_steps", "follow_optimizers"]


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
        if ours and optimizer not in self._states:
            self._check(optimizer, module)
        self._states[optimizer] = id(optimizer.state)

    def _check(self, optimizer: Optimizer, module: nn.Module) -> None:
        if isinstance(optimizer, TieredOptimizer):
            optimizer.check(self._planned)
            return
        require_no_host_state(optimizer, module)
        if self._planned:
            require_planned_state(optimizer, optimizer, self._planned, False)

    def _rebound(self, optimizer: Optimizer, parameter: Tensor, names: Mapping[int, str]) -> Tensor:
        """The module's own parameter, with its state cut like it; others as they are."""
        new = parameter._successor() if isinstance(parameter, StaleParameter) else parameter
        if id(new) not in names:
            return parameter  # of another module; if that one is planned, its own hook sees to it
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            if not isinstance(optimizer, TieredOptimizer):  # that one cuts by itself, where its state lies
                state = {key: self._cut(value, names[id(new)], new) for key, value in state.items()}
            optimizer.state[new] = state
        return new

    def _cut(self, value: object, name: str, new: Tensor) -> object:
        if self._home.devices is None:
            return value  # nothing is split; a copy would be one tensor too many in the middle of a step
        if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != new.shape or value.dim() == 0:
            return value
        return as_dtensor(local_part(value, name, self._home), new.shape, self._home.layout(name), self._home)


def follow_host_steps(module: nn.Module, steps: HostSteps) -> None:
    """Let a tiered optimizer made before planning step within backward."""
    for found in gc.get_objects():
        if type(found) is TieredOptimizer and found.is_for(module):
            steps.attach(found)


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
