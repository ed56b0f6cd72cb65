"""Prices of the device at hand: measured where there was time, estimated by a calibrated model where not.

Needs a cluster that describes this machine and a database. Implements `Prices`; seconds of one rank with all ranks at
work. Every answer about an operator, estimates included, is written to the database, rounded to three digits, and read
from there ever after: the same database gives the same answers. Operators are measured alone on one thread; with more
ranks than cores, or ranks that share a memory bus, they take the contention that `measure_links` found times longer.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final, TypeVar

import torch

from shardwright.ir import Arg, Node, Ref, TensorType, Tier, Token
from shardwright.ir.cluster import Cluster
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.passes.collective_model import span_of
from shardwright.passes.work import numbered, work_of
from shardwright.runtime.disk_directory import cluster_disk_path, disk_directory
from shardwright.runtime.link_curves import LinkCurves, Point
from shardwright.runtime.measure import MeasureError, measure_op
from shardwright.runtime.measure_disk import DiskCurves, measure_disk
from shardwright.runtime.measure_links import measure_links
from shardwright.runtime.processor import device_name, physical_memory_bytes
from shardwright.runtime.profile_db import Price, ProfileDb, Source, Where
from shardwright.runtime.rank_pool import RankError

__all__ = ["MeasuredPrices", "Question"]

_Curves = TypeVar("_Curves", LinkCurves, DiskCurves)


@dataclass(frozen=True, slots=True)
class Question:
    """One operator call at local shapes."""

    node: Node
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    @property
    def text(self) -> str:
        """Types and arguments without names of values: what the price depends on, beside the operator."""
        call = numbered(self.node)
        given = [_arg_text(arg) for arg in call.args] + [f"{key}={_arg_text(arg)}" for key, arg in call.kwargs]
        types = ", ".join(map(str, self.operands)) + " -> " + ", ".join(map(str, self.results))
        return f"({', '.join(given)}) : {types}"


def _arg_text(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Token):
        return arg.text
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_arg_text, arg))}]"
    return repr(arg)


LONGEST_SECONDS: Final = 2.0
"""An operator estimated to take longer is not measured: planning must not take as long as training."""
MEMORY_SHARE: Final = 0.125
"""Of the machine's memory, that one measurement may take."""
CACHED_BYTES: Final = 4 * 2**20
"""Operators that move less stay in a core's own caches and do not compete for the memory bus."""


def _square(op: str, size: int) -> Question:
    kind = TensorType("f32", (size, size))
    return Question(Node(op, (Ref("x"), Ref("y")), (), ("z",)), (kind, kind), (kind,))


_CALIBRATION_MATMUL: Final = _square("aten.mm.default", 512)
_CALIBRATION_STREAM: Final = _square("aten.add.Tensor", 2_048)


