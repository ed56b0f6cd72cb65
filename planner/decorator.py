"""The decorator: a model class whose instances plan themselves at their first training forward.

The class stays what it is: `__init__`, `isinstance`, `from_pretrained` and pickling are untouched. With `plan=` the
parameters become shards right after `__init__`, where the planned inputs can be told from their names, else at the
first training forward. Without it rank 0 plans there and tells the others; its failure is raised on every rank.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ir import (
    Clip,
    Cluster,
    ClusterError,
    Graph,
    Plan,
    ShardwrightError,
    load_cluster,
    load_plan,
    parse_graph,
    parse_plan,
    print_graph,
    print_plan,
)
from shardwright.planner.api import plan as plan_model
from shardwright.planner.defaults import silent
from shardwright.planner.progress import ProgressSink
from shardwright.runtime.apply import apply_captured
from shardwright.runtime.capture import capture
from shardwright.runtime.disk_directory import cluster_disk_path
from shardwright.runtime.inputs import InputMode
from shardwright.runtime.loss import LossFunction
from shardwright.runtime.own_forward import has_own_forward
from shardwright.runtime.planned_inputs import planned_kwargs
from shardwright.runtime.ranks import world

__all__ = ["parallelize"]

Model = TypeVar("Model", bound=type[nn.Module])


@dataclass(frozen=True)
class _Options:
    cluster: str | Cluster | None
    budget: str | int
    host: str | int
    disk: str | int
    disk_path: str | Path | None
    optimizer: str
    clip: str | None
    plan: str | Path | None
    loss: str | None
    loss_fn: LossFunction | None
    outputs: Collection[str]
    inputs: InputMode
    time_limit: float
    on_plan: Callable[[Plan, Graph], None] | None
    progress: ProgressSink


def parallelize(
    *,
    cluster: str | Cluster | None = None,
    budget: str | int,
    host: str | int = 0,
    disk: str | int = 0,
    disk_path: str | Path | None = None,
    optimizer: str = "adamw",
    clip: str | None = Clip.UNKNOWN,
    plan: str | Path | None = None,
    loss: str | None = None,
    loss_fn: LossFunction | None = None,
    outputs: Collection[str] = (),
    inputs: InputMode = "global",
    time_limit: float = 60.0,
    on_plan: Callable[[Plan, Graph], None] | None = None,
    progress: ProgressSink = silent,
) -> Callable[[Model], Model]:
    """Decorate an `nn.Module` class. `cluster` defaults to the ranks of this run on this machine's CPUs.

    `host` and `disk` are what a rank may use of these; `disk_path` is this rank's directory for what goes to disk, by
    default that of the cluster, else the user's cache folder.
    `outputs` names what the training forward returns beside the loss (`.logits`). `clip=None` declares that the script
    leaves gradients to the optimizer alone, which may then step while backward goes on, and parameters lie on the host.
    `plan` is a plan file: then nothing is solved, and the solver is not even imported. `on_plan(plan, graph)` is called
    on rank 0 once the plan is known; `progress` while it is made.
    """
    options = _Options(
        cluster=cluster,
        budget=budget,
        host=host,
        disk=disk,
        disk_path=disk_path,
        optimizer=optimizer,
        clip=clip,
        plan=plan,
        loss=loss,
        loss_fn=loss_fn,
        outputs=outputs,
        inputs=inputs,
        time_limit=time_limit,
        on_plan=on_plan,
        progress=progress,
    )

    def decorate(cls: Model) -> Model:
        cls.forward = _forward(cls.forward, options)
        if plan is not None:
            cls.__init__ = _init(cls, cls.__init__, options)  # type: ignore[method-assign]
        return cls

    return decorate


def _forward(plain: Callable[..., object], options: _Options) -> Callable[..., object]:
    @functools.wraps(plain)
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if has_own_forward(self) or not (self.training and torch.is_grad_enabled()):
            return plain(self, *args, **kwargs)
        _install(self, options, args, kwargs)
        return self(*args, **kwargs)

    return forward


def _init(cls: type[nn.Module], plain: Callable[..., None], options: _Options) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: nn.Module, *args: object, **kwargs: object) -> None:
        plain(self, *args, **kwargs)
        if type(self) is not cls or options.plan is None:
            return  # a subclass's __init__ is not done yet: it is planned at its first forward
        batch = planned_kwargs(self, load_plan(Path(options.plan))[0])
        if batch is not None:
            _install(self, options, (), batch)

    return init


def _install(module: nn.Module, options: _Options, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
    """Collective: every rank captures, so that every rank knows how its inputs map to the graph."""
    plan, graph = _plan(module, options, args, kwargs)
    loss = None if options.loss_fn is not None else plan.identity.loss
    # The graph's own name: a subclass may run a plan that was made for its base.
    captured = capture(module, args, kwargs, loss=loss, loss_fn=options.loss_fn, name=graph.name)
    apply_captured(module, plan, graph, captured, inputs=options.inputs, disk_path=_disk_path(options, plan))
    if options.on_plan is not None and world().rank == 0:
        options.on_plan(plan, graph)


def _disk_path(options: _Options, plan: Plan) -> str | Path | None:
    """A cluster that was given as such is not found by its name."""
    if options.disk_path is not None or not plan.budget.disk_bytes or not isinstance(options.cluster, Cluster):
        return options.disk_path
    return cluster_disk_path(options.cluster)


def _plan(
    module: nn.Module, options: _Options, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Plan, Graph]:
    if options.plan is not None:
        return load_plan(Path(options.plan))
    ranks = world()
    told: list[object] = [None]
    if ranks.rank == 0:
        told[0] = _plan_here(module, options, args, kwargs, ranks.size)
    if ranks.size > 1:
        dist.broadcast_object_list(told, src=0)
    answer = told[0]
    if isinstance(answer, ShardwrightError):
        raise answer
    if not isinstance(answer, tuple):
        raise ShardwrightError(f"expected a plan from rank 0, it failed: {answer}")
    plan_text, graph_text = answer
    graph = parse_graph(graph_text)
    return parse_plan(plan_text, graph), graph


def _plan_here(
    module: nn.Module, options: _Options, args: tuple[object, ...], kwargs: Mapping[str, object], num_ranks: int
) -> object:
    """The texts of plan and graph, or what went wrong: the other ranks wait for an answer, whatever it is."""
    cluster = options.cluster or f"cpu:{num_ranks}"
    try:
        machines = load_cluster(cluster) if isinstance(cluster, str) else cluster
        if machines.num_ranks != num_ranks:
            raise ClusterError(
                f"expected a cluster of the {num_ranks} ranks of this run, found {machines.name} with"
                f" {machines.num_ranks}; start as many ranks, or name another cluster"
            )
        found = plan_model(
            module,
            args,
            kwargs,
            cluster=machines,
            budget=options.budget,
            host=options.host,
            disk=options.disk,
            optimizer=options.optimizer,
            clip=options.clip,
            loss=options.loss,
            loss_fn=options.loss_fn,
            outputs=options.outputs,
            time_limit=options.time_limit,
            progress=options.progress,
        )
    except ShardwrightError as error:
        return error
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return print_plan(found.plan, found.graph), print_graph(found.graph)
