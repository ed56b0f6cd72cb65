"""A decorated class trains as the plain one does, and its instances live as DESIGN says, on two ranks and on one."""

import pytest
from tests.runtime import decorated_ranks

from shardwright.runtime.ranks import RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def test_training_equals_the_plain_model_with_everything_made_before(two_ranks: RankPool) -> None:
    """Losses, clipped norms, parameters, schedule and average of three steps."""
    for found in two_ranks.run(decorated_ranks.train, timeout_seconds=120):
        assert found["loss"] < 1e-5 and found["norm"] < 1e-5
        assert found["parameters"] < 1e-5 and found["average"] < 1e-5 and found["rate"] == 0


def test_an_instance_is_plain_until_it_trains_and_under_eval(two_ranks: RankPool) -> None:
    for found in two_ranks.run(decorated_ranks.before_and_after, timeout_seconds=120):
        assert all(found.values()), [name for name, holds in found.items() if not holds]


def test_another_batch_size_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(decorated_ranks.other_shape, timeout_seconds=120):
        assert "expected tokens of shape [4, 6]" in message and "found [2, 6]" in message


def test_different_batches_on_the_ranks_name_shard_loader(two_ranks: RankPool) -> None:
    for message in two_ranks.run(decorated_ranks.different_batches, timeout_seconds=120):
        assert "shard_loader" in message


def test_a_failure_of_the_planning_rank_is_raised_on_all(two_ranks: RankPool) -> None:
    messages = two_ranks.run(decorated_ranks.infeasible, timeout_seconds=120)
    assert all("the smallest that works" in message for message in messages)


def test_alone_it_plans_for_one_device() -> None:
    """No launcher, no process group: recomputation still applies, numbers are those of the plain model."""
    with RankPool(1) as alone:
        (found,) = alone.run(decorated_ranks.train, timeout_seconds=120)
    assert found["loss"] < 1e-6 and found["parameters"] < 1e-5
