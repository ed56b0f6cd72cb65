"""Links are measured on real ranks, and read back between the points that were measured."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.runtime.link_curves import COLLECTIVE_KINDS, Curve, LinkCurves, group_sizes_of
from shardwright.runtime.measure_links import LinkSizes, measure_links, rank_curves
from shardwright.runtime.rank_pool import RankError, RankPool

SOME_SIZES = LinkSizes((4, 16 * 2**20), (4_096, 2**20), (1_024, 262_144))
points_of_a_curve = st.lists(
    st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10.0)), min_size=2, max_size=6, unique_by=lambda point: point[0]
)


@given(points_of_a_curve, st.integers(1, 2 * 10**9))
def test_a_curve_passes_through_its_points_and_between_their_seconds(
    points: list[tuple[int, float]], size: int
) -> None:
    sizes, seconds = zip(*sorted(points), strict=True)
    curve = Curve(sizes, seconds)
    for at, value in sorted(points):
        assert curve.at(at) == pytest.approx(value)
    around = [i for i in range(len(sizes) - 1) if sizes[i] <= size <= sizes[i + 1]]
    for i in around:
        low, high = sorted(seconds[i : i + 2])
        assert low * 0.999 <= curve.at(size) <= high * 1.001


def test_beyond_the_ends_a_curve_is_flat_below_and_proportional_above() -> None:
    curve = Curve((100, 1000), (1.0, 4.0))
    assert curve.at(1) == 1.0
    assert curve.at(3000) == 12.0
    assert curve.at(316) == pytest.approx(2.0, rel=0.01), "halfway on both logarithmic scales"


def test_groups_are_all_divisors_but_one() -> None:
    assert group_sizes_of(12) == (2, 3, 4, 6, 12)
    assert group_sizes_of(1) == ()


def test_points_of_another_number_of_ranks_or_too_few_are_no_curves() -> None:
    curve = Curve((1, 2), (0.1, 0.2))
    curves = LinkCurves(2, {(kind, 2): curve for kind in COLLECTIVE_KINDS}, {2: 1e-3}, curve, curve, 1.1, 1.7)
    points = curves.points()
    assert LinkCurves.from_points(2, points) == curves
    assert LinkCurves.from_points(4, points) is None
    assert LinkCurves.from_points(2, [p for p in points if not p[0].startswith("all_to_all")]) is None


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_four_ranks_measure_every_collective_in_every_group(four_ranks: RankPool) -> None:
    """On two sizes only: all groups of 2 and of 4, and 16 MiB take at least twice as long as 4 bytes."""
    curves, *others = four_ranks.run(rank_curves, SOME_SIZES)
    assert all(other == curves for other in others), "ranks must agree, or their plans would differ"
    assert set(curves.collectives) == {(kind, size) for kind in COLLECTIVE_KINDS for size in (2, 4)}
    for curve in (*curves.collectives.values(), curves.copies, curves.adam):
        assert 0 < curve.seconds[0] <= curve.seconds[-1] < 10
    for curve in curves.collectives.values():
        assert 2 * curve.seconds[0] < curve.seconds[-1]
    assert curves.meetings.keys() == {2, 4} and all(0 <= seconds < 1 for seconds in curves.meetings.values())
    assert curves.matmul_contention >= 1 and curves.memory_contention >= 1
    assert LinkCurves.from_points(4, curves.points()) == curves


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_one_rank_has_no_collectives_and_no_contention() -> None:
    curves = measure_links(1, SOME_SIZES)
    assert curves.collectives == {}
    assert curves.memory_contention <= 2 and curves.adam.at(1_024) > 0


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_when_the_time_is_over_no_rank_is_left() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = set(children.read_text().split())
    with pytest.raises(RankError):
        measure_links(2, LinkSizes((64 * 2**20,) * 50), timeout_seconds=0.1)
    assert not set(children.read_text().split()) - before
