"""Whether an optimizer keeps what its plan has memory for, where the plan has it."""

import warnings

from torch import nn
from torch.optim import Optimizer

from shardwright.ir import PlanError, Tier
from shardwright.passes.optimizers import MASTER_BYTES, optimizer_spec
from shardwright.runtime.optimizer_state import num_state_tensors
from shardwright.runtime.session import find_session

__all__ = ["require_no_host_state", "require_planned_state"]

_STATE_TOLERANCE = 0.1
"""Factored state, rows and columns, counts as none."""


def require_no_host_state(optimizer: Optimizer, module: nn.Module) -> None:
    """Raises PlanError for an ordinary optimizer under a plan that keeps state on the host: it would not."""
    session = find_session(module)
    tiers = {} if session is None else session.installed.decisions.tiers
    moved = [name for name, _ in module.named_parameters() if tiers.get(name) is Tier.HOST]
    if moved:
        kind = type(optimizer).__name__
        raise PlanError(
            f"expected an optimizer made by shardwright.optimizer(model, {kind}, ...), since the plan keeps the state"
            f" of {moved[0]} and {len(moved) - 1} more on the host, found {kind}; make it so, or plan without --host"
        )


def require_planned_state(optimizer: Optimizer, sample: Optimizer, planned: str, has_masters: bool) -> None:
    """Raises PlanError for an optimizer that keeps more than was planned; one that keeps less is told once.

    `sample` is one that torch made with the same options, `has_masters` whether parameters have masters beside that.
    """
    spec, found, kind = optimizer_spec(planned), num_state_tensors(sample), type(sample).__name__
    if found > spec.num_state_tensors + _STATE_TOLERANCE:
        raise PlanError(
            f"expected an optimizer with at most {spec.num_state_tensors} state tensors a parameter, as planned for "
            f"{planned}, found {kind} with {found:g}; plan again with the optimizer you use (--optimizer)"
        )
    if has_masters and not spec.has_master:
        raise PlanError(
            f"expected an optimizer without master weights, as planned for {planned}, found {kind} with "
            f"master_weights=True, which keeps more; plan again with --optimizer {_plain(planned)}-master"
        )
    if spec.is_fused and not all(group.get("fused") for group in sample.param_groups):
        raise PlanError(
            f"expected a fused optimizer, as planned for {planned}, found {kind} without fused=True, whose step takes "
            f"more memory; make it by shardwright.optimizer, or plan again with --optimizer {_plain(planned)}"
        )
    lacks_masters = spec.has_master and not has_masters and _below_float32(optimizer)
    if found < spec.num_state_tensors - _STATE_TOLERANCE or lacks_masters:
        what = f"{kind} without master weights" if lacks_masters else kind
        warnings.warn(
            f"the plan keeps memory for {planned} ({spec.num_state_tensors} state tensors a parameter), and {what} "
            f"keeps {found:g}: it fits, and a plan for {what} may be faster",
            stacklevel=6,
        )


def _below_float32(optimizer: Optimizer) -> bool:
    """Whether it steps any parameter that could have a master."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return any(p.is_floating_point() and p.element_size() < MASTER_BYTES for p in parameters)


def _plain(planned: str) -> str:
    """The same optimizer as torch has it by default."""
    return planned.removesuffix("-fused").removesuffix("-master")
