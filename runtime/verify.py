"""Does the planned program compute what the model computes? Starts gloo ranks, runs steps, compares with plain PyTorch.

What equal means (also in docs/numerics.md): reduction orders differ, and some gradients are zero in exact arithmetic,
so a gradient of n elements passes if norm(difference) <= rtol norm(g) + rtol sqrt(n) rms(all gradients of the model).
Parameters after the optimizer are compared with the plain optimizer fed the same gathered gradients; then the losses of
two more steps. Plans that recompute or offload must be bitwise equal to the same program with everything kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir import Graph, Plan, PlanError
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.captured import Captured
from shardwright.runtime.faults import Fault, FaultKind, collectives
from shardwright.runtime.rank_pool import RankPool
from shardwright.runtime.verify_rank import Comparison, Job, verify_rank

__all__ = ["Report", "parse_faults", "verify"]

TIMEOUT_SECONDS = 600.0
CHUNK = 24
"""Faults tried by one call of the ranks: each call has the time limit."""


@dataclass(frozen=True)
class Report:
    """Everything that was compared."""

    clean: Comparison
    """The program as planned."""
    injected: tuple[tuple[Fault, Comparison], ...] = ()
    """The program with one collective broken on purpose."""
    collectives: tuple[str, ...] = ()
    """Names of what faults count; where there are faults."""

    @property
    def missed(self) -> tuple[Fault, ...]:
        """Faults that the comparison did not see."""
        return tuple(fault for fault, comparison in self.injected if comparison.equal)

    @property
    def equal(self) -> bool:
        """Whether the program, with its injected fault where there is one, computes what the model computes."""
        return self.clean.equal and all(comparison.equal for _, comparison in self.injected)


def parse_faults(text: str, plan: Plan, graph: Graph) -> tuple[Fault, ...]:
    """`drop:3`, `scale:all`, or `all`: every kind at every collective. Raises InputError, PlanError."""
    num_collectives = len(_collectives(plan, graph))
    kind, _, position = text.partition(":")
    if not num_collectives:
        raise PlanError(f"expected a plan with collectives to break, found none on mesh {plan.decisions.mesh}")
    if text == "all" or position == "all":
        kinds = [FaultKind(kind)] if position == "all" and kind in list(FaultKind) else list(FaultKind)
        return tuple(Fault(k, number) for k in kinds for number in range(num_collectives))
    fault = Fault.parse(text)
    if fault.collective >= num_collectives:
        raise PlanError(f"expected one of the plan's {num_collectives} collectives, counted from 0, found {text}")
    return (fault,)


def verify(
    plan: Plan,
    graph: Graph,
    *,
    target: str | None = None,
    faults: Sequence[Fault] = (),
    pool: RankPool | None = None,
    captured: Captured | None = None,
) -> Report:
    """Run the plan on as many gloo ranks as its mesh has, and compare. Imports the plan's target.

    `pool` are ranks already started; `captured`, where at hand, spares them capturing the target anew. Raises
    TargetError, StalePlanError, RankError.
    """
    job = Job(plan, graph, target or plan.target, captured)
    if pool is not None:
        return _verify(pool, job, faults)
    with RankPool(plan.decisions.mesh.num_ranks) as started:
        return _verify(started, job, faults)


def _verify(pool: RankPool, job: Job, faults: Sequence[Fault]) -> Report:
    clean = pool.run(verify_rank, job, (), timeout_seconds=TIMEOUT_SECONDS)[0][0]
    injected: list[tuple[Fault, Comparison]] = []
    for start in range(0, len(faults), CHUNK):
        chunk = tuple(faults[start : start + CHUNK])
        found = pool.run(verify_rank, job, chunk, timeout_seconds=TIMEOUT_SECONDS)[0]
        injected.extend(zip(chunk, found, strict=True))
    return Report(clean, tuple(injected), _collectives(job.plan, job.graph) if injected else ())


def _collectives(plan: Plan, graph: Graph) -> tuple[str, ...]:
    return collectives(rank_graph(graph, plan.decisions))
