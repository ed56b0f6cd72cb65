"""Programs with known answers; statuses; bounds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as draw

from shardwright.planner.linear import LinearModel, Status, solve


def knapsack(values: list[int], weights: list[int], capacity: float) -> LinearModel:
    model = LinearModel()
    items = [model.variable(cost=-float(value), integer=True) for value in values]
    model.row(dict(zip(items, map(float, weights), strict=True)), upper=capacity)
    return model


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    items=draw.lists(draw.tuples(draw.integers(1, 20), draw.integers(1, 20)), min_size=1, max_size=8),
    capacity=draw.integers(0, 40),
)
def test_the_optimum_is_that_of_trying_everything(items: list[tuple[int, int]], capacity: int) -> None:
    values, weights = [v for v, _ in items], [w for _, w in items]
    best = max(
        sum(v for i, v in enumerate(values) if subset >> i & 1)
        for subset in range(1 << len(items))
        if sum(w for i, w in enumerate(weights) if subset >> i & 1) <= capacity
    )
    solution = solve(knapsack(values, weights, capacity), time_limit_seconds=10.0, relative_gap=0.0)
    assert solution.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(-best)
    assert solution.bound <= solution.objective


def test_with_bounds_only_restricts() -> None:
    """Bounds beyond those a variable has do not widen it, and the model itself stays as it is."""
    model = knapsack([3, 2], [1, 1], 5.0)
    assert solve(model.with_bounds({0: (-9.0, 9.0)}), time_limit_seconds=5.0, relative_gap=0.0).objective == -5.0
    assert solve(model.with_bounds({0: (0.0, 0.0)}), time_limit_seconds=5.0, relative_gap=0.0).objective == -2.0
    assert solve(model, time_limit_seconds=5.0, relative_gap=0.0).objective == -5.0


def test_with_cost_replaces_the_objective() -> None:
    solution = solve(knapsack([3, 2], [1, 1], 1.0).with_cost({1: -1.0}), time_limit_seconds=5.0, relative_gap=0.0)
    assert solution.objective == -1.0
    assert solution.values[1] == 1.0


def test_what_cannot_be_is_infeasible() -> None:
    model = LinearModel()
    one = model.variable(integer=True)
    model.row({one: 1.0}, lower=2.0)
    solution = solve(model, time_limit_seconds=5.0, relative_gap=0.0)
    assert (solution.status, solution.objective, solution.values) == (Status.INFEASIBLE, math.inf, ())


def test_zero_coefficients_are_not_kept() -> None:
    model = LinearModel()
    one, two = model.variable(), model.variable()
    model.row({one: 0.0, two: 1.0}, upper=1.0)
    assert model.rows[0][0] == {two: 1.0}


def test_equal_models_have_equal_solutions() -> None:
    found = {solve(knapsack([5] * 8, [3] * 8, 10.0), time_limit_seconds=5.0, relative_gap=0.0).values for _ in range(3)}
    assert len(found) == 1
