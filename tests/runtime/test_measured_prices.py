"""Measured prices: exact answers from the database, bounded time, and the model where nothing is measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwright.ir import Node, Ref, TensorType
from shardwright.ir.cluster import Cluster, Device, Host, Link
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.runtime.link_curves import COLLECTIVE_KINDS, Curve, LinkCurves
from shardwright.runtime.measured_prices import MeasuredPrices, Question
from shardwright.runtime.processor import device_name
from shardwright.runtime.profile_db import Price, ProfileDb, Source, Where

HERE = Where(device_name(torch.device("cpu")), torch.__version__, 1)
TWO_CPUS = Cluster(
    "cpu:2", 1, 2,
    Device("cpu", 2**33, 30e9, {"f32": 100e9}, 0.9, 3e-6, 64, True),
    Link(1.5e9, 1e-4, 0.7), Link(1.5e9, 1e-4, 0.7), Host(2**33, 10e9, 1e-5, 2**16, 1e9, 1.0),
)  # fmt: skip
CURVE = Curve((1_000, 1_000_000), (1e-4, 1e-2))
LINKS = LinkCurves(2, {(kind, 2): CURVE for kind in COLLECTIVE_KINDS}, {2: 1e-3}, CURVE, CURVE, 1.5, 3.0)


@pytest.fixture
def database(tmp_path: Path) -> ProfileDb:
    """A database that knows this machine's links, so that no ranks are started."""
    found = ProfileDb(tmp_path / "p.sqlite")
    found.record(HERE, [Price("link", name, question, seconds) for name, question, seconds in LINKS.points()])
    return found


def matmul(size: int) -> Question:
    kind = TensorType("f32", (size, size))
    return Question(Node("aten.mm.default", (Ref("a"), Ref("b")), (), ("c",)), (kind, kind), (kind,))


def add(size: int) -> Question:
    kind = TensorType("f32", (size,))
    return Question(Node("aten.add.Tensor", (Ref("a"), Ref("b")), (), ("c",)), (kind, kind), (kind,))


def ask(prices: MeasuredPrices | AnalyticalPrices, question: Question) -> float:
    return prices.op_seconds(question.node, question.operands, question.results)


def stored(database: ProfileDb, op: str) -> list[Price]:
    return [price for price in database.load(HERE) if price.kind == "op" and price.op == op]


def test_what_is_measured_is_read_ever_after(database: ProfileDb) -> None:
    """A second object on the same database measures nothing and answers the same, whatever it may do."""
    first = MeasuredPrices(TWO_CPUS, database)
    answer = ask(first, matmul(64))
    assert first.num_measured == 1 and 0 < answer < 0.1
    second = MeasuredPrices(TWO_CPUS, database)
    assert ask(second, matmul(64)) == ask(MeasuredPrices(TWO_CPUS, database, measure=False), matmul(64)) == answer
    assert second.num_measured == 0


def test_the_names_of_values_do_not_matter(database: ProfileDb) -> None:
    prices = MeasuredPrices(TWO_CPUS, database)
    ask(prices, matmul(32))
    other = replace(matmul(32).node, args=(Ref("layer.7/x"), Ref("layer.7/w")), results=("layer.7/y",))
    prices.op_seconds(other, matmul(32).operands, matmul(32).results)
    assert prices.num_measured == 1
    assert len(stored(database, "aten.mm.default")) == 1


def test_with_no_time_left_an_answer_is_estimated_and_stays(database: ProfileDb) -> None:
    """So a later run on the same database plans the same; only `improve` measures it."""
    answer = ask(MeasuredPrices(TWO_CPUS, database, budget_seconds=0.0), matmul(64))
    later = MeasuredPrices(TWO_CPUS, database)
    assert ask(later, matmul(64)) == answer and later.num_measured == 0
    assert [(p.source, p.note) for p in stored(database, "aten.mm.default")] == [(Source.ESTIMATED, "no time left")]
    improved = MeasuredPrices(TWO_CPUS, database, improve=True)
    ask(improved, matmul(64))
    assert improved.num_measured == 1
    assert stored(database, "aten.mm.default")[0].source is Source.MEASURED


