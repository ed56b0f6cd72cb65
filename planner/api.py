"""The public functions: plan a model, put a plan on it, check a plan edited by hand."""

import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.ir import (
    Baseline,
    Budget,
    Certificate,
    Cluster,
    Graph,
    Mesh,
    Plan,
    PlanError,
    Prediction,
    format_size,
    load_cluster,
    parse_size,
    save_plan,
    verify_graph,
)
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.progress import Progress, ProgressSink
from shardwright.runtime.apply import apply
from shardwright.runtime.capture import capture
from shardwright.runtime.captured import Captured
from shardwright.runtime.device_prices import ERROR_FRACTION, prices_for
from shardwright.runtime.identity import identify
from shardwright.runtime.loss import LossFunction

if TYPE_CHECKING:
    from torch import nn

    from shardwright.planner.candidates import Candidate
    from shardwright.planner.search import Found

__all__ = ["PlanResult", "apply", "check_plan", "plan"]

TIME_LIMIT_SECONDS = 120.0
GAP = 0.01


@dataclass(frozen=True)
class PlanResult:
    """A plan, the graph it is for, and the capture that `apply_captured` wants."""

    plan: Plan
    graph: Graph
    captured: Captured

    def save(self, path: str | Path) -> None:
        """Write `net.plan` and `net.graph` beside it."""
        save_plan(Path(path), self.plan, self.graph)


def _silent(progress: Progress) -> None:
    pass


def plan(
    module: "nn.Module",
    args: tuple[object, ...] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    cluster: str | Cluster,
    budget: str | int,
    host: str | int = 0,
    optimizer: str = "adamw",
    loss: str | None = None,
    loss_fn: LossFunction | None = None,
    seed: int = 0,
    accumulate: int = 1,
    outputs: Collection[str] = (),
    mesh: Mesh | None = None,
    time_limit: float = TIME_LIMIT_SECONDS,
    gap: float = GAP,
    target: str = "",
    progress: ProgressSink = _silent,
) -> PlanResult:
    """Choose layouts, fates and tiers for one training step on a global batch of the shapes of `args`.

    `outputs` names what the training forward returns beside the loss (`.logits`); the rest is not even computed.
    `budget` and `host` are bytes of one rank, or texts such as `900MiB`. The module may be on `meta`; it is only read.
    Raises CaptureError, RuleError, ClusterError, and InfeasibleError with the smallest budget that would do.
    """
    # Here and not above: a rank that is given a plan imports this module, and must not load the solver.
    from shardwright.planner.fold import fold_of
    from shardwright.planner.formulate import Machine
    from shardwright.planner.meshes import candidate_meshes
    from shardwright.planner.search import Request, search
    from shardwright.runtime.rules import DTensorRules

    if accumulate != 1:
        raise PlanError(f"expected accumulate 1, found {accumulate}: call forward and backward that often instead")
    machines = load_cluster(cluster) if isinstance(cluster, str) else cluster
    limits = Budget(_bytes(budget), _bytes(host, zero=True))
    progress(Progress("capture"))
    captured = capture(module, args, kwargs, loss=loss, loss_fn=loss_fn).keeping(outputs)
    verify_graph(captured.graph)
    prices = prices_for(machines, lambda text: progress(Progress(text)))
    found = search(
        Request(
            graph=captured.graph,
            fold=fold_of(captured.graph),
            rules=DTensorRules(),
            machine=Machine(machines, prices, optimizer_spec(optimizer), limits.host_bytes),
            budget=limits,
            meshes=candidate_meshes(machines) if mesh is None else (_checked(mesh, machines),),
            time_limit_seconds=time_limit,
            gap=gap,
            progress=progress,
        )
    )
    made = Plan(
        target=target or f"{type(module).__module__}.{type(module).__qualname__}",
        identity=identify(captured, optimizer=optimizer, seed=seed, accumulate=accumulate),
        cluster=machines.name,
        budget=limits,
        decisions=found.chosen.decisions,
        prediction=_prediction(found.chosen, machines),
        certificate=_certificate(found),
        baselines=_baselines(found),
        versions=_versions(),
    )
    return PlanResult(made, captured.graph, captured)


def _bytes(size: str | int, zero: bool = False) -> int:
    return size if isinstance(size, int) else parse_size(size, zero=zero)


def _checked(mesh: Mesh, cluster: Cluster) -> Mesh:
    if mesh.num_ranks != cluster.num_ranks:
        raise PlanError(f"expected a mesh of the cluster's {cluster.num_ranks} ranks, found {mesh}")
    return mesh


def _prediction(candidate: "Candidate", cluster: Cluster) -> Prediction:
    judged = candidate.replay
    error = ERROR_FRACTION[cluster.device.measured]
    return Prediction(judged.step_seconds, error, judged.peak_bytes, judged.host_peak_bytes)


def _certificate(found: "Found") -> Certificate:
    return Certificate(
        objective_seconds=found.objective_seconds,
        bound_seconds=found.bound_seconds,
        space=found.space,
        engine="highs",
        interrupted=found.interrupted,
    )


def _baselines(found: "Found") -> tuple[Baseline, ...]:
    from shardwright.planner.baselines import UNAVAILABLE

    judged = [
        Baseline(c.name, c.replay.step_seconds, c.replay.peak_bytes, "" if c.fits else "over budget")
        for c in found.baselines
    ]
    missing = [Baseline(name, None, None, f"n/a: {why}") for name, why in (*found.unavailable, *UNAVAILABLE)]
    return (*judged, *missing)


def _versions() -> tuple[tuple[str, str], ...]:
    found = [("python", platform.python_version())]
    for name in ("torch", "ortools", "transformers"):
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def check_plan(plan: Plan, graph: Graph) -> Plan:
    """Replay a plan that may have been edited; gives it with its `predict` line renewed.

    Raises PlanError when a line is not legal or the plan no longer fits its budget.
    """
    from shardwright.planner.candidates import judge
    from shardwright.planner.formulate import Machine
    from shardwright.planner.legal import require_legal
    from shardwright.runtime.rules import DTensorRules

    machines = load_cluster(plan.cluster)
    require_legal(plan, graph, DTensorRules())
    machine = Machine(machines, prices_for(machines), optimizer_spec(plan.identity.optimizer), plan.budget.host_bytes)
    candidate = judge("checked", graph, plan.decisions, machine, plan.budget)
    if not candidate.fits:
        raise PlanError(_too_big(candidate, plan.budget))
    prediction = _prediction(candidate, machines)
    if prediction == plan.prediction:
        return plan
    return replace(plan, prediction=prediction, certificate=None)


def _too_big(candidate: "Candidate", budget: Budget) -> str:
    judged = candidate.replay
    held = ", ".join(f"{s.name} {format_size(s.num_bytes)}" for s in judged.peak_storages[:3])
    return (
        f"expected a plan within device {format_size(budget.device_bytes)}, host {format_size(budget.host_bytes)};"
        f" found a peak of device {format_size(judged.peak_bytes)}, host {format_size(judged.host_peak_bytes)} in"
        f" {judged.peak_phase}, where {held} are the largest. Recompute or offload more, or raise the budget"
    )

