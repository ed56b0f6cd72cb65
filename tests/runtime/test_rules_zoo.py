"""Every strategy offered for real architectures gives the numbers of the whole operator."""

from collections.abc import Iterator

import pytest
from tests.zoo.models import ZOO

from shardwright.runtime.capture import capture
from shardwright.runtime.check_rules import Outcome, check
from shardwright.runtime.rules import DTensorRules

NUM_SHARDS = {"llama": 2, "gemma2": 2, "mixtral": 2, "resnet": 4, "vit": 4, "indivisible": 2}
"""Those that have, between them, every operator of the zoo."""


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[int, DTensorRules]]:
    """One set of rules for all models, so that a call that several have is checked once."""
    yield {num_shards: DTensorRules() for num_shards in (2, 4)}


@pytest.mark.parametrize("name", NUM_SHARDS)
def test_every_strategy_is_right(name: str, seen: dict[int, DTensorRules]) -> None:
    module, args, kwargs = ZOO[name]()
    graph = capture(module, args, kwargs).graph
    rules, num_shards = seen[NUM_SHARDS[name]], NUM_SHARDS[name]
    wrong = []
    untried = set()
    for node in graph.nodes:
        if rules.knows(graph, node, num_shards):
            continue
        for strategy in rules.strategies(graph, node, num_shards):
            verdict = check(graph, node, strategy, num_shards)
            if verdict.outcome is Outcome.UNTRIED:
                untried.add(node.op)
            elif verdict.outcome is not Outcome.EQUAL:
                wrong.append(verdict.reason)
    assert wrong == []
    assert untried <= {"aten.empty_like.default"}, "an operator that only makes room has no numbers to compare"
