"""An optimizer that steps each parameter where the plan keeps its state, by its master where it has one.

Parameters whose state is on the device and that need no master are stepped together by the ordinary optimizer, fused
where torch has it. Every other has an optimizer of its own (`one_step`): with master weights a parameter of less than
float32 is stepped by its float32 master, and one with state on the host is stepped there (`host_steps`).
`param_groups`, `state` and `state_dict` look as those of the ordinary optimizer, so schedulers and checkpoints see no
difference; a master is one tensor more in the state.
"""

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.ir import PlanError, ShardwrightError, Tier
from shardwright.passes.optimizers import MASTER_BYTES, OPTIMIZERS
from shardwright.runtime.host_steps import Job
from shardwright.runtime.one_step import MASTER, Kind, OneStep
from shardwright.runtime.optimizer_state import step_without_hooks
from shardwright.runtime.planned_state import require_planned_state
from shardwright.runtime.session import Session, find_session
from shardwright.runtime.state_place import StatePlace, shown
from shardwright.runtime.step import local
from shardwright.runtime.stepped_gradient import SteppedGradient, require_as_begun, require_no_gradient

__all__ = ["TieredOptimizer", "optimizer"]

Group: TypeAlias = dict[str, Any]


def optimizer(
    model: nn.Module,
    kind: Kind,
    params: Iterable[Any] | None = None,
    *,
    master_weights: bool | None = None,
    **options: object,
) -> Optimizer:
    """`kind(params, **options)` that steps each parameter where the plan of `model` keeps its state.

    `params` are parameters or groups as `kind` takes them, all of the model's where none are given. With
    `master_weights` parameters of bfloat16 and float16 have float32 masters and float32 state; by default those have
    whose plan was made for it (`adamw-master`).
    """
    given = list(model.parameters() if params is None else params)
    session = find_session(model)
    is_ordinary = session is not None and Tier.HOST not in session.installed.decisions.tiers.values()
    if is_ordinary and not _wants_masters(master_weights, session):
        return kind(given, **_fused(kind, options))
    made = TieredOptimizer(model, kind, given, options, master_weights)
    if session is not None:
        session.installed.steps.attach(made)
    return made


def _wants_masters(declared: bool | None, session: Session | None) -> bool:
    if declared is not None or session is None:
        return bool(declared)
    planned = OPTIMIZERS.get(session.installed.optimizer)
    return planned is not None and planned.has_master


def _fused(kind: Kind, options: dict[str, object]) -> dict[str, object]:
    """The options, with the fused implementation where torch has one and nobody chose another."""
    chosen = any(options.get(key) for key in ("fused", "foreach", "differentiable", "capturable"))
    has_fused = "fused" in inspect.signature(kind).parameters
    return {**options, "fused": True} if has_fused and not chosen and "fused" not in options else dict(options)


