"""Copies of storages to disk and back, beside the computation: what `tier.*` do where the plan says disk.

The same three edges as in `copies`. One worker thread moves everything, in order: writes wait for the write of what is
copied and are over when `wait` comes back, so its memory can be used again; a reload begins when its memory is free and
is over when `wait` comes back. A slot that an aborted step gives back may be taken again at once: what is still to be
done there is done before.

An error of the disk is raised where the step waits for the copy. The worker goes on to the next one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from shardwright.passes.copies import slot_bytes
from shardwright.runtime.copies import Away, Reload, bytes_of
from shardwright.runtime.disk_file import DiskFile, Slot
from shardwright.runtime.host_pool import HostPool
from shardwright.runtime.staging import Mark, Staging, mover_on

__all__ = ["DiskCopies", "DiskCopy"]


class DiskCopy(Away):
    """A storage on disk."""

    __slots__ = ("file", "slot")

    def __init__(self, x: Tensor, file: DiskFile) -> None:
        super().__init__(x)
        self.file = file
        self.slot: Slot = file.acquire(self.num_bytes)

    def __del__(self) -> None:
        # Unset when the file refused.
        slot = getattr(self, "slot", None)
        if slot is not None:
            self.file.release(slot)


class DiskCopies:
    """What the emitted program calls for the disk: `Copies` with another place for the copy."""

    def __init__(self, device: torch.device, pool: HostPool, file: DiskFile) -> None:
        """`pool` gives the buffers that copies pass through."""
        self.file = file
        self.pool = pool
        self._device = device
        self._mover = mover_on(device)
        self._staging: Staging | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardwright-disk")

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make buffers and file before the first step, for copies of these sizes that are there at once; nothing for
        none. Raises DiskError, and PlanError beyond a budget."""
        if not any(sizes):
            return
        self._buffers(sizes)
        self.file.reserve(sum(map(slot_bytes, sizes)))

    def offload(self, x: Tensor) -> DiskCopy:
        """Starts a copy of `x` to disk."""
        copy = DiskCopy(x, self.file)
        staging = self._buffers([copy.num_bytes])
        copy.done = self._submit(staging.write, copy, bytes_of(x))
        return copy

    def reload(self, h: DiskCopy) -> Reload:
        """Allocates a device tensor and starts the copy back."""
        back = Reload(h, h.fresh(self._device))
        staging = self._buffers([h.num_bytes])
        back.done = self._submit(staging.read, h, bytes_of(back.tensor))
        return back

    def wait(self, h: DiskCopy | Reload, x: object) -> DiskCopy | Tensor:
        """The finished copy. `x`, what is copied, is named so that it lives until here. Raises DiskError."""
        done, h.done = h.done, None
        try:
            if isinstance(done, Future):
                done.result()
        finally:
            # The error's traceback has this frame: with the future in it, what it holds would wait for the collector.
            del done
        if isinstance(h, DiskCopy):
            return h
        h.source = None
        return h.tensor

    def close(self) -> None:
        """Ends the worker when its copies are done."""
        self._worker.shutdown(wait=True)

    def _buffers(self, sizes: Sequence[int]) -> Staging:
        if self._staging is None:
            self._staging = Staging(self.pool, [1, *sizes], self._mover)
        return self._staging

    def _submit(self, move: Callable[[DiskFile, int, Tensor], None], copy: DiskCopy, flat: Tensor) -> Future[None]:
        # The box is empty when the future is done: the worker keeps no storage alive beyond its copy.
        return self._worker.submit(self._move_boxed, move, copy.slot.offset, self._mover.mark(), [flat])

    def _move_boxed(
        self, move: Callable[[DiskFile, int, Tensor], None], offset: int, after: Mark, box: list[Tensor]
    ) -> None:
        self._mover.follow(after)
        move(self.file, offset, box.pop())
