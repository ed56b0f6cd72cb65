"""The optimizer of a single parameter, apart from the parameter: it steps what it is handed, wherever that is.

With a master, a float32 copy of a parameter of less, the gradient is cast, the master stepped by torch's own optimizer
and the value written from it; master and state are float32. Without one the value itself is stepped. Nothing but state
(and the master) is kept between steps.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.optimizer_state import step_without_hooks

__all__ = ["MASTER", "Kind", "OneStep"]

Kind: TypeAlias = Callable[..., Optimizer]
"""A class of `torch.optim`."""

MASTER = "master"
"""Key of the master in a parameter's state."""


class OneStep:
    """State of one parameter, all in one place: on the device or on the host."""

    def __init__(self, kind: Kind, options: Mapping[str, object], state: Mapping[str, Any], has_master: bool) -> None:
        self._stand_in = nn.Parameter(torch.empty(0))
        self._inner = kind([self._stand_in], **options)
        self._has_master = has_master
        self._master: Tensor | None = state.get(MASTER) if has_master else None
        kept = {key: value for key, value in state.items() if key != MASTER}
        if kept:
            self._inner.state[self._stand_in] = kept

    @property
    def reads_value(self) -> bool:
        """Whether the next step needs the parameter's value: not where there is a master."""
        return self._master is None

    @property
    def state(self) -> dict[str, Any]:
        """As torch keeps it, the master included."""
        found = dict(self._inner.state.get(self._stand_in, {}))
        return found if self._master is None else {**found, MASTER: self._master}

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All that is kept."""
        return (value for value in self.state.values() if isinstance(value, Tensor))

    @property
    def state_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @torch.no_grad()
    def run(self, value: Tensor, gradient: Tensor, options: Mapping[str, Any]) -> None:
        """Step `value` in place, or write it from the master. No hooks are called, so any thread may do it."""
        if self._has_master and self._master is None:
            self._master = value.to(torch.float32)
        target = value if self._master is None else self._master
        self._inner.param_groups[0].update(options)
        self._stand_in.data = target
        self._stand_in.grad = gradient.to(target.dtype)
        try:
            step_without_hooks(self._inner)
        finally:
            self._stand_in.grad = None
            self._stand_in.data = target.new_empty(0)
        if target is not value:
            value.copy_(target)