class TieredOptimizer(Optimizer):
    """Made by `optimizer`."""

    def __init__(
        self,
        model: nn.Module,
        kind: Kind,
        params: list[Any],
        options: dict[str, object],
        master_weights: bool | None = None,
    ) -> None:
        # The ordinary one checks the options and fills in their defaults.
        ordinary = kind(params, **_fused(kind, options))
        super().__init__(ordinary.param_groups, ordinary.defaults)
        self._model = weakref.ref(model)
        self._kind = kind
        self._options = _fused(kind, options)
        self._declared_masters = master_weights
        self._device: Optimizer | None = None
        self._single: dict[Tensor, OneStep] = {}
        """Parameters that are stepped one by one."""
        self._names: dict[Tensor, str] = {}
        """Those of them whose state is on the host, with their names in the plan."""
        self._checked: set[str] = set()
        """Planned optimizers that this one was compared with."""
        self._built_for: tuple[object, ...] = ()
        self._begun: dict[Tensor, Group] = {}
        """Parameters that backward has stepped since the last step, with the options it used."""

    @property
    def host_bytes(self) -> int:
        """State on the host now, masters included."""
        return sum(self._single[parameter].state_bytes for parameter in self._names)

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has, or will have, a float32 master."""
        return any(self._keeps_master(p) for group in self.param_groups for p in group["params"])

    def sample(self) -> Optimizer:
        """The ordinary optimizer with the same options, on a parameter of nobody."""
        return self._kind([nn.Parameter(torch.zeros(1))], **self._options)

    def is_for(self, model: nn.Module) -> bool:
        """Whether it was made for that model."""
        return self._model() is model

    def check(self, planned: str) -> None:
        """Raises PlanError where it keeps more than was planned, by a name of `passes.optimizers` if any."""
        if planned and planned not in self._checked:
            self._checked.add(planned)
            require_planned_state(self, self.sample(), planned, self.has_masters)

    @property
    def has_begun(self) -> bool:
        """Whether backward has stepped parameters and `step` has not come yet."""
        return bool(self._begun)

    def begin_in_backward(self, name: str, parameter: Tensor) -> Job:
        """What backward does to the plan's parameter `name`, whose local memory is `parameter`, with today's options.

        Raises ShardwrightError where the script does what it declared not to.
        """
        session = self._session()
        if session is not None and not self._begun:
            self.check(session.installed.optimizer)
            self._build()
        found, group = self._owner(name)
        if local(found).data_ptr() != parameter.data_ptr():
            raise PlanError(
                f"expected {name} of the model that the optimizer was made for, found that of a copy, which backward "
                "would step; give the copy a plan and an optimizer of its own, or plan without --clip none"
            )
        require_no_gradient(found, name, found in self._begun)
        self._begun[found] = _copied(_options_of(group))
        return _Job(self._single[found], self._begun[found])

    def _owner(self, name: str) -> tuple[Tensor, Group]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if self._names.get(parameter) == name:
                    return parameter, group
        raise PlanError(
            f"expected {name} among the parameters of the optimizer, since backward steps it, as the plan declares "
            "(clip none), found it missing; give one optimizer all parameters, or plan without --clip none"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            self._refuse_closure()
            with torch.enable_grad():
                loss = closure()
        self._build()
        self._end_begun()
        if self._device is not None:
            for inner, outer in zip(self._device.param_groups, self.param_groups, strict=True):
                inner.update(_options_of(outer))
            step_without_hooks(self._device)
        for group in self.param_groups:
            for parameter in group["params"]:
                is_done = isinstance(parameter.grad, SteppedGradient)
                if parameter in self._single and parameter.grad is not None and not is_done:
                    self._step_single(parameter, _options_of(group))
        return loss

    def _refuse_closure(self) -> None:
        session = self._session()
        if session is not None and session.installed.program.stepped:
            raise ShardwrightError(
                "expected step() without a closure, since backward steps parameters, as the plan declares (clip none), "
                "found one; call forward and backward before it, or plan without --clip none"
            )

    def _end_begun(self) -> None:
        """Backward has stepped these: their state is shown, if what it assumed has come true."""
        begun, self._begun = self._begun, {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in begun or isinstance(parameter.grad, SteppedGradient):
                    name = self._names.get(parameter, "a parameter")
                    require_as_begun(parameter, name, begun.get(parameter), _options_of(group))
                    self._show(parameter)

    def _step_single(self, parameter: Tensor, options: Group) -> None:
        single, value, gradient = self._single[parameter], local(parameter), local(parameter.grad)  # type: ignore[arg-type]
        session = self._session()
        if parameter in self._names and session is not None:
            steps = session.installed.steps
            under_way = steps.start(_Job(single, options), value, gradient)
            steps.stepped(value, steps.sent(under_way, gradient))
        else:
            single.run(value, gradient, options)
        self._show(parameter)

    def _show(self, parameter: Tensor) -> None:
        """The parameter's state, as the user sees it."""
        found = self._single[parameter].state
        self.state[parameter] = {
            key: shown(value, parameter) if isinstance(value, Tensor) else value for key, value in found.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; masters and their state keep their dtype, and what is on the host never sees the device."""
        boxed = {
            index: {key: _Boxed(value) if isinstance(value, Tensor) else value for key, value in state.items()}
            for index, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": boxed})
        found: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for parameter, state in self.state.items():
            found[parameter] = {k: v.tensor if isinstance(v, _Boxed) else v for k, v in state.items()}
        self.state = found
        self._built_for = ()

    def _build(self) -> None:
        """Make the inner optimizers anew where the parameters are not those they were made for."""
        session = self._session()
        built_for = (id(session), *(id(p) for group in self.param_groups for p in group["params"]))
        if built_for == self._built_for:
            return
        model = self._model()
        named = () if model is None else model.named_parameters()
        names: dict[Tensor, str] = {parameter: name for name, parameter in named}
        self._names = self._on_host(names)
        self._single, rest = {}, []
        for group in self.param_groups:
            ordinary = []
            for parameter in group["params"]:
                has_master = self._keeps_master(parameter)
                state = self._placed(parameter, names.get(parameter, ""), group, has_master)
                if parameter in self._names or has_master:
                    self._single[parameter] = OneStep(self._kind, self._options, _local(state), has_master)
                else:
                    ordinary.append(parameter)
                if state:
                    self.state[parameter] = state
            rest.append({**group, "params": ordinary})
        self._device = None
        if any(group["params"] for group in rest):
            self._device = self._kind(rest, **self._options)
            self._device.state = self.state
        self._built_for = built_for

    def _keeps_master(self, parameter: Tensor) -> bool:
        wanted = _wants_masters(self._declared_masters, self._session())
        return wanted and parameter.is_floating_point() and parameter.element_size() < MASTER_BYTES

    def _on_host(self, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Our parameters whose state belongs on the host, with their names."""
        session = self._session()
        if session is None:
            return {}
        tiers = session.installed.decisions.tiers
        ours = (parameter for group in self.param_groups for parameter in group["params"] if parameter in names)
        found = {parameter: names[parameter] for parameter in ours if tiers.get(names[parameter]) is Tier.HOST}
        if found and getattr(self._kind, "__name__", "") not in {spec.torch_name for spec in OPTIMIZERS.values()}:
            raise PlanError(
                f"expected an optimizer that works element by element for state on the host "
                f"({', '.join(sorted({spec.torch_name for spec in OPTIMIZERS.values()}))}), found {self._kind}; plan "
                "without a host budget for state"
            )
        return found

    def _session(self) -> Session | None:
        model = self._model()
        return None if model is None else find_session(model)

    def _placed(self, parameter: Tensor, name: str, group: Group, has_master: bool) -> dict[str, Any]:
        """State that is there already, in its dtype and on its tier, tensors of the parameter's shape cut like it."""
        device = torch.device("cpu") if parameter in self._names else local(parameter).device
        fused = group.get("fused") or group.get("capturable")
        place = StatePlace(parameter, name, self._session(), device, has_master, bool(fused))
        return {
            key: place.put(key, value) if isinstance(value, Tensor) else value
            for key, value in self.state.get(parameter, {}).items()
            if has_master or key != MASTER
        }


@dataclass(frozen=True, eq=False, slots=True)
class _Boxed:
    """A tensor that `Optimizer.load_state_dict` hands on as it is."""

    tensor: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    """One parameter's step, with the options of its group as they are now."""

    single: OneStep
    options: Group

    @property
    def reads_value(self) -> bool:
        return self.single.reads_value

    @property
    def tensors(self) -> Iterator[Tensor]:
        return self.single.tensors

    def run(self, value: Tensor, gradient: Tensor) -> None:
        self.single.run(value, gradient, self.options)


def _local(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _options_of(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def _copied(options: Group) -> Group:
    """As they are now, also where a learning rate is a tensor that schedulers write to."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
