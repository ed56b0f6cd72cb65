"""`verify` notices every collective that is broken on purpose: nothing a plan communicates goes unread."""

import pytest
from tests.zoo.planned import PlannedZoo

from shardwright.runtime.rank_pool import RankPool
from shardwright.runtime.verify import parse_faults, verify

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


PLANS = [
    ("perceptron", 2, "loose"),
    ("perceptron", 2, "tight"),
    *(
        pytest.param(*plan, marks=pytest.mark.study)
        for plan in (("perceptron", 4, "tight"), ("llama", 2, "tight"), ("resnet", 2, "loose"))
    ),
]


@pytest.mark.parametrize(("name", "num_ranks", "budget"), PLANS)
def test_every_collective_dropped_scaled_or_stale_is_noticed(
    zoo: PlannedZoo, two_ranks: RankPool, four_ranks: RankPool, name: str, num_ranks: int, budget: str
) -> None:
    plan, subject = zoo.plan(name, num_ranks, budget), zoo.subject(name)
    faults = parse_faults("all", plan, subject.graph)
    assert len(faults) >= 3
    pool = {2: two_ranks, 4: four_ranks}[num_ranks]
    report = verify(plan, subject.graph, faults=faults, pool=pool, captured=subject.captured)
    assert report.clean.equal
    assert len(report.injected) == len(faults)
    assert not [(fault, report.collectives[fault.collective]) for fault in report.missed]
