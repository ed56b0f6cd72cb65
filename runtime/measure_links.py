"""Curves of this machine with all ranks busy: collectives by bytes, what ranks lose where they meet, host copies, the
optimizer, and contention.

Needs the number of ranks; starts that many on gloo, one thread each, and leaves none behind. Gives `LinkCurves`.
Groups of every size that divides the ranks are measured, all groups of a size at once, since they share the machine.
Collectives are those that the emitted program calls, waits and fresh results included.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Final

import torch
import torch.distributed as dist

from shardwright.runtime import kernels
from shardwright.runtime.link_curves import Curve, LinkCurves, group_sizes_of
from shardwright.runtime.processor import num_cores
from shardwright.runtime.rank_pool import run_ranks

__all__ = ["LinkSizes", "measure_links", "rank_curves", "rising", "slowest_each"]


@dataclass(frozen=True, slots=True)
class LinkSizes:
    """Where the curves are measured, ascending."""

    collectives: tuple[int, ...] = (4, 4_096, 65_536, 524_288, 4 * 2**20, 16 * 2**20, 64 * 2**20)
    """Bytes of the whole tensor."""
    copies: tuple[int, ...] = (65_536, 2**20, 8 * 2**20, 64 * 2**20)
    """Bytes; fresh memory past 32 MiB costs page faults."""
    adam: tuple[int, ...] = (4_096, 262_144, 4 * 2**20)
    """Elements of one parameter; the largest is far outside caches."""


BURST_BYTES: Final = 65_536
"""Up to this size several collectives in a row are timed as one: a single one drowns in the skew of the barrier."""
BURST: Final = 10
HAND_OVERS: Final = 1.5
"""Of the clock over processor time: 1.0 to 1.4 on a quiet machine."""
REPEATS: Final = 6
"""Of a large one; small ones are cheap and vary more, so they are repeated more often."""
MEETINGS: Final = 6
"""Of a piece of compute and a small collective, timed together."""
PRODUCTS: Final = 4
"""Matrix products that make a piece: some 10 ms."""
ADAM_PARAMETERS: Final = 16
COLD_BYTES: Final = 256 * 2**20
"""Of memory that copies go through in turn: several times the cache that cores share."""
TIME_LIMIT_SECONDS: Final = 120.0
ALL_SIZES: Final = LinkSizes()


def measure_links(
    num_ranks: int, sizes: LinkSizes = ALL_SIZES, timeout_seconds: float = TIME_LIMIT_SECONDS
) -> LinkCurves:
    """Start the ranks, measure, end them. Raises RankError when one fails or the time is over."""
    return run_ranks(num_ranks, rank_curves, sizes, timeout_seconds=timeout_seconds)[0]


def rank_curves(sizes: LinkSizes) -> LinkCurves:
    """What each rank does; all come to the same figures, those of the slowest."""
    torch.set_num_threads(1)
    num_ranks = dist.get_world_size()
    collectives: dict[tuple[str, int], Curve] = {}
    meetings: dict[int, float] = {}
    for group_size in group_sizes_of(num_ranks):
        group = _own_group(group_size)
        meetings[group_size] = _meeting_seconds(group_size, group)
        for kind in _KINDS:
            seconds = [_collective_seconds(kind, size, group_size, group) for size in sizes.collectives]
            collectives[kind, group_size] = rising(sizes.collectives, seconds)
    return LinkCurves(
        num_ranks,
        collectives,
        meetings,
        rising(sizes.copies, [_busy_seconds(_copy_call(size)) / 2 for size in sizes.copies]),
        rising(sizes.adam, [_adam_seconds(size) for size in sizes.adam]),
        _core_share(num_ranks) * _contention(_matmul_call(), 2.0),
        _core_share(num_ranks) * _contention(_stream_call(), num_ranks),
    )


def rising(sizes: tuple[int, ...], seconds: list[float]) -> Curve:
    """Less never takes longer than more: what is above a later point was disturbed."""
    return Curve(sizes, tuple(min(seconds[position:]) for position in range(len(seconds))))


def _own_group(size: int) -> str:
    """Neighbours in groups of `size`; made on all ranks in the same order."""
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    return str(groups[dist.get_rank() // size].group_name)


def _collective_seconds(kind: str, num_bytes: int, group_size: int, group: str) -> float:
    """Of one collective on a float32 tensor of `num_bytes` (rounded up to a part for each rank).

    A large one keeps the processor busy but for the hand-overs between threads: what is far above its processor time
    was strangers' doing.
    """
    part = max(1, num_bytes // 4 // group_size)
    call = _KINDS[kind](part, group_size, group)
    if num_bytes > BURST_BYTES:
        busy = _slowest(call, REPEATS, time.process_time) * _core_share(dist.get_world_size())
        return min(HAND_OVERS * busy, _slowest(call, REPEATS))

    def several() -> None:
        for _ in range(BURST):
            call()

    return _slowest(several, 2 * REPEATS) / BURST


Call = Callable[[], object]


def _meeting_seconds(group_size: int, group: str) -> float:
    """What a collective costs in a program beyond what it takes by itself: ranks come to it at different times.

    The median over pairs of the same compute with and without: it happens every time, on a machine as busy as this.
    """
    product, meet = _matmul_call(), _all_reduce_in_place(1, group_size, group)

    def compute(meeting: bool) -> None:
        for _ in range(MEETINGS):
            for _ in range(PRODUCTS):
                product()
            if meeting:
                meet()

    calls = [partial(compute, meeting) for _ in range(2 * REPEATS) for meeting in (False, True)]
    seconds = slowest_each([partial(compute, True), *calls])[1:]
    return max(0.0, float((seconds[1::2] - seconds[::2]).median())) / MEETINGS


def _all_gather(part: int, num_ranks: int, group: str) -> Call:
    x = torch.ones(part)
    return lambda: kernels.wait(kernels.all_gather(x, num_ranks, group), x)


def _reduce_scatter(part: int, num_ranks: int, group: str) -> Call:
    x = torch.ones(part * num_ranks)
    return lambda: kernels.wait(kernels.reduce_scatter(x, "sum", num_ranks, group), x)


def _all_reduce(part: int, num_ranks: int, group: str) -> Call:
    x = torch.ones(part * num_ranks)
    return lambda: kernels.wait(kernels.all_reduce(x, "sum", group), x)


def _all_reduce_in_place(part: int, num_ranks: int, group: str) -> Call:
    x = torch.zeros(part * num_ranks)
    return lambda: kernels.wait(kernels.all_reduce_(x, "sum", group), x)


def _all_to_all(part: int, num_ranks: int, group: str) -> Call:
    x = torch.ones(part * num_ranks)
    return lambda: kernels.wait(kernels.all_to_all(x, num_ranks, group), x)


_KINDS: Final[dict[str, Callable[[int, int, str], Call]]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce_in_place,
    "all_to_all": _all_to_all,
}


def _copy_call(num_bytes: int) -> Call:
    """Out into a buffer that is there already, back into a fresh tensor, as the copy engine does: every time another
    one, since what is moved was made long before and is in no cache."""
    num_pairs = max(1, COLD_BYTES // (2 * num_bytes))
    pairs = cycle([(torch.ones(num_bytes // 4), torch.ones(num_bytes // 4)) for _ in range(num_pairs)])

    def both_ways() -> None:
        source, pooled = next(pairs)
        pooled.copy_(source)
        torch.empty_like(source).copy_(pooled)

    return both_ways


def _adam_call(num_elements: int, num_parameters: int) -> Call:
    parameters = [torch.nn.Parameter(torch.ones(num_elements)) for _ in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.ones(num_elements)
    return torch.optim.AdamW(parameters, fused=True).step


def _adam_seconds(num_elements: int) -> float:
    """Of one parameter among several: the fixed cost of a step belongs to all of them."""
    num_parameters = max(1, min(ADAM_PARAMETERS, 4 * 2**20 // num_elements))
    return _busy_seconds(_adam_call(num_elements, num_parameters)) / num_parameters


def _matmul_call() -> Call:
    x = torch.ones(512, 512)
    return lambda: x @ x


def _stream_call() -> Call:
    source, target = torch.ones(8 * 2**20), torch.ones(8 * 2**20)
    return lambda: target.copy_(source)


def _slowest(call: Call, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """The best of the repeats after a warm-up, because strangers on the machine only ever add."""
    call()
    return float(slowest_each([call] * repeats, clock).min())


def slowest_each(calls: Sequence[Call], clock: Callable[[], float] = time.perf_counter) -> torch.Tensor:
    """Seconds of each: all ranks start together, and it counts as long as on the slowest."""
    taken = []
    for call in calls:
        dist.barrier()
        start = clock()
        call()
        taken.append(clock() - start)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest


def _busy_seconds(call: Call) -> float:
    """Of something that only computes: processor time with all ranks at it, of the slowest rank, on shared cores."""
    dist.barrier()
    slowest = torch.tensor(_best_seconds(call, 0.1), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest) * _core_share(dist.get_world_size())


def _core_share(num_ranks: int) -> float:
    """Ranks for each core, at least 1."""
    return max(1.0, num_ranks / num_cores())


def _contention(call: Call, most: float) -> float:
    """What all ranks at once do to one: its processor time over that of one alone (the others wait in a barrier).

    Processor time and not the clock: cores that are shared are counted apart (`_core_share`), and what strangers take
    is none of the ranks' doing.
    """
    alone = _best_seconds(call) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    both = torch.tensor([_best_seconds(call), alone], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    return min(most, max(1.0, float(both[0] / both[1])))


def _best_seconds(call: Call, seconds: float = 0.3) -> float:
    """Processor time of the best of several calls, for as long as all ranks are sure to be at it together."""
    call()
    best, deadline = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.thread_time()
        for _ in range(4):
            call()
        best = min(best, (time.thread_time() - start) / 4)
    return best
