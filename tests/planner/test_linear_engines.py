"""Both engines give the same optimum; a hint is a place to start from, not an answer."""

import pytest

from shardwright.planner.linear import Engine, LinearModel, Status, solve


def covering() -> LinearModel:
    """Three rows of two variables each: two of the three variables must be one."""
    model = LinearModel()
    first, second, third = (model.variable(cost=cost, integer=True) for cost in (1.0, 2.0, 4.0))
    for pair in ((first, second), (second, third), (first, third)):
        model.row(dict.fromkeys(pair, 1.0), lower=1.0)
    return model


@pytest.mark.parametrize("engine", Engine)
@pytest.mark.parametrize("hint", [(), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)])
def test_engines_agree_whatever_the_hint(engine: Engine, hint: tuple[float, ...]) -> None:
    solution = solve(covering(), time_limit_seconds=10.0, relative_gap=0.0, engine=engine, hint=hint)
    assert solution.status is Status.OPTIMAL
    assert solution.values == pytest.approx((1.0, 1.0, 0.0))
    assert solution.bound == pytest.approx(3.0)


@pytest.mark.parametrize("engine", Engine)
def test_engines_agree_that_there_is_nothing(engine: Engine) -> None:
    model = covering()
    model.row({0: 1.0, 1: 1.0, 2: 1.0}, upper=1.0)
    assert solve(model, time_limit_seconds=10.0, relative_gap=0.0, engine=engine).status is Status.INFEASIBLE
