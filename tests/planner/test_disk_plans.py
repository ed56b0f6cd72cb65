"""Plans for a disk: what the solver moves there, the ranks move there, bitwise and within what was predicted."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.planner.disk_net import SIZE, TARGET, build, fast_disk
from tests.planner.fast_host import fast_host
from tests.planner.measured_step import measured_peak

from shardwright.ir import ClusterError, Fate, Mesh, PlanError, Tier, load_cluster
from shardwright.planner.api import PlanResult, check_plan, plan
from shardwright.runtime.rank_pool import RankPool
from shardwright.runtime.verify import verify

DEVICE_BYTES, HOST_BYTES, DISK_BYTES = 2_200_000, 300_000, 2**26
"""Everything kept takes twice the device; the host holds the buffers and little else."""


@pytest.fixture(scope="module")
def spilled(tmp_path_factory: pytest.TempPathFactory) -> PlanResult:
    module, args, kwargs = build()
    cluster = fast_disk(tmp_path_factory.mktemp("disk"))
    return plan(
        module, args, kwargs, cluster=cluster, budget=DEVICE_BYTES, host=HOST_BYTES, disk=DISK_BYTES, target=TARGET,
        mesh=Mesh(("dp",), (2,)),
    )  # fmt: skip


def on_disk(found: PlanResult) -> list[str]:
    return [name for name, tier in found.plan.decisions.tiers.items() if tier is Tier.DISK]


@pytest.mark.timeout(120)
def test_where_the_host_is_small_the_solver_moves_to_disk_within_all_budgets(spilled: PlanResult) -> None:
    predicted = spilled.plan.prediction
    names = on_disk(spilled)
    assert len(names) >= 8 and all(spilled.plan.decisions.fates[name] is Fate.OFFLOAD for name in names)
    assert predicted.device_bytes <= DEVICE_BYTES
    assert 0 < predicted.host_bytes <= HOST_BYTES < predicted.disk_bytes <= DISK_BYTES


def test_the_plan_is_read_back_and_checked_as_it_was_made(spilled: PlanResult, tmp_path: Path) -> None:
    spilled.save(tmp_path / "net.plan")
    again = PlanResult.load(tmp_path / "net.plan")
    assert again.plan == spilled.plan
    assert check_plan(again.plan, again.graph) == again.plan
    small = replace(again.plan, budget=replace(again.plan.budget, disk_bytes=2**20))
    with pytest.raises(PlanError, match="within device .*, disk 1MiB; found a peak of device .*, disk "):
        check_plan(small, again.graph)


@pytest.mark.processes
@pytest.mark.timeout(240)
def test_ranks_hold_no_more_than_predicted_on_device_host_and_disk(spilled: PlanResult, two_ranks: RankPool) -> None:
    predicted = spilled.plan.prediction
    for measured in two_ranks.run(measured_peak, spilled.plan, spilled.graph, SIZE, False, timeout_seconds=180):
        assert 0.99 * predicted.device_bytes <= measured.device_bytes <= predicted.device_bytes
        assert measured.pool_bytes <= predicted.host_bytes
        assert measured.disk_bytes == predicted.disk_bytes


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_it_is_bitwise_the_program_that_keeps_everything(spilled: PlanResult, two_ranks: RankPool) -> None:
    found = verify(spilled.plan, spilled.graph, pool=two_ranks, captured=spilled.captured).clean
    assert found.bitwise is True and not found.failures
    assert [path.suffix for path in Path(spilled.plan.cluster).parent.iterdir()] == [".toml"]


def refusal(**given: object) -> str:
    module, args, kwargs = build()
    with pytest.raises((ClusterError, PlanError)) as error:
        plan(module, args, kwargs, budget="1GiB", **given)  # type: ignore[arg-type]
    return str(error.value)


def test_a_disk_budget_that_nothing_can_come_of_is_refused_before_anything_is_captured() -> None:
    machines = fast_host()
    assert "expected a disk in cluster 'fast-host' for a disk budget of 1GiB, found none" in refusal(
        cluster=replace(machines, disk=None), host="1GiB", disk="1GiB"
    )
    assert "expected a disk budget of at most 3.49TiB a rank" in refusal(
        cluster=load_cluster("h100x8"), host="1GiB", disk="4TiB"
    )
    message = refusal(cluster=machines, disk="1GiB")
    assert "expected a host budget of at least 12KiB beside the disk budget of 1GiB, found 0B" in message
