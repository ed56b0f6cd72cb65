"""Where and how a parameter's optimizer state lies: its tier, its dtype, its shard, and how the user sees it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.runtime.compat import dtensor_like
from shardwright.runtime.parameters import local_part
from shardwright.runtime.session import Session
from shardwright.runtime.step import local

__all__ = ["StatePlace", "shown"]


@dataclass(frozen=True, eq=False, slots=True)
class StatePlace:
    """Where a parameter's state belongs."""

    parameter: Tensor
    name: str
    session: Session | None
    device: torch.device
    has_master: bool
    moves_step: bool
    """Whether the step number lies on the device, as fused optimizers have it."""

    def put(self, key: str, value: Tensor) -> Tensor:
        """A tensor of the state, loaded from anywhere, where it belongs."""
        if key == "step":
            return value.to(torch.float32).to(self.device) if self.moves_step else value
        if not self.parameter.is_floating_point():
            return value
        found = local(value) if isinstance(value, DTensor) else self._cut(value)
        placed = found.to(self.device, torch.float32 if self.has_master else self.parameter.dtype)
        return shown(placed, self.parameter)

    def _cut(self, value: Tensor) -> Tensor:
        is_whole = isinstance(self.parameter, DTensor) and value.shape == self.parameter.shape and value.dim() > 0
        if not is_whole or self.session is None or not self.name:
            return value
        return local_part(value, self.name, self.session.installed.home, self.device)


def shown(value: Tensor, parameter: Tensor) -> Tensor:
    """State of the parameter's shape as a DTensor like the parameter; its memory stays where it is."""
    if isinstance(parameter, DTensor) and value.shape == local(parameter).shape and value.dim():
        return dtensor_like(value, parameter)
    return value