def test_prepare_spends_the_time_on_the_longest_first(database: ProfileDb) -> None:
    prices = MeasuredPrices(TWO_CPUS, database, budget_seconds=1e-9)
    prices.prepare([matmul(16), matmul(256), matmul(64)])
    sources = {price.question.split("-> ")[1]: price.source for price in stored(database, "aten.mm.default")}
    assert sources == {
        "f32[16, 16]": Source.ESTIMATED,
        "f32[64, 64]": Source.ESTIMATED,
        "f32[256, 256]": Source.MEASURED,
    }


def test_an_operator_that_fails_is_estimated_with_the_reason(database: ProfileDb) -> None:
    broken = replace(matmul(16), operands=(TensorType("f32", (3, 4)), TensorType("f32", (5, 6))))
    assert ask(MeasuredPrices(TWO_CPUS, database), broken) > 0
    (price,) = stored(database, "aten.mm.default")
    assert price.source is Source.ESTIMATED and "RuntimeError" in price.note


def test_without_measuring_and_an_empty_database_the_model_answers(tmp_path: Path) -> None:
    with ProfileDb(tmp_path / "p.sqlite") as database:
        prices, model = MeasuredPrices(TWO_CPUS, database, measure=False), AnalyticalPrices(TWO_CPUS)
        assert ask(prices, matmul(512)) == pytest.approx(ask(model, matmul(512)), rel=0.01)
        assert prices.collective_seconds("all_reduce", 2**20, (2,), 0) == model.collective_seconds(
            "all_reduce", 2**20, (2,), 0
        )
        assert prices.copy_seconds(2**20) == model.copy_seconds(2**20)
        assert prices.optimizer_seconds(10**6, 8 * 10**6, False) == model.optimizer_seconds(10**6, 8 * 10**6, False)
        assert database.load(HERE) == ()


def test_estimates_are_calibrated_on_this_device(database: ProfileDb) -> None:
    """A cluster that claims a hundredth of the speed gives the same estimates once two operators are measured."""
    device = TWO_CPUS.device
    slow = replace(TWO_CPUS, device=replace(device, flops_per_second={"f32": 1e9}, memory_bytes_per_second=3e8))
    honest, claimed = (MeasuredPrices(c, database, budget_seconds=0.0) for c in (TWO_CPUS, slow))
    for question in (matmul(768), add(3_000_000)):
        first = honest._estimates.op_seconds(question.node, question.operands, question.results)
        second = claimed._estimates.op_seconds(question.node, question.operands, question.results)
        assert second == pytest.approx(first, rel=0.1)


def test_contention_of_busy_ranks_is_on_top(database: ProfileDb) -> None:
    """Matmuls and what fits a cache share cores (1.5 here), large streams the memory bus (3 here)."""
    large, small = add(4_000_000), add(1_000)
    for question, seconds in ((matmul(16), 1e-3), (large, 2e-3), (small, 1e-5)):
        database.record(HERE, [Price("op", question.node.op, question.text, seconds)])
    prices = MeasuredPrices(TWO_CPUS, database, measure=False)
    assert ask(prices, matmul(16)) == pytest.approx(1.5e-3)
    assert ask(prices, large) == pytest.approx(6e-3)
    assert ask(prices, small) == pytest.approx(1.5e-5)


def test_traffic_follows_the_measured_curves(database: ProfileDb) -> None:
    prices = MeasuredPrices(TWO_CPUS, database)
    assert prices.collective_seconds("all_reduce", 1_000_000, (2, 1), 0) == pytest.approx(1e-2 + 1e-3)
    assert prices.collective_seconds("all_reduce", 1_000_000, (2, 1), 1) == 0
    assert prices.copy_seconds(1_000) == pytest.approx(1e-4)
    assert prices.copy_seconds(0) == 0
    assert prices.optimizer_seconds(1_000_000, 8_000_000, True) == pytest.approx(1e-2), "AdamW itself"
    assert prices.optimizer_seconds(1_000_000, 0, False) == pytest.approx(1e-2 * 12 / 28), "plain SGD streams less"


def test_a_measured_matmul_is_what_plain_torch_takes(database: ProfileDb) -> None:
    """Within a factor of two of a stopwatch around torch.mm: other processes share the machine."""
    import time

    kind = torch.rand(256, 256)
    torch.mm(kind, kind)
    taken = []
    for _ in range(30):
        start = time.thread_time()
        torch.mm(kind, kind)
        taken.append(time.thread_time() - start)
    ours = ask(MeasuredPrices(TWO_CPUS, database), matmul(256)) / LINKS.matmul_contention
    assert 0.5 < ours / sorted(taken)[15] < 2
