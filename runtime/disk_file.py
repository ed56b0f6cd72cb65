"""The file of the disk tier: one for each rank, no larger than its budget, and gone with the process however it ends.

It has no name: it is unlinked as soon as it is open, so the system frees it with its last descriptor. Its blocks are
allocated before they are written, so a full disk shows before the first step. Reads and writes are direct where the
file system takes that, since its cache would take the memory that moving to disk has freed; what is read or written
lies at multiples of `DISK_BLOCK_BYTES`, in memory and in the file. Bytes are those of one rank.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.ir import DiskError, PlanError, format_size
from shardwright.passes.copies import DISK_BLOCK_BYTES, slot_bytes
from shardwright.runtime.slots import Slots

__all__ = ["DiskFile", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the file, in use by one copy."""

    offset: int
    num_bytes: int
    """Whole blocks."""


class DiskFile:
    """Slots in a file that is made when it is first needed. Slots come back from any thread; one thread moves bytes."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        """The most the file may take."""
        self.peak_bytes = 0
        """The most that was in use at once, so far."""
        self.is_direct = False
        """Whether the file system's cache is passed by; false until the file is made."""
        self._descriptor = -1
        self._slots = Slots()
        self._returned: deque[Slot] = deque()
        # As in the host pool: finalizers give slots back, and a deque takes them without a lock.

    @property
    def used_bytes(self) -> int:
        """In use now."""
        self._collect()
        return self._slots.used_bytes

    @property
    def held_bytes(self) -> int:
        """What the file takes on disk now."""
        return self._slots.size

    def reserve(self, num_bytes: int) -> None:
        """Let so much be free or in use before the first step. Raises DiskError, and PlanError beyond the budget."""
        if num_bytes > self._slots.size:
            self._grow(num_bytes - self._slots.size)

    def acquire(self, num_bytes: int) -> Slot:
        """Room for so many bytes. Raises PlanError beyond the budget, DiskError where the disk is full."""
        self._collect()
        wanted = slot_bytes(num_bytes)
        if not wanted:
            return Slot(0, 0)
        offset = self._slots.take(wanted)
        if offset is None:
            self._grow(self._slots.missing(wanted))
            offset = self._slots.take(wanted)
        assert offset is not None
        self.peak_bytes = max(self.peak_bytes, self._slots.used_bytes)
        return Slot(offset, wanted)

    def release(self, slot: Slot) -> None:
        """Give a slot back; from any thread."""
        if slot.num_bytes:
            self._returned.append(slot)

    def write(self, offset: int, source: memoryview) -> None:
        """Whole blocks of aligned memory to the file. Raises DiskError."""
        with self._clear_errors(f"to write {format_size(len(source))} to"):
            while source:
                done = _whole_blocks(os.pwrite(self._descriptor, source, offset))
                source, offset = source[done:], offset + done

    def read(self, offset: int, target: memoryview) -> None:
        """Whole blocks of the file to aligned memory. Raises DiskError."""
        with self._clear_errors(f"to read {format_size(len(target))} from"):
            while target:
                done = _whole_blocks(os.preadv(self._descriptor, [target], offset))
                target, offset = target[done:], offset + done

    def _collect(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            self._slots.give(slot.offset, slot.num_bytes)

    def _grow(self, num_bytes: int) -> None:
        """Allocate blocks at the end of the file, which is opened first where it is not."""
        size = self._slots.size + num_bytes
        if size > self.budget_bytes:
            raise PlanError(
                f"expected the disk tier to stay within {self.budget_bytes} bytes, found {num_bytes} more wanted with"
                f" {self._slots.used_bytes} in use; raise the disk budget, or plan again with less on disk"
            )
        with self._clear_errors(f"room for {format_size(size)} in"):
            is_new = not self._slots.size
            if self._descriptor < 0:
                self._open()
            with self._through_the_cache():
                # Not sparse: a hole would find the disk full in the middle of a step.
                os.posix_fallocate(self._descriptor, self._slots.size, num_bytes)
            if is_new:
                self._go_direct()
        self._slots.grow(num_bytes)

    def _open(self) -> None:
        self._descriptor, path = tempfile.mkstemp(prefix="shardwright-", suffix=".spill", dir=self.directory)
        weakref.finalize(self, os.close, self._descriptor)
        os.unlink(path)

    @contextlib.contextmanager
    def _through_the_cache(self) -> Iterator[None]:
        """Where a file system cannot allocate, libc writes single bytes instead, which direct files refuse."""
        if self.is_direct:
            self._set_direct(False)
        try:
            yield
        finally:
            if self.is_direct:
                self._set_direct(True)

    def _set_direct(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def _go_direct(self) -> None:
        """Tried with the first block, which holds nothing yet: some file systems take the flag and refuse the read."""
        try:
            self._set_direct(True)
            with mmap.mmap(-1, DISK_BLOCK_BYTES) as block:
                os.preadv(self._descriptor, [block], 0)
            self.is_direct = True
        except OSError as error:
            self._set_direct(False)
            warnings.warn(
                f"the file system of {self.directory} does not take direct I/O ({error.strerror}): what the plan moves"
                " to disk passes through the system's page cache, which takes memory beside the plan's",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _clear_errors(self, expected: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(
                f"expected {expected} a file of the disk tier in {self.directory}, found: {error.strerror or error};"
                f" {_ADVICE.get(error.errno or 0, _OTHER_ADVICE)}. Parameters and optimizer state are as they were"
            ) from error


_ROOM = "free space there, plan with a smaller disk budget, or name another directory: [disk] path, or disk_path"
_OTHER_ADVICE = "see to the disk, or name another directory: [disk] path of the cluster, or disk_path"
_ADVICE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or plan with a smaller disk budget",
    errno.ENOENT: "make the directory, or name another one: [disk] path of the cluster, or disk_path",
}


def _whole_blocks(moved_bytes: int) -> int:
    """What a read or write has done, in blocks; the rest is done again. Raises OSError where that is nothing."""
    done = moved_bytes - moved_bytes % DISK_BLOCK_BYTES
    if not done:
        raise OSError(errno.EIO, f"only {moved_bytes} bytes of a block")
    return done
