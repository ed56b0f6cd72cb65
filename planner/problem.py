"""A planning problem: a captured step, the machines, what may be spent; and the plan of what a search found for it.

Imports the solver, so `api` imports it only when there is something to plan.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from shardwright.ir import (
    Baseline,
    Budget,
    Certificate,
    Clip,
    Cluster,
    ClusterError,
    Graph,
    Identity,
    Mesh,
    Plan,
    PlanError,
    Prediction,
    UserRules,
    check_rules,
    format_size,
    load_cluster,
    parse_rules,
    parse_size,
    verify_graph,
)
from shardwright.ir.files import read_text
from shardwright.passes.copies import CHUNK_BYTES, buffer_bytes
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.baselines import UNAVAILABLE
from shardwright.planner.candidates import Candidate
from shardwright.planner.defaults import GAP, TIME_LIMIT_SECONDS, silent
from shardwright.planner.fold import fold_of
from shardwright.planner.formulation import Machine
from shardwright.planner.meshes import candidate_meshes
from shardwright.planner.progress import Progress, ProgressSink
from shardwright.planner.search import Found, Request
from shardwright.planner.user_rules import allowed_meshes, require_host
from shardwright.runtime.capture import capture
from shardwright.runtime.captured import Captured
from shardwright.runtime.device_prices import ERROR_FRACTION, prices_for
from shardwright.runtime.identity import identify
from shardwright.runtime.loss import LossFunction
from shardwright.runtime.rules import DTensorRules
from shardwright.runtime.versions import installed_versions

__all__ = ["Problem", "clip_for", "pose", "prediction", "require_whole_gradients", "size_of"]


@dataclass(frozen=True)
class Problem:
    """What is to be planned, and for what."""

    captured: Captured
    request: Request
    identity: Identity
    target: str

    def plan(self, found: Found, device_bytes: int) -> Plan:
        """The plan of what was found under that budget."""
        cluster = self.request.machine.cluster
        return Plan(
            target=self.target,
            identity=self.identity,
            cluster=cluster.name,
            budget=replace(self.request.budget, device_bytes=device_bytes),
            decisions=found.chosen.decisions,
            prediction=prediction(found.chosen, cluster),
            certificate=_certificate(found),
            baselines=_baselines(found),
            versions=installed_versions(),
        )


def pose(
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None,
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
) -> Problem:
    """Capture the module and put the question; arguments as those of `api.plan`. Raises CaptureError, ClusterError."""
    if accumulate < 1:
        raise PlanError(f"expected at least one micro-batch a step, found accumulate {accumulate}")
    machines = load_cluster(cluster) if isinstance(cluster, str) else cluster
    limits = Budget(size_of(budget), size_of(host, zero=True), size_of(disk, zero=True))
    _check_disk(limits, machines)
    progress(Progress("capture"))
    captured = capture(module, args, kwargs, loss=loss, loss_fn=loss_fn).keeping(outputs)
    verify_graph(captured.graph)
    wanted = _user_rules(rules, captured.graph, limits.host_bytes)
    prices = prices_for(machines, lambda text: progress(Progress(text)))
    request = Request(
        graph=captured.graph,
        fold=fold_of(captured.graph),
        rules=DTensorRules(),
        machine=Machine(
            machines,
            prices,
            optimizer_spec(optimizer),
            limits.host_bytes,
            limits.disk_bytes,
            accumulate,
            clip_for(clip, accumulate),
        ),
        budget=limits,
        meshes=allowed_meshes(candidate_meshes(machines) if mesh is None else (_checked(mesh, machines),), wanted),
        time_limit_seconds=time_limit,
        gap=gap,
        progress=progress,
        user_rules=wanted,
    )
    identity = identify(captured, optimizer=optimizer, seed=seed, accumulate=accumulate)
    return Problem(captured, request, identity, target or f"{type(module).__module__}.{type(module).__qualname__}")


def _check_disk(limits: Budget, machines: Cluster) -> None:
    """Raises ClusterError, PlanError for a disk budget that nothing can come of."""
    if not limits.disk_bytes:
        return
    wanted = format_size(limits.disk_bytes)
    if machines.disk is None:
        raise ClusterError(
            f"expected a disk in cluster {machines.name!r} for a disk budget of {wanted}, found none:"
            " add a table [disk] to it, or plan without a disk budget"
        )
    if limits.disk_bytes > machines.disk.capacity_bytes:
        raise ClusterError(
            f"expected a disk budget of at most {format_size(machines.disk.capacity_bytes)} a rank, which is what the"
            f" disk of cluster {machines.name!r} has, found {wanted}: lower it, or correct [disk] capacity"
        )
    if limits.host_bytes < buffer_bytes([1]):
        raise PlanError(
            f"expected a host budget of at least {format_size(buffer_bytes([1]))} beside the disk budget of {wanted},"
            f" found {format_size(limits.host_bytes)}: what goes to disk passes through buffers on the host, up to"
            f" {format_size(buffer_bytes([CHUNK_BYTES]))} of them; give the host more"
        )


def _user_rules(path: str | Path | None, graph: Graph, host_bytes: int) -> UserRules:
    """Raises TextError, and PlanError for a rule about nothing that is there or can be."""
    if path is None:
        return UserRules()
    rules = parse_rules(read_text(Path(path), "a rules"), str(path))
    check_rules(rules, graph)
    require_host(rules, host_bytes)
    return rules


def clip_for(declared: str | None, accumulate: int) -> Clip:
    """What a script declares about gradients: None or `none` that it leaves them alone. Raises PlanError."""
    if declared is not None and declared not in tuple(Clip):
        raise PlanError(f"expected clip None, or one of {', '.join(Clip)}, found {declared!r}")
    clip = Clip.NONE if declared is None else Clip(declared)
    require_whole_gradients(clip, accumulate)
    return clip


def require_whole_gradients(clip: Clip, accumulate: int) -> None:
    """Raises PlanError where gradients of several micro-batches are added up and none is to be left by backward."""
    if clip is Clip.NONE and accumulate > 1:
        raise PlanError(
            f"expected accumulate 1 with clip none, found {accumulate}: a gradient that is added up over micro-batches "
            "cannot be used and freed in backward; declare only one of them"
        )


def size_of(size: str | int, zero: bool = False) -> int:
    """Bytes of a size given as a number or a text; `zero` admits `0B`."""
    return size if isinstance(size, int) else parse_size(size, zero=zero)


def prediction(candidate: Candidate, cluster: Cluster) -> Prediction:
    """What a plan says of itself: the figures of its replay."""
    judged = candidate.replay
    error = ERROR_FRACTION[cluster.device.measured]
    return Prediction(judged.step_seconds, error, judged.peak_bytes, judged.host_peak_bytes, judged.disk_peak_bytes)


def _checked(mesh: Mesh, cluster: Cluster) -> Mesh:
    if mesh.num_ranks != cluster.num_ranks:
        raise PlanError(f"expected a mesh of the cluster's {cluster.num_ranks} ranks, found {mesh}")
    return mesh


def _certificate(found: Found) -> Certificate:
    return Certificate(
        objective_seconds=found.objective_seconds,
        bound_seconds=found.bound_seconds,
        space=found.space,
        engine="highs",
        interrupted=found.interrupted,
    )


def _baselines(found: Found) -> tuple[Baseline, ...]:
    judged = [
        Baseline(c.name, c.replay.step_seconds, c.replay.peak_bytes, "" if c.fits else "over budget")
        for c in found.baselines
    ]
    missing = [Baseline(name, None, None, f"n/a: {why}") for name, why in (*found.unavailable, *UNAVAILABLE)]
    return (*judged, *missing)
