"""The disk is measured with the copies that plans make, once for a machine, a directory and a number of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.runtime.test_measured_prices import HERE, TWO_CPUS

from shardwright.ir import Disk, Tier
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.runtime import measured_prices
from shardwright.runtime.link_curves import Curve
from shardwright.runtime.measure_disk import DISK_SIZES, DiskCurves, disk_rank_curves
from shardwright.runtime.measured_prices import MeasuredPrices
from shardwright.runtime.profile_db import ProfileDb
from shardwright.runtime.rank_pool import RankPool

WRITE = Curve(DISK_SIZES, (1e-3, 2e-3, 1e-2, 8e-2))
READ = Curve(DISK_SIZES, (5e-4, 1e-3, 5e-3, 4e-2))
CURVES = DiskCurves(WRITE, READ)


def test_points_are_read_back_for_the_same_ranks_and_directory_only() -> None:
    points = CURVES.points("ranks=2 in /a")
    assert DiskCurves.from_points("ranks=2 in /a", points) == CURVES
    assert DiskCurves.from_points("ranks=4 in /a", points) is None
    assert DiskCurves.from_points("ranks=2 in /b", points) is None
    assert DiskCurves.from_points("ranks=2 in /a", points[:-1]) is None


def test_the_disk_is_measured_once_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database, asked = ProfileDb(tmp_path / "p.sqlite"), []

    def measured(num_ranks: int, directory: Path) -> DiskCurves:
        asked.append((num_ranks, directory))
        return CURVES

    monkeypatch.setattr(measured_prices, "measure_disk", measured)
    machines = replace(TWO_CPUS, disk=Disk(10**12, 1e9, 1e9, 1e-4, str(tmp_path)))
    for _ in range(2):
        prices = MeasuredPrices(machines, database)
        assert prices.copy_seconds(8 * 2**20, Tier.DISK) == pytest.approx(1e-2)
        assert prices.copy_seconds(8 * 2**20, Tier.DISK, back=True) == pytest.approx(5e-3)
        assert prices.copy_seconds(0, Tier.DISK) == 0
    assert asked == [(2, tmp_path)]
    assert {price.kind for price in database.load(HERE)} == {"disk"}
    checked = MeasuredPrices(machines, database, measure=False)
    assert checked.copy_seconds(8 * 2**20, Tier.DISK) == pytest.approx(1e-2)


def test_what_may_not_be_measured_is_estimated(tmp_path: Path) -> None:
    machines = replace(TWO_CPUS, disk=Disk(10**12, 1e9, 2e9, 1e-4, str(tmp_path)))
    prices = MeasuredPrices(machines, ProfileDb(tmp_path / "p.sqlite"), measure=False)
    estimates = AnalyticalPrices(machines)
    for back in (False, True):
        assert prices.copy_seconds(10**6, Tier.DISK, back) == estimates.copy_seconds(10**6, Tier.DISK, back)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_two_ranks_measure_together_and_leave_no_file(two_ranks: RankPool, tmp_path: Path) -> None:
    sizes = (4_096, 8 * 2**20)
    curves, other = two_ranks.run(disk_rank_curves, str(tmp_path), sizes)
    assert curves == other, "ranks must agree, or their plans would differ"
    assert list(tmp_path.iterdir()) == []
    for curve in (curves.write, curves.read):
        assert curve.sizes == sizes and 0 < curve.seconds[0] <= curve.seconds[1] < 60
