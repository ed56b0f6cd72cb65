"""The module that trains: the user's own, with its own class, names and signature, running the plan's program.

`install` replaces the parameters by this rank's shards and gives the module a subclass of its class whose `forward`
runs the program in train mode with gradients on. Every other forward (eval, no_grad, inference_mode) runs the model's
own code on gathered parameters; it is collective, like the rest: all ranks call it, or none.
"""

import copy
import copyreg
import functools
import types
from collections.abc import Callable, Mapping
from typing import SupportsIndex

import torch
from torch import Tensor, nn

from shardwright.ir import Decisions, DiskError, Graph, InputKind, PlanError, format_layout
from shardwright.passes.copies import on_host
from shardwright.runtime.agreement import raise_everywhere, require_agreement, schedule
from shardwright.runtime.captured import Captured
from shardwright.runtime.emit import emit
from shardwright.runtime.engines import NO_ROOM, Room, engines, uses_disk
from shardwright.runtime.host_steps import HostSteps
from shardwright.runtime.inputs import CHECK_EVERY, Batch, InputMode, PlannedInput, require_equal_inputs
from shardwright.runtime.materialize import init_by_reset, is_on_meta, materialize
from shardwright.runtime.outputs import Outputs
from shardwright.runtime.parameters import Home, distribute
from shardwright.runtime.plain_forward import plain_forward
from shardwright.runtime.program import Program
from shardwright.runtime.ranks import device_mesh, group_names, world
from shardwright.runtime.rebind import follow_averages, follow_host_steps, follow_optimizers
from shardwright.runtime.session import Installed, Session, find_session
from shardwright.runtime.step import local, run_step
from shardwright.runtime.torch_ops import dtype_name

__all__ = ["adopt", "install"]

ProgramMaker = Callable[[Graph, Home, Mapping[str, str]], Program]
"""(rank graph, home, axis to group name) to the program."""


def install(
    module: nn.Module,
    captured: Captured,
    rank_graph: Graph,
    decisions: Decisions,
    *,
    plan_digest: str = "",
    optimizer: str = "",
    room: Room = NO_ROOM,
    inputs: InputMode = "global",
    state_dict: Mapping[str, Tensor] | None = None,
    init: Callable[[nn.Module], None] = init_by_reset,
    seed: int = 0,
    make_program: ProgramMaker | None = None,
) -> nn.Module:
    """Make `module` run the plan; gives the same module. Collective: every rank calls it with the same plan.

    `plan_digest` is compared over the ranks, as are the collectives of the rank graph. `room` bounds what offloaded
    storages and optimizer state take on host and disk. A module on `meta` is filled from `state_dict`, or by `init`
    under `seed`. Raises PlanError, StalePlanError, and DiskError on every rank where one of them has no room on disk.
    """
    _check_module(module)
    mesh = decisions.mesh
    ranks = world()
    devices = device_mesh(mesh) if mesh.num_ranks > 1 or ranks.size > 1 else None
    home = Home(mesh, ranks.rank, ranks.device, devices, decisions.layouts, on_host(rank_graph))
    require_agreement("plan", [plan_digest, str(mesh), *_layout_lines(decisions)])
    require_agreement("collective schedule", schedule(rank_graph))
    make = make_program or _maker(room)
    program = _made_everywhere(make, rank_graph, home, group_names(devices) if devices is not None else {})
    installed = Installed(
        captured=captured,
        rank_graph=rank_graph,
        decisions=decisions,
        program=program,
        home=home,
        outputs=Outputs.of(captured, rank_graph, decisions, home),
        inputs={leaf.name: PlannedInput(leaf.name, leaf.type, home.layout(leaf.name)) for leaf in captured.inputs},
        optimizer=optimizer,
        steps=program.steps or HostSteps(engines(rank_graph, home.device, room)[0], home.device),
    )
    if is_on_meta(module):
        materialize(module, home, state_dict=state_dict, init=init, seed=seed)
        replaced: dict[nn.Parameter, nn.Parameter] = {}
    else:
        replaced = distribute(module, home)
    _lodge(module, home, installed.steps)
    Session(installed, inputs).put_on(module)
    module.__class__ = _planned_class(type(module))
    follow_optimizers(module, replaced, home, optimizer)
    follow_averages(module, adopt)
    if program.stepped:
        follow_host_steps(module, installed.steps)
    return module


