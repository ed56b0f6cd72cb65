"""The peak a plan predicts is the peak its ranks reach: never less, and no more than a hundredth above.

Measured by a tracker of storages that knows nothing of plans: bytes outside the host pool, and the pool apart.
"""

from dataclasses import replace

import pytest
from tests.planner.fast_host import fast_host
from tests.planner.kept_word import PRECISION, require_kept
from tests.planner.measured_models import Model
from tests.planner.measured_step import measured_peak, measured_peaks
from tests.zoo.drawn import drawn_decisions

from shardwright.ir import Decisions, Fate, Graph, Mesh, Schedule, Tier
from shardwright.passes.footprint import Footprint, footprint
from shardwright.passes.optimizers import StepKind, optimizer_spec
from shardwright.passes.pipeline import rank_graph
from shardwright.planner.sweep import sweep
from shardwright.runtime.capture import capture
from shardwright.runtime.rank_pool import RankPool
from shardwright.runtime.rules import DTensorRules

GIB, MIB = 2**30, 2**20
NUM_BUDGETS = 4
STUDIED = "llama", "bert", "vit", "t5", "mixtral", "gpt_neox", "gemma2", "resnet", "perceptron"


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("host_bytes", [0, GIB], ids=["host-0", "host-1GiB"])
@pytest.mark.parametrize("name", ["perceptron"])
def test_the_peak_of_a_plan_is_the_measured_one(two_ranks: RankPool, name: str, host_bytes: int) -> None:
    """From what the fastest plan needs down to the smallest budget, on every rank, first step included."""
    require_all_kept(two_ranks, Model(name), host_bytes)


@pytest.mark.study
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("host_bytes", [0, GIB], ids=["host-0", "host-1GiB"])
@pytest.mark.parametrize("name", STUDIED)
def test_the_peak_of_a_plan_is_the_measured_one_for_many_models(
    two_ranks: RankPool, name: str, host_bytes: int
) -> None:
    require_all_kept(two_ranks, Model(name), host_bytes)


def require_all_kept(ranks: RankPool, model: Model, host_bytes: int) -> None:
    """With AdamW as torch makes it where all state is on the device, and as we do where it may be on the host."""
    module, args, kwargs = model()
    optimizer = "adamw-fused" if host_bytes else "adamw"
    curve = sweep(
        module, args, kwargs, cluster=fast_host(), num_points=NUM_BUDGETS, host=host_bytes, optimizer=optimizer
    )
    plans = [point.result for point in curve.points]
    assert len(plans) == NUM_BUDGETS
    for result in plans:
        for measured in ranks.run(
            measured_peak, result.plan, result.graph, model, host_bytes == 0, timeout_seconds=300
        ):
            require_kept(result.plan, measured)
    if host_bytes:
        tightest = plans[-1].plan.decisions
        assert Fate.OFFLOAD in tightest.fates.values()
        assert Tier.HOST in tightest.tiers.values()


SCHEDULES = Schedule(), Schedule(0, 0, 0, 0, 0), Schedule(MIB, 0, 0, MIB, MIB)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "seeds"), [("llama", (1, 9)), ("vit", (7,)), ("resnet", (0,))])
def test_the_peak_is_the_measured_one_for_plans_nobody_would_choose(
    two_ranks: RankPool, name: str, seeds: tuple[int, ...]
) -> None:
    require_drawn(two_ranks, Model(name), seeds)


@pytest.mark.study
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STUDIED)
def test_the_peak_is_the_measured_one_for_many_plans_nobody_would_choose(two_ranks: RankPool, name: str) -> None:
    require_drawn(two_ranks, Model(name), range(20, 32))


def require_drawn(ranks: RankPool, model: Model, seeds: "range | tuple[int, ...]") -> None:
    """Layouts, fates and gathers drawn at random, under three schedules: what a solver never shows is predicted too."""
    module, args, kwargs = model()
    captured = capture(module, args, kwargs).keeping(())
    programs: list[tuple[Graph, Decisions]] = []
    expected: list[Footprint] = []
    for seed in seeds:
        drawn = drawn_decisions(captured.graph, Mesh(("dp",), (2,)), DTensorRules(), seed, offload=True)
        decisions = replace(drawn, schedule=SCHEDULES[seed % len(SCHEDULES)])
        program = rank_graph(captured.graph, decisions)
        programs.append((program, decisions))
        expected.append(footprint(program, optimizer_spec("adamw"), StepKind.LOOP, {}, 1))
    for found in ranks.run(measured_peaks, model, captured, programs, GIB, timeout_seconds=600):
        for memory, measured in zip(expected, found, strict=True):
            assert (1 - PRECISION) * memory.peak_bytes <= measured.device_bytes <= memory.peak_bytes
            assert measured.first_bytes <= memory.peak_bytes
            assert measured.pool_bytes == memory.host_peak_bytes
