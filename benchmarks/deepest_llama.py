"""The deepest Llama of width 512 that trains within a budget: FSDP2 that recomputes all, and a plan with host memory.

    python benchmarks/deepest_llama.py [--budget 512MiB] [--host 16GiB] [--clip none] [--most 4] [--fsdp-depth N]
                                       [--deepest-only]

Two gloo ranks on this machine. For FSDP2 (`fully_shard` and `checkpoint_wrapper` on every block) each depth is trained
and its peak measured. For ours each depth is planned under the budget, and the deepest plan is trained and measured by
the same tracker, which counts every storage but those of the host pool and of optimizer state on the host. Both use
AdamW(fused=True); neither clips, which `--clip none` declares: then parameters may lie on the host too. FSDP2's peak
grows by the same bytes with every layer, so its depth is extrapolated from two shallow ones and then measured, one more
layer too. Ours is found by bisection from twice that up to `--most` times. Prints depths, peaks, seconds of a step and
of planning, and what stands in the way of one layer more.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from depth_runs import BATCH, TOKENS, VOCABULARY, WIDTH, Measured, batch_of, build, train_fsdp, train_planned
from peer_runs import LOSS_TOLERANCE
from peers import STEADY_MEMORY

from shardwright.ir import Clip, InfeasibleError, ShardwrightError, StoredPlan, Tier, format_size, parse_size
from shardwright.planner.api import plan
from shardwright.runtime.rank_pool import RankPool

NUM_RANKS: Final = 2
TIME_LIMIT_SECONDS: Final = 60.0 * 20
SHALLOW: Final = (2, 5)
"""Depths that FSDP2's growth is measured on."""


@dataclass
class Planning:
    """Plans by depth, each made once."""

    budget_bytes: int
    host_bytes: int
    clip: str
    """What is declared about gradients."""
    plans: dict[int, StoredPlan]
    seconds: dict[int, float]
    refusals: dict[int, str]
    """Why a depth has no plan."""

    def fits(self, depth: int) -> bool:
        if depth in self.plans or depth in self.refusals:
            return depth in self.plans
        with torch.device("meta"):
            module = build(depth)
        batch = dict(batch_of(torch.Generator().manual_seed(0)))
        start = time.perf_counter()
        try:
            found = plan(
                module, (), batch, cluster=f"cpu:{NUM_RANKS}", budget=self.budget_bytes, host=self.host_bytes,
                optimizer="adamw-fused", clip=self.clip,
            )  # fmt: skip
            self.plans[depth] = StoredPlan(found.plan, found.graph)
        except InfeasibleError as error:
            self.refusals[depth] = str(error)
        self.seconds[depth] = time.perf_counter() - start
        said = format_size(self.plans[depth].plan.prediction.device_bytes) if depth in self.plans else "no plan"
        print(f"  planned {depth} layers in {self.seconds[depth]:.0f} s: {said}", flush=True)
        return depth in self.plans