class MeasuredPrices:
    """Implements `Prices`. Starts processes (links, disk) and runs operators, but only while `measure` is true."""

    def __init__(
        self,
        cluster: Cluster,
        database: ProfileDb,
        *,
        measure: bool = True,
        budget_seconds: float = 30.0,
        progress: Callable[[str], None] | None = None,
        improve: bool = False,
    ) -> None:
        """`budget_seconds` bounds the processor time spent on operators, so that a busy machine measures no fewer of
        them (links take about 10 s more, once for a machine).

        With `improve`, operators that an earlier run had no time for are measured and their estimates replaced; answers
        then differ from that run's.
        """
        self.cluster = cluster
        self._database = database
        self._measure = measure
        self._left_seconds = budget_seconds
        self._progress = progress or (lambda _: None)
        self._improve = improve
        self._device = torch.device(cluster.device.kind)
        self._where = Where(device_name(self._device), torch.__version__, 1)
        self._known = {(price.kind, price.op, price.question): price for price in database.load(self._where)}
        self._asked: dict[tuple[object, ...], float] = {}
        self.num_measured = 0
        """Operators measured by this object."""

    # Operators.

    def op_seconds(self, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> float:
        call = numbered(node)
        key = (call.op, call.args, call.kwargs, operands, results)
        if key not in self._asked:
            self._asked[key] = self._op_seconds(Question(call, operands, results))
        return self._asked[key]

    def prepare(self, questions: Iterable[Question]) -> None:
        """Measure these, the longest first, so that the budget goes where the seconds are."""
        distinct = {(question.node.op, question.text): question for question in questions}
        for question in sorted(distinct.values(), key=self._urgency):
            self.op_seconds(question.node, question.operands, question.results)

    def _urgency(self, question: Question) -> tuple[float, str, str]:
        seconds = self._estimates.op_seconds(question.node, question.operands, question.results)
        return (-seconds, question.node.op, question.text)

    def _op_seconds(self, question: Question) -> float:
        work = work_of(question.node, question.operands, question.results)
        if not work.num_bytes and not work.flops:
            return 0.0
        alone = self._answer("op", question).seconds
        if work.flops or work.num_bytes < CACHED_BYTES:
            return alone * self._matmul_contention
        return alone * max(self._matmul_contention, self._memory_contention)

    def _answer(self, kind: str, question: Question) -> Price:
        key = (kind, question.node.op, question.text)
        known = self._known.get(key)
        if known is None or (self._improve and self._measure and known.source is Source.ESTIMATED):
            self._known[key] = self._find(kind, question, known)
        return self._known[key]

    def _find(self, kind: str, question: Question, known: Price | None) -> Price:
        estimate = self._estimates.op_seconds(question.node, question.operands, question.results)
        price = Price(kind, question.node.op, question.text, _rounded(estimate), Source.ESTIMATED, "not measured")
        if not self._measure:
            return known or price
        note = self._reason_not_to(question, estimate)
        if note:
            price = replace(price, note=note)
        else:
            price = self._measured(price, question)
        return self._database.record(self._where, [price], replace=known is not None)[0]

    def _reason_not_to(self, question: Question, estimate: float) -> str:
        """Why an operator is not measured; empty if it is to be."""
        if self._left_seconds <= 0:
            return "no time left"
        if estimate > LONGEST_SECONDS:
            return "too slow"
        held_bytes = sum(kind.num_bytes for kind in (*question.operands, *question.results))
        return "too large" if held_bytes > MEMORY_SHARE * physical_memory_bytes() else ""

    def _measured(self, price: Price, question: Question) -> Price:
        start = time.process_time()
        try:
            seconds = measure_op(question.node, question.operands, question.results, self._device)
        except MeasureError as error:
            return replace(price, note=str(error))
        finally:
            self._left_seconds -= time.process_time() - start
        self.num_measured += 1
        self._progress(f"measured {self.num_measured} operators, {max(0.0, self._left_seconds):.0f} s left")
        return replace(price, seconds=_rounded(seconds), source=Source.MEASURED, note="")

    @cached_property
    def _estimates(self) -> AnalyticalPrices:
        """The analytical model with this device's own matmul and memory rates, from one operator each."""
        model = AnalyticalPrices(self.cluster)
        device = self.cluster.device
        compute = self._ratio(model, _CALIBRATION_MATMUL)
        memory = self._ratio(model, _CALIBRATION_STREAM)
        return model.with_device(
            replace(
                device,
                flops_per_second={dtype: peak * compute for dtype, peak in device.flops_per_second.items()},
                memory_bytes_per_second=device.memory_bytes_per_second * memory,
            )
        )

    def _ratio(self, model: AnalyticalPrices, question: Question) -> float:
        """How much faster the device is than the cluster says; 1 where that is neither known nor to be measured."""
        key = ("calibration", question.node.op, question.text)
        if key not in self._known:
            if not self._measure:
                return 1.0
            seconds = measure_op(question.node, question.operands, question.results, self._device)
            price = Price(*key, _rounded(seconds))
            self._known[key] = self._database.record(self._where, [price])[0]
        return model.op_seconds(question.node, question.operands, question.results) / self._known[key].seconds

    # Traffic.

    def collective_seconds(self, kind: str, num_bytes: int, group_sizes: tuple[int, ...], axis: int) -> float:
        span = span_of(group_sizes, axis, self.cluster.ranks_per_node)
        if span.num_members == 1:
            return 0.0
        if self._links is None or span.num_nodes > 1:
            return self._estimates.collective_seconds(kind, num_bytes, group_sizes, axis)
        return self._links.collective_seconds(kind, span.num_members, num_bytes)

    def copy_seconds(self, num_bytes: int, tier: Tier = Tier.HOST, back: bool = False) -> float:
        if tier is Tier.DISK:
            return self._disk_seconds(num_bytes, back)
        if self._links is None or not num_bytes:
            return self._estimates.copy_seconds(num_bytes)
        return self._links.copies.at(num_bytes)

    def _disk_seconds(self, num_bytes: int, back: bool) -> float:
        if not num_bytes:
            return 0.0
        if self._disk is None:
            return self._estimates.copy_seconds(num_bytes, Tier.DISK, back)
        return (self._disk.read if back else self._disk.write).at(num_bytes)

    def optimizer_seconds(self, num_elements: int, state_bytes: int, on_host: bool) -> float:
        """AdamW as measured, times what this optimizer streams relative to it. A CPU's host is the CPU."""
        if self._links is None or not num_elements:
            return self._estimates.optimizer_seconds(num_elements, state_bytes, on_host)
        adam_bytes = 28 * num_elements
        return self._links.adam.at(num_elements) * (12 * num_elements + 2 * state_bytes) / adam_bytes

    @property
    def _matmul_contention(self) -> float:
        return self._links.matmul_contention if self._links else 1.0

    @property
    def _memory_contention(self) -> float:
        return self._links.memory_contention if self._links else 1.0

    @cached_property
    def _links(self) -> LinkCurves | None:
        """This machine's curves; None on CUDA (ranks here talk gloo), or where they are neither known nor measured."""
        if self._device.type != "cpu":
            return None
        num_ranks = self.cluster.ranks_per_node
        return self._curves(
            "link",
            ("links", f"links of {num_ranks} ranks"),
            partial(LinkCurves.from_points, num_ranks),
            partial(measure_links, num_ranks),
            LinkCurves.points,
        )

    @cached_property
    def _disk(self) -> DiskCurves | None:
        """Of this machine's disk; None where it is neither known nor measured. Asked for, and so measured, only where a
        plan may use the disk."""
        if self._device.type != "cpu" or self.cluster.disk is None:
            return None
        directory = disk_directory(self.cluster.name, cluster_disk_path(self.cluster))
        num_ranks = self.cluster.ranks_per_node
        where = f"ranks={num_ranks} in {directory}"
        return self._curves(
            "disk",
            ("disk", f"the disk of {directory}"),
            partial(DiskCurves.from_points, where),
            partial(measure_disk, num_ranks, directory),
            lambda curves: curves.points(where),
        )

    def _curves(
        self,
        kind: str,
        words: tuple[str, str],
        read: Callable[[Sequence[Point]], _Curves | None],
        measure: Callable[[], _Curves],
        points: Callable[[_Curves], Sequence[Point]],
    ) -> _Curves | None:
        """Those the database has, or measured now and kept there; None where they are neither. `words` name them, in
        short and in full."""
        known = read([(p.op, p.question, p.seconds) for (held, _, _), p in self._known.items() if held == kind])
        if known is not None or not self._measure:
            return known
        self._progress(f"measuring {words[1]}")
        try:
            measured = measure()
        except RankError as error:
            self._progress(f"{words[0]} not measured: {error}")
            return None
        prices = [Price(kind, name, question, _rounded(seconds)) for name, question, seconds in points(measured)]
        recorded = self._database.record(self._where, prices)
        return read([(price.op, price.question, price.seconds) for price in recorded])


def _rounded(seconds: float) -> float:
    """Three digits: more would be noise."""
    return float(f"{seconds:.3g}")
