"""Chunks on their way to a file and back, on a device whose copies come as late as they may."""

from collections import deque
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwright.ir import DiskError
from shardwright.passes.copies import slot_bytes
from shardwright.runtime.disk_file import DiskFile
from shardwright.runtime.host_pool import HostPool
from shardwright.runtime.staging import Mark, Staging

NUM_BYTES = 5 * 4096 + 123
"""Six chunks of a block, through two buffers."""


class LateMover:
    """A stream on which nothing happens before somebody waits for it: like CUDA's, at its slowest."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Tensor, Tensor]] = deque()
        self.num_done = 0
        self.num_started = 0

    def mark(self) -> Mark:
        return None

    def follow(self, mark: Mark) -> None:
        pass

    def start(self, target: Tensor, source: Tensor) -> Mark:
        self.queue.append((target, source))
        self.num_started += 1
        return _LateMark(self, self.num_started)  # type: ignore[return-value]

    def run_to(self, number: int) -> None:
        while self.num_done < number:
            target, source = self.queue.popleft()
            target.copy_(source)
            self.num_done += 1


class _LateMark:
    def __init__(self, mover: LateMover, number: int) -> None:
        self._mover, self._number = mover, number

    def synchronize(self) -> None:
        self._mover.run_to(self._number)


def staged(directory: Path) -> tuple[LateMover, Staging, DiskFile]:
    mover, file = LateMover(), DiskFile(directory, 2**20)
    file.reserve(slot_bytes(NUM_BYTES))
    return mover, Staging(HostPool(2**20), [1], mover), file


def test_a_buffer_is_written_when_it_is_full_and_filled_again_when_it_is_empty(tmp_path: Path) -> None:
    mover, staging, file = staged(tmp_path)
    x = torch.randint(256, (NUM_BYTES,)).byte()
    expected = x.clone()
    staging.write(file, 0, x)
    x.zero_()  # the caller may use it again
    back = torch.empty_like(x)
    staging.read(file, 0, back)
    assert not mover.queue, "the caller may use it"
    assert torch.equal(back, expected)


def test_one_buffer_is_filled_while_the_other_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mover, staging, file = staged(tmp_path)
    under_way: list[int] = []
    monkeypatch.setattr(file, "write", lambda *_: under_way.append(len(mover.queue)))
    staging.write(file, 0, torch.zeros(NUM_BYTES, dtype=torch.uint8))
    assert under_way == [1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("way", ["write", "read"])
def test_after_an_error_nothing_is_under_way(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller frees what the device might still be at."""
    mover, staging, file = staged(tmp_path)

    def fails(*_: object) -> None:
        if mover.num_started > 2:
            raise DiskError("ill")

    monkeypatch.setattr(file, way, fails)
    with pytest.raises(DiskError, match="ill"):
        getattr(staging, way)(file, 0, torch.zeros(NUM_BYTES, dtype=torch.uint8))
    assert mover.num_started > 2 and not mover.queue