def deepest(fits: Callable[[int], bool], shallow: int, deep: int) -> int:
    """The largest depth that fits, from `shallow` to below `deep`; 0 where none does."""
    if not fits(shallow):
        return deepest(fits, shallow // 2, shallow) if shallow > 1 else 0
    while deep - shallow > 1:
        middle = (shallow + deep) // 2
        shallow, deep = (middle, deep) if fits(middle) else (shallow, middle)
    return shallow


def deepest_fsdp(pool: RankPool, budget_bytes: int) -> int:
    """By training at each depth."""

    @cache
    def peak_bytes(depth: int) -> int:
        found = pool.run(train_fsdp, depth, 0, timeout_seconds=TIME_LIMIT_SECONDS)[0].peak_bytes
        print(f"  FSDP2 with {depth} layers: {format_size(found)}", flush=True)
        return found

    return deepest_linear(peak_bytes, budget_bytes)


def deepest_linear(peak_bytes: Callable[[int], int], budget_bytes: int) -> int:
    """The largest depth whose peak is within the budget, where each layer adds about the same; 0 where none is."""
    few, more = SHALLOW
    layer_bytes = (peak_bytes(more) - peak_bytes(few)) / (more - few)
    depth = max(1, int(few + (budget_bytes - peak_bytes(few)) / layer_bytes))
    while depth and peak_bytes(depth) > budget_bytes:
        depth -= 1
    while peak_bytes(depth + 1) <= budget_bytes:
        depth += 1
    return depth


def deepest_planned(pool: RankPool, planning: Planning, shallow: int, deep: int) -> tuple[int, Measured | None]:
    """The deepest that has a plan, trained; one layer less where it did not keep its word."""
    depth = deepest(planning.fits, shallow, deep)
    while depth:
        measured = train(pool, planning, depth)
        if measured.peak_bytes <= planning.budget_bytes:
            return depth, measured
        print(f"  measured {format_size(measured.peak_bytes)} with {depth} layers, over the budget", flush=True)
        depth -= 1
        while depth and not planning.fits(depth):
            depth -= 1
    return 0, None


def train(pool: RankPool, planning: Planning, depth: int) -> Measured:
    return pool.run(train_planned, depth, planning.plans[depth], timeout_seconds=TIME_LIMIT_SECONDS)[0]


def require_equal(fsdp: Measured, planned: Measured) -> None:
    """Raises ShardwrightError where the two do not compute the same."""
    if not abs(planned.loss - fsdp.loss) <= LOSS_TOLERANCE * abs(fsdp.loss):
        raise ShardwrightError(f"expected a first loss of {fsdp.loss:.6f} as of FSDP2, the plan has {planned.loss:.6f}")


def row(name: str, depth: int, measured: Measured, predicted: StoredPlan | None) -> str:
    line = (
        f"  {name:24} {depth:5} {format_size(measured.peak_bytes):>9} {format_size(measured.pool_bytes):>9}"
        f" {format_size(measured.state_bytes):>9} {measured.step_seconds:8.2f}s"
    )
    if predicted is None:
        return line
    said = predicted.plan.prediction
    return f"{line} {said.step_seconds:9.2f}s {format_size(said.device_bytes):>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="512MiB", help="of one rank")
    parser.add_argument("--host", default="16GiB", help="host memory of one rank")
    parser.add_argument("--clip", default=Clip.UNKNOWN.value, choices=[*Clip], help="what is declared about gradients")
    parser.add_argument("--most", type=float, default=4, help="times the depth of FSDP2 to look up to")
    parser.add_argument("--fsdp-depth", type=int, default=0, help="take FSDP2's depth as known, and only measure there")
    parser.add_argument("--deepest-only", action="store_true", help="do not train a plan of FSDP2's depth beside it")
    given = parser.parse_args()
    if "MALLOC_MMAP_MAX_" not in os.environ:  # glibc reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | STEADY_MEMORY)
    torch.set_num_threads(1)
    budget_bytes = parse_size(given.budget)
    planning = Planning(budget_bytes, parse_size(given.host), given.clip, {}, {}, {})
    with RankPool(NUM_RANKS) as pool:
        fsdp_depth = given.fsdp_depth or deepest_fsdp(pool, budget_bytes)
        if not fsdp_depth:
            sys.exit(f"FSDP2 does not train one layer within {given.budget}")
        fsdp = pool.run(train_fsdp, fsdp_depth, timeout_seconds=TIME_LIMIT_SECONDS)[0]
        depth, measured = deepest_planned(pool, planning, 2 * fsdp_depth, int(given.most * fsdp_depth) + 1)
        compared = not given.deepest_only and planning.fits(fsdp_depth)
        same = train(pool, planning, fsdp_depth) if compared else None
    if same is not None:
        require_equal(fsdp, same)
    print(
        f"Llama of width {WIDTH}, vocabulary {VOCABULARY}, batch {BATCH} x {TOKENS}, AdamW(fused=True),"
        f" {NUM_RANKS} ranks, {given.budget} a rank"
        f"\n  {'side':24} {'depth':>5} {'peak':>9} {'pool':>9} {'state':>9} {'step':>9} {'predicted':>20}"
    )
    print(row("FSDP2+AC", fsdp_depth, fsdp, None))
    if same is not None:
        print(row("planned, FSDP2's depth", fsdp_depth, same, planning.plans[fsdp_depth]))
    if measured is not None:
        print(row("planned", depth, measured, planning.plans[depth]))
        decisions = planning.plans[depth].plan.decisions
        states, lying = (list(tiers.values()).count(Tier.HOST) for tiers in (decisions.tiers, decisions.parameters))
        print(f"  {depth / fsdp_depth:.2f} times as deep; on the host: state of {states} parameters, {lying} of these")
    for refused in sorted(planning.refusals)[:1]:
        print(f"  {refused} layers: {planning.refusals[refused]}")


if __name__ == "__main__":
    main()
