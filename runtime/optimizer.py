"""An optimizer whose state may live on the host: each parameter is stepped where its state is.

Parameters whose state the plan keeps on the device are stepped together by the ordinary optimizer, fused where torch
has it. For the others the gradient (and the parameter) go to the host one parameter at a time, torch's own CPU
optimizer steps there, and the parameter comes back; nothing but state stays on the host. `param_groups`, `state` and
`state_dict` look as those of the ordinary optimizer, so schedulers and checkpoints see no difference.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwright.ir import PlanError, Tier
from shardwright.passes.optimizers import OPTIMIZERS
from shardwright.runtime.compat import dtensor_like
from shardwright.runtime.parameters import local_part
from shardwright.runtime.session import Session, find_session
from shardwright.runtime.step import local

__all__ = ["TieredOptimizer", "optimizer"]

Kind: TypeAlias = Callable[..., Optimizer]
"""A class of `torch.optim`."""
Group: TypeAlias = dict[str, Any]


def optimizer(model: nn.Module, kind: Kind, params: Iterable[Any] | None = None, **options: object) -> Optimizer:
    """`kind(params, **options)` that steps each parameter where the plan of `model` keeps its state.

    `params` are parameters or groups as `kind` takes them, all of the model's where none are given.
    """
    given = list(model.parameters() if params is None else params)
    session = find_session(model)
    if session is not None and Tier.HOST not in session.installed.decisions.tiers.values():
        return kind(given, **_fused(kind, options))
    return TieredOptimizer(model, kind, given, options)


def _fused(kind: Kind, options: dict[str, object]) -> dict[str, object]:
    """The options, with the fused implementation where torch has one and nobody chose another."""
    chosen = any(options.get(key) for key in ("fused", "foreach", "differentiable", "capturable"))
    has_fused = "fused" in inspect.signature(kind).parameters
    return {**options, "fused": True} if has_fused and not chosen and "fused" not in options else dict(options)


class TieredOptimizer(Optimizer):
    """Made by `optimizer`."""

    def __init__(self, model: nn.Module, kind: Kind, params: list[Any], options: dict[str, object]) -> None:
        # The ordinary one checks the options and fills in their defaults.
        ordinary = kind(params, **_fused(kind, options))
        super().__init__(ordinary.param_groups, ordinary.defaults)
        self._model = weakref.ref(model)
        self._kind = kind
        self._options = _fused(kind, options)
        self._device: Optimizer | None = None
        self._host: dict[Tensor, _HostStep] = {}
        self._built_for: tuple[int, ...] = ()

    @property
    def host_bytes(self) -> int:
        """State on the host now."""
        return sum(step.state_bytes for step in self._host.values())

    def sample(self) -> Optimizer:
        """The ordinary optimizer with the same options, on a parameter of nobody."""
        return self._kind([nn.Parameter(torch.zeros(1))], **self._options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._build()
        if self._device is not None:
            for inner, outer in zip(self._device.param_groups, self.param_groups, strict=True):
                inner.update(_options_of(outer))
            self._device.step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._host and parameter.grad is not None:
                    self.state[parameter] = self._host[parameter].step(parameter, _options_of(group))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._built_for = ()

    def _build(self) -> None:
        """Make the inner optimizers anew where the parameters are not those they were made for."""
        parameters = tuple(id(p) for group in self.param_groups for p in group["params"])
        if parameters == self._built_for:
            return
        names = self._host_names()
        self._host = {
            parameter: _HostStep(self._kind, self._options, self._loaded(parameter, names[parameter]))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter in names
        }
        self._device = None
        groups = [{**g, "params": [p for p in g["params"] if p not in names]} for g in self.param_groups]
        if any(group["params"] for group in groups):
            self._device = self._kind(groups, **self._options)
            self._device.state = self.state
        self._built_for = parameters

    def _host_names(self) -> dict[Tensor, str]:
        model = self._model()
        session = self._session()
        if model is None or session is None:
            return {}
        tiers = session.installed.decisions.tiers
        names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if tiers.get(name) is Tier.HOST}
        if names and getattr(self._kind, "__name__", "") not in {spec.torch_name for spec in OPTIMIZERS.values()}:
            raise PlanError(
                f"expected an optimizer that works element by element for state on the host "
                f"({', '.join(sorted({spec.torch_name for spec in OPTIMIZERS.values()}))}), found {self._kind}; plan "
                "without a host budget for state"
            )
        return names

    def _session(self) -> Session | None:
        model = self._model()
        return None if model is None else find_session(model)

    def _loaded(self, parameter: Tensor, name: str) -> dict[str, Any]:
        """State that is there already, as local host tensors."""
        session = self._session()
        return {
            key: _host_value(value, parameter, name, session) if isinstance(value, Tensor) and session else value
            for key, value in self.state.get(parameter, {}).items()
        }


def _host_value(value: Tensor, parameter: Tensor, name: str, session: Session) -> Tensor:
    if isinstance(value, DTensor) or value.shape != parameter.shape or value.dim() == 0:
        return local(value).cpu()
    return local_part(value, name, session.installed.home).cpu()


def _options_of(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


class _HostStep:
    """One parameter's optimizer on the host."""

    def __init__(self, kind: Kind, options: dict[str, object], state: dict[str, Any]) -> None:
        self._shadow = nn.Parameter(torch.empty(0))
        self._inner = kind([self._shadow], **options)
        if state:
            self._inner.state[self._shadow] = state

    @property
    def state_bytes(self) -> int:
        state = self._inner.state[self._shadow]
        return sum(value.numel() * value.element_size() for value in state.values() if isinstance(value, Tensor))

    def step(self, parameter: Tensor, options: Group) -> dict[str, Any]:
        """Step it; gives its state as the user sees it."""
        on_device = local(parameter)
        on_host = on_device.cpu()  # the same memory where the device is the CPU
        self._shadow.data = on_host
        self._shadow.grad = None if parameter.grad is None else local(parameter.grad).cpu()
        self._inner.param_groups[0].update(options)
        self._inner.step()
        self._shadow.grad = None
        self._shadow.data = torch.empty(0)
        if on_host.data_ptr() != on_device.data_ptr():
            on_device.copy_(on_host)
        else:
            torch.autograd.graph.increment_version(parameter)
        return {key: _shown(value, parameter) for key, value in self._inner.state[self._shadow].items()}


def _shown(value: Any, parameter: Tensor) -> Any:
    """State of the parameter's shape as a DTensor like the parameter; its memory stays on the host."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == local(parameter).shape:
        return dtensor_like(value, parameter) if value.dim() else value
    return value
