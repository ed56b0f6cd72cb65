"""Put a plan on a model: the run-time half of the product. Imports neither the planner nor the solver."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn

from shardwright.ir import Graph, Plan, StoredPlan, print_plan
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.capture import capture
from shardwright.runtime.captured import Captured
from shardwright.runtime.engines import Room
from shardwright.runtime.identity import require_identity
from shardwright.runtime.inputs import InputMode
from shardwright.runtime.loss import LossFunction
from shardwright.runtime.materialize import init_by_reset
from shardwright.runtime.module import install
from shardwright.runtime.ranks import world
from shardwright.runtime.versions import warn_of_other_versions

__all__ = ["apply", "apply_captured"]

PlanSource = str | Path | StoredPlan
"""A plan file, or a plan with its graph."""


def apply(
    module: nn.Module,
    plan: PlanSource,
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss_fn: LossFunction | None = None,
    inputs: InputMode = "global",
    state_dict: Mapping[str, Tensor] | None = None,
    init: Callable[[nn.Module], None] = init_by_reset,
    disk_path: str | Path | None = None,
) -> nn.Module:
    """Make `module` train by the plan; gives the same module. Collective.

    `args` and `kwargs` are a global batch of the planned shapes (on `meta` if you like): the model is captured again
    and compared with the plan. `disk_path` is this rank's directory for what the plan moves to disk; by default that of
    the plan's cluster, else the user's cache folder. Raises StalePlanError naming what differs, PlanError for a file
    that cannot be read, DiskError where there is no room on disk.
    """
    stored = StoredPlan.load(plan) if isinstance(plan, str | Path) else plan
    found, graph = stored.plan, stored.graph
    loss = None if loss_fn is not None else found.identity.loss
    captured = capture(module, args, kwargs, loss=loss, loss_fn=loss_fn, name=graph.name)
    return apply_captured(
        module, found, graph, captured, inputs=inputs, state_dict=state_dict, init=init, disk_path=disk_path
    )


def apply_captured(
    module: nn.Module,
    plan: Plan,
    graph: Graph,
    captured: Captured,
    *,
    inputs: InputMode = "global",
    state_dict: Mapping[str, Tensor] | None = None,
    init: Callable[[nn.Module], None] = init_by_reset,
    disk_path: str | Path | None = None,
) -> nn.Module:
    """`apply` with the capture at hand."""
    captured = captured.keeping(graph.outputs)
    require_identity(plan, graph, captured, world().size)
    if world().rank == 0:
        warn_of_other_versions(plan)
    return install(
        module,
        captured,
        rank_graph(captured.graph, plan.decisions),
        plan.decisions,
        plan_digest=hashlib.sha256(print_plan(plan, graph).encode()).hexdigest(),
        optimizer=plan.identity.optimizer,
        room=Room(plan.budget.host_bytes, plan.budget.disk_bytes, plan.cluster, disk_path),
        inputs=inputs,
        state_dict=state_dict,
        init=init,
        seed=plan.identity.seed,
    )