def _made_everywhere(make: ProgramMaker, rank_graph: Graph, home: Home, groups: Mapping[str, str]) -> Program:
    """The disk of one rank may be full, and the others would wait for it in the first step."""
    if not uses_disk(rank_graph):
        return make(rank_graph, home, groups)
    try:
        program = make(rank_graph, home, groups)
    except DiskError as error:
        raise_everywhere(error)
        raise
    raise_everywhere(None)
    return program


def _maker(room: Room) -> ProgramMaker:
    def make(rank_graph: Graph, home: Home, groups: Mapping[str, str]) -> Program:
        copies, disk = engines(rank_graph, home.device, room)
        steps = HostSteps(copies, home.device)
        return emit(rank_graph, home.mesh, home.rank, groups, home.device, copies=copies, disk=disk, steps=steps)

    return make


def _lodge(module: nn.Module, home: Home, steps: HostSteps) -> None:
    """Count what lies on the host to the budget there."""
    for name, parameter in module.named_parameters():
        if name in home.on_host:
            steps.pool.adopt(local(parameter), is_copied=True)


def _layout_lines(decisions: Decisions) -> list[str]:
    return [f"place {name} {format_layout(layout)}" for name, layout in sorted(decisions.layouts.items())]


def _check_module(module: nn.Module) -> None:
    if find_session(module) is not None:
        raise PlanError(
            f"expected a module without a plan, found a {type(module).__name__} that has one; build it anew"
        )
    if "forward" in module.__dict__:
        raise PlanError(
            f"expected the forward of the class {type(module).__name__}, found one set on the instance; plan before "
            "anything wraps the model's forward"
        )


def adopt(copied: nn.Module, module: nn.Module) -> None:
    """Give a copy that was made before planning what a copy made after it would have: shards of its own values.

    For averages made by hand with `copy.deepcopy`; an `AveragedModel` is found without. Collective. Raises PlanError.
    """
    session = find_session(module)
    if session is None:
        raise PlanError(f"expected a planned {type(module).__name__}, found one without a plan")
    distribute(copied, session.installed.home)
    Session(session.installed, session.input_mode).put_on(copied)
    copied.__class__ = type(module)


def _planned_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass that looks like `base` and pickles as `base`."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        session = find_session(self)
        if session is None or not (self.training and torch.is_grad_enabled()):
            return plain_forward(self, base.forward, session, args, kwargs)
        return _train_forward(self, session, args, kwargs)

    def reduce(self: nn.Module, protocol: SupportsIndex) -> object:
        plain = {key: value for key, value in self.__dict__.items() if value is not find_session(self)}
        return copyreg._reconstructor, (base, object, None), plain  # type: ignore[attr-defined]

    def deepcopy(self: nn.Module, memo: dict[int, object]) -> nn.Module:
        copied = copyreg.__newobj__(type(self))  # type: ignore[attr-defined]
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied  # type: ignore[no-any-return]

    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": forward,
        "__reduce_ex__": reduce,
        "__deepcopy__": deepcopy,
    }
    return types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(names))


def _train_forward(module: nn.Module, session: Session, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    installed = session.installed
    installed.steps.require_none_begun()
    given = installed.captured.bind(args, kwargs)
    batch = Batch.of(given, installed.inputs, installed.home, session.input_mode)
    state = session.state(module)
    if session.num_steps % CHECK_EVERY == 0:
        require_equal_inputs(batch, installed.inputs, installed.home)
        _check_state(installed, state)
    session.num_steps += 1
    others = {**installed.captured.tensors, **batch.tensors}
    values = run_step(installed.program, installed.rank_graph.loss, state, others)
    with torch.no_grad():
        for name, value in installed.rank_graph.updates.items():
            state[name].copy_(values[value])
    return installed.outputs.build(values, batch.is_local)


def _check_state(installed: Installed, state: Mapping[str, Tensor]) -> None:
    """Raises PlanError where parameters or buffers are no longer those that were planned."""
    frozen = installed.rank_graph.inputs_of(InputKind.FROZEN)
    for name, tensor in state.items():
        planned, found = installed.rank_graph.types[name], local(tensor)
        if dtype_name(found.dtype) != planned.dtype or tuple(found.shape) != planned.shape:
            raise PlanError(
                f"expected {name} as {planned}, found {dtype_name(found.dtype)}{list(found.shape)}; do not convert or "
                "replace parameters after planning: plan again"
            )
        if name in frozen and tensor.requires_grad:
            raise PlanError(f"expected {name} frozen, as planned, found requires_grad=True; plan again to train it")
