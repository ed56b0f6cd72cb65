"""The public functions: plan a model, put a plan on it, check a plan edited by hand."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.ir import Budget, Clip, Cluster, Graph, Mesh, Plan, PlanError, StoredPlan, format_size, load_cluster
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.defaults import GAP, TIME_LIMIT_SECONDS, silent
from shardwright.planner.progress import ProgressSink
from shardwright.runtime.apply import apply
from shardwright.runtime.captured import Captured
from shardwright.runtime.device_prices import prices_for
from shardwright.runtime.loss import LossFunction

if TYPE_CHECKING:
    from torch import nn

    from shardwright.planner.candidates import Candidate

__all__ = ["PlanResult", "apply", "check_plan", "plan"]


@dataclass(frozen=True)
class PlanResult(StoredPlan):
    """A plan and its graph, with the capture that `apply_captured` wants."""

    captured: Captured


def plan(
    module: "nn.Module",
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    cluster: str | Cluster,
    budget: str | int,
    host: str | int = 0,
    disk: str | int = 0,
    optimizer: str = "adamw",
    loss: str | None = None,
    loss_fn: LossFunction | None = None,
    seed: int = 0,
    accumulate: int = 1,
    clip: str | None = Clip.UNKNOWN,
    outputs: Collection[str] = (),
    mesh: Mesh | None = None,
    rules: str | Path | None = None,
    time_limit: float = TIME_LIMIT_SECONDS,
    gap: float = GAP,
    target: str = "",
    progress: ProgressSink = silent,
) -> PlanResult:
    """Choose layouts, fates and tiers for one training step on a global batch of the shapes of `args`.

    A step that runs forward and backward `accumulate` times before the optimizer does so on as many such batches.
    `outputs` names what the training forward returns beside the loss (`.logits`); the rest is not even computed.
    `clip=None` declares that the script neither clips nor reads nor accumulates gradients: what has its optimizer state
    on the host is then stepped while backward goes on, and may lie there itself.
    `rules` is a file of what the plan must respect (docs/plan-format.md).
    `budget`, `host` and `disk` are bytes of one rank, or texts such as `900MiB`; 0 of host or disk: nothing goes there.
    The module may be on `meta`; it is only read.
    Raises CaptureError, RuleError, ClusterError, and InfeasibleError with the smallest budget that would do.
    """
    # Here and not above: a rank that is given a plan imports this module, and must not load the solver.
    from shardwright.planner.problem import pose
    from shardwright.planner.search import search

    problem = pose(
        module,
        args,
        kwargs,
        cluster=cluster,
        budget=budget,
        host=host,
        disk=disk,
        optimizer=optimizer,
        loss=loss,
        loss_fn=loss_fn,
        seed=seed,
        accumulate=accumulate,
        clip=clip,
        outputs=outputs,
        mesh=mesh,
        rules=rules,
        time_limit=time_limit,
        gap=gap,
        target=target,
        progress=progress,
    )
    made = problem.plan(search(problem.request), problem.request.budget.device_bytes)
    return PlanResult(made, problem.captured.graph, problem.captured)


def check_plan(plan: Plan, graph: Graph) -> Plan:
    """Replay a plan that may have been edited; gives it with its `predict` line renewed.

    Raises PlanError when a line is not legal or the plan no longer fits its budget.
    """
    from shardwright.planner.candidates import judge
    from shardwright.planner.formulation import Machine
    from shardwright.planner.legal import require_legal
    from shardwright.planner.problem import prediction, require_whole_gradients
    from shardwright.runtime.rules import DTensorRules

    machines = load_cluster(plan.cluster)
    require_whole_gradients(plan.decisions.clip, plan.identity.accumulate)
    require_legal(plan, graph, DTensorRules())
    # What the plan was priced with is known; measuring anew would change a plan that nobody edited.
    prices = prices_for(machines, measure=False)
    spec, budget = optimizer_spec(plan.identity.optimizer), plan.budget
    machine = Machine(machines, prices, spec, budget.host_bytes, budget.disk_bytes, plan.identity.accumulate)
    candidate = judge("checked", graph, plan.decisions, machine, plan.budget)
    if not candidate.fits:
        raise PlanError(_too_big(candidate, plan.budget))
    found = prediction(candidate, machines)
    return plan if found == plan.prediction else replace(plan, prediction=found, certificate=None)


def _too_big(candidate: "Candidate", budget: Budget) -> str:
    judged = candidate.replay
    held = ", ".join(f"{s.name} {format_size(s.num_bytes)}" for s in judged.peak_storages[:3])
    limits = _sizes(budget.device_bytes, budget.host_bytes, budget.disk_bytes)
    return (
        f"expected a plan within {limits}; found a peak of"
        f" {_sizes(judged.peak_bytes, judged.host_peak_bytes, judged.disk_peak_bytes)} in"
        f" {judged.peak_phase}, where {held} are the largest. Recompute or offload more, or raise the budget"
    )


def _sizes(device_bytes: int, host_bytes: int, disk_bytes: int) -> str:
    disk = f", disk {format_size(disk_bytes)}" if disk_bytes else ""
    return f"device {format_size(device_bytes)}, host {format_size(host_bytes)}{disk}"
