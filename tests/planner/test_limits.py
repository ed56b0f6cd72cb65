"""Limits close in on the one under which a plan takes its budget, whatever the rows are wrong by."""

from shardwright.planner.limits import ROOM, Limits

BUDGET = 100.0


def asked(error: float, step: float, rounds: int = 12) -> list[float]:
    """Peaks by replay of plans that take `error` times what the rows think, and come in steps."""
    limits, peaks = Limits(BUDGET), []
    for _ in range(rounds):
        taken = limits.now // step * step
        peaks.append(taken * error)
        if not limits.move(taken, BUDGET - peaks[-1]):
            break
    return peaks


def test_where_rows_are_wrong_by_a_factor_the_budget_is_taken() -> None:
    for error in (0.8, 0.9, 1.1, 1.3):
        best = max(peak for peak in asked(error, 0.01) if peak <= BUDGET)
        assert best >= BUDGET * (1 - 2 * ROOM)


def test_it_ends_between_the_last_that_fits_and_the_first_that_does_not() -> None:
    """Plans of 15 units: the rows think 6 of them take 90, replay says 99; a seventh does not fit."""
    peaks = asked(1.1, 15.0)
    assert max(peak for peak in peaks if peak <= BUDGET) == 6 * 15 * 1.1
    assert len(peaks) < 12


def test_where_nothing_takes_the_budget_it_ends() -> None:
    """One plan of 95 that takes 104.5 by replay, and one that takes nothing."""
    assert len(asked(1.1, 95.0)) < 12
