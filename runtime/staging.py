"""The way between device memory and the disk tier's file: chunks that pass through a few aligned buffers on the host.

The buffers are one piece of the host pool, pinned where that is, and stay as they are: what moves to disk takes no more
host memory than these, whatever its size. On CUDA a stream of its own fills one buffer while another is written, and
empties one while another is read. Everything here is called by one thread, which waits for the stream where it must.
"""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from shardwright.passes.copies import DISK_BLOCK_BYTES, NUM_BUFFERS, buffer_bytes, slot_bytes
from shardwright.runtime.disk_file import DiskFile
from shardwright.runtime.host_pool import HostPool

__all__ = ["ChunkMover", "Staging", "mover_on"]

Mark = torch.cuda.Event | None
"""A point that a stream gets to; None where everything is done at once."""


class ChunkMover(Protocol):
    """Copies between buffers and device memory."""

    def mark(self) -> Mark:
        """Where the caller's work on the device is now."""
        ...

    def follow(self, mark: Mark) -> None:
        """Let the copies that come wait for that."""
        ...

    def start(self, target: Tensor, source: Tensor) -> Mark:
        """Copy a chunk; it is there when the mark is reached."""
        ...


def mover_on(device: torch.device) -> ChunkMover:
    """That of a device."""
    return CudaMover(device) if device.type == "cuda" else CpuMover()


class CpuMover:
    """Copies at once; the copy itself runs without the interpreter lock."""

    def mark(self) -> Mark:
        return None

    def follow(self, mark: Mark) -> None:
        pass

    def start(self, target: Tensor, source: Tensor) -> Mark:
        target.copy_(source)
        return None


class CudaMover:
    """Copies on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> Mark:
        return self._record(torch.cuda.current_stream(self._device))

    def follow(self, mark: Mark) -> None:
        if mark is not None:
            self._stream.wait_event(mark)

    def start(self, target: Tensor, source: Tensor) -> Mark:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._record(self._stream)

    @staticmethod
    def _record(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


class _Buffer:
    """One chunk's place on the host."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        """Flat, u8, aligned; keeps the memory that `view` is of."""
        address = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())
        self.view = memoryview(address).cast("B")
        self.busy: Mark = None
        """Where the device is done with it."""

    def settle(self) -> None:
        """Wait until the device is done with it."""
        if self.busy is not None:
            self.busy.synchronize()
        self.busy = None


class Staging:
    """Buffers for copies of some sizes; they serve larger ones too, in more chunks."""

    def __init__(self, pool: HostPool, sizes: Iterable[int], mover: ChunkMover) -> None:
        """Raises PlanError where the host budget has no room for them."""
        self._mover = mover
        piece = pool.acquire(buffer_bytes(sizes)).data
        start = -piece.data_ptr() % DISK_BLOCK_BYTES
        self._chunk_bytes = (piece.numel() - DISK_BLOCK_BYTES) // NUM_BUFFERS
        self._buffers = tuple(
            _Buffer(piece[start + number * self._chunk_bytes :][: self._chunk_bytes]) for number in range(NUM_BUFFERS)
        )

    def write(self, file: DiskFile, offset: int, source: Tensor) -> None:
        """Flat bytes of the device to the file. Raises DiskError."""
        waiting: tuple[_Buffer, int, int] | None = None
        with self._settled():
            for buffer, begin, end in self._chunks(source):
                buffer.busy = self._mover.start(buffer.data[: end - begin], source[begin:end])
                if waiting is not None:
                    self._flush(file, offset, *waiting)
                waiting = buffer, begin, end
            if waiting is not None:
                self._flush(file, offset, *waiting)

    @staticmethod
    def _flush(file: DiskFile, offset: int, buffer: _Buffer, begin: int, end: int) -> None:
        buffer.settle()
        file.write(offset + begin, buffer.view[: slot_bytes(end - begin)])

    def read(self, file: DiskFile, offset: int, target: Tensor) -> None:
        """Bytes of the file to flat ones of the device; they are there when this returns. Raises DiskError."""
        with self._settled():
            for buffer, begin, end in self._chunks(target):
                buffer.settle()
                file.read(offset + begin, buffer.view[: slot_bytes(end - begin)])
                buffer.busy = self._mover.start(target[begin:end], buffer.data[: end - begin])

    def _chunks(self, flat: Tensor) -> Iterator[tuple[_Buffer, int, int]]:
        """Buffers in turn, and from where to where."""
        for number, begin in enumerate(range(0, flat.numel(), self._chunk_bytes)):
            yield self._buffers[number % NUM_BUFFERS], begin, min(begin + self._chunk_bytes, flat.numel())

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Also after an error: the device may still be at memory that the caller is about to free."""
        try:
            yield
        finally:
            for buffer in self._buffers:
                buffer.settle()
