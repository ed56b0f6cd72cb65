"""What a copy to this machine's disk and back takes, with all ranks at it: the very copies that a plan's steps make.

Needs the number of ranks and the directory; starts that many, and leaves neither process nor file. Gives seconds by
bytes. A disk takes longer at some times than at others for reasons of its own, so the middle of some repeats counts,
not the best.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from shardwright.passes.copies import slot_bytes
from shardwright.runtime.disk_copies import DiskCopies
from shardwright.runtime.disk_file import DiskFile
from shardwright.runtime.host_pool import HostPool
from shardwright.runtime.link_curves import Curve, Point
from shardwright.runtime.measure_links import rising, slowest_each
from shardwright.runtime.rank_pool import run_ranks

__all__ = ["DISK_SIZES", "DiskCurves", "disk_rank_curves", "measure_disk"]

DISK_SIZES: Final = (65_536, 2**20, 8 * 2**20, 64 * 2**20)
"""Bytes of a copy, ascending."""
REPEATS: Final = 5
HOST_BYTES: Final = 64 * 2**20
TIME_LIMIT_SECONDS: Final = 120.0
_WAYS: Final = ("disk write", "disk read")


@dataclass(frozen=True)
class DiskCurves:
    """Seconds by bytes of a copy."""

    write: Curve
    read: Curve

    def points(self, where: str) -> tuple[Point, ...]:
        """As rows for the database, `where` saying for how many ranks and in which directory."""
        return tuple(
            (way, f"{where} size={size}", seconds)
            for way, curve in zip(_WAYS, (self.write, self.read), strict=True)
            for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
        )

    @classmethod
    def from_points(cls, where: str, points: Sequence[Point]) -> "DiskCurves | None":
        """None where the points are not complete."""
        found = {(way, question): seconds for way, question, seconds in points}
        wanted = [[(way, f"{where} size={size}") for size in DISK_SIZES] for way in _WAYS]
        if any(key not in found for keys in wanted for key in keys):
            return None
        return cls(*(Curve(DISK_SIZES, tuple(found[key] for key in keys)) for keys in wanted))


def measure_disk(num_ranks: int, directory: Path) -> DiskCurves:
    """Start the ranks, measure, end them. Raises RankError when one fails or the time is over."""
    return run_ranks(num_ranks, disk_rank_curves, str(directory), DISK_SIZES, timeout_seconds=TIME_LIMIT_SECONDS)[0]


def disk_rank_curves(directory: str, sizes: tuple[int, ...]) -> DiskCurves:
    """What each rank does; all come to the same figures, those of the slowest."""
    torch.set_num_threads(1)
    engine = DiskCopies(
        torch.device("cpu"), HostPool(HOST_BYTES), DiskFile(Path(directory), 2 * sum(map(slot_bytes, sizes)))
    )
    engine.reserve(sizes)
    pairs = [_seconds(engine, size) for size in sizes]
    engine.close()
    write, read = (rising(sizes, list(seconds)) for seconds in zip(*pairs, strict=True))
    return DiskCurves(write, read)


def _seconds(engine: DiskCopies, num_bytes: int) -> tuple[float, float]:
    """To write and to read, with all ranks doing the same."""
    x = torch.ones(num_bytes // 4)
    copy = engine.wait(engine.offload(x), x)
    calls: list[Callable[[], object]] = [
        lambda: engine.wait(engine.offload(x), x),
        lambda: engine.wait(engine.reload(copy), copy),  # type: ignore[arg-type]
    ]
    dist.barrier()
    found = slowest_each(calls * REPEATS)
    return float(found[::2].median()), float(found[1::2].median())
