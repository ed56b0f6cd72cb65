"""The rank graph against the whole graph run by DTensor with the planned placements, value by value."""

import pytest
from tests.zoo.dtensor_oracle import compare_with_dtensor
from tests.zoo.planned import PlannedZoo

from shardwright.runtime.rank_pool import RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("name", "num_ranks"), [("perceptron", 2), ("llama", 2), ("decoder", 4)])
def test_dtensor_computes_the_same_values(
    zoo: PlannedZoo, two_ranks: RankPool, four_ranks: RankPool, name: str, num_ranks: int
) -> None:
    subject, decisions = zoo.subject(name), zoo.plan(name, num_ranks, "loose").decisions
    pool = {2: two_ranks, 4: four_ranks}[num_ranks]
    for verdict in pool.run(compare_with_dtensor, subject.graph, decisions, subject.given):
        assert not verdict.wrong
        assert len(verdict.by_hand) < 0.1 * verdict.compared, verdict.by_hand
