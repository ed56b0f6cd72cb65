"""Host memory for what leaves the device: a bounded pool of buffers that are made once and used again every step.

Bytes are those of one rank. The pool counts what it hands out, holds and has adopted; never more than its budget.
Fresh pinned memory costs milliseconds a piece, hence buffers are kept; torch's own pinned allocator rounds to powers
of two, hence pinned buffers are ordinary memory that is registered with CUDA.
"""

import weakref
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.ir import PlanError

__all__ = ["HostBuffer", "HostPool"]


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Some bytes of host memory, in use by one copy at a time."""

    data: Tensor
    """Flat, u8, exactly the bytes asked for."""
    last_use: torch.cuda.Event | None = None
    """Where the last copy out of it ends on its stream; the next user waits for it."""

    @property
    def num_bytes(self) -> int:
        return self.data.numel()


class HostPool:
    """Buffers by exact size: a training step asks for the same sizes every time."""

    def __init__(self, budget_bytes: int, *, pinned: bool = False) -> None:
        self.budget_bytes = budget_bytes
        """The most the pool may hold."""
        self.peak_bytes = 0
        """The most that was in use at once, so far."""
        self._pinned = pinned
        self._held_bytes = 0
        self._used_bytes = 0
        self._free: dict[int, list[HostBuffer]] = {}
        self._num_buffers: Counter[int] = Counter()
        """By size, free or not."""
        self._owned: set[int] = set()
        self._returned: deque[HostBuffer] = deque()
        self._disowned: deque[tuple[int, int]] = deque()
        """Address and bytes of adopted storages that have died."""
        # Buffers come back from finalizers on any thread; a deque takes them without a lock.

    @property
    def used_bytes(self) -> int:
        """Handed out now."""
        self._collect()
        return self._used_bytes

    @property
    def held_bytes(self) -> int:
        """Allocated now, handed out or free."""
        return self._held_bytes

    def acquire(self, num_bytes: int) -> HostBuffer:
        """A buffer of exactly that size. Raises PlanError beyond the budget."""
        self._collect()
        free = self._free.get(num_bytes)
        buffer = free.pop() if free else self._allocate(num_bytes)
        self._used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        return buffer

    def release(self, buffer: HostBuffer) -> None:
        """Give a buffer back; from any thread."""
        self._returned.append(buffer)

    def reserve(self, sizes: Iterable[int]) -> None:
        """Make buffers before the first step, as far as the budget goes; those that are there count."""
        self._collect()
        for num_bytes, wanted in Counter(sizes).items():
            missing = wanted - self._num_buffers[num_bytes]
            room = (self.budget_bytes - self._held_bytes) // max(num_bytes, 1)
            for _ in range(min(missing, room)):
                self._free.setdefault(num_bytes, []).append(self._allocate(num_bytes))

    def adopt(self, tensor: Tensor, *, is_copied: bool = False) -> None:
        """Count host memory that somebody else made, optimizer state say, until it dies; once. Where copies go from it,
        as from a parameter, it is pinned like a buffer. Raises PlanError beyond the budget."""
        storage = tensor.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes or address in self._owned:
            return
        self._collect()
        self._make_room(num_bytes)
        self._owned.add(address)
        self._held_bytes += num_bytes
        self._used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._used_bytes)
        if is_copied and self._pinned:
            _register(storage)
            weakref.finalize(storage, _unregister, address)
        weakref.finalize(storage, self._disowned.append, (address, num_bytes))

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is one of the pool's buffers, or adopted."""
        self._collect()
        return tensor.untyped_storage().data_ptr() in self._owned

    def close(self) -> None:
        """Free what is not in use."""
        self._collect()
        for size, free in self._free.items():
            while free:
                self._discard(size)

    def _collect(self) -> None:
        while self._disowned:
            address, num_bytes = self._disowned.popleft()
            self._owned.discard(address)
            self._held_bytes -= num_bytes
            self._used_bytes -= num_bytes
        while self._returned:
            buffer = self._returned.popleft()
            self._used_bytes -= buffer.num_bytes
            self._free.setdefault(buffer.num_bytes, []).append(buffer)

    def _allocate(self, num_bytes: int) -> HostBuffer:
        self._make_room(num_bytes)
        storage = torch.UntypedStorage(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
        if self._pinned and num_bytes:
            _register(storage)
        # Owned before any operator sees it, so that whoever counts storages can tell from the start.
        self._owned.add(storage.data_ptr())
        self._held_bytes += num_bytes
        self._num_buffers[num_bytes] += 1
        return HostBuffer(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))

    def _make_room(self, num_bytes: int) -> None:
        """Discards free buffers of other sizes, the largest first, until there is room within the budget."""
        sizes = sorted((size for size, free in self._free.items() for _ in free), reverse=True)
        if self._held_bytes - sum(sizes) + num_bytes > self.budget_bytes:
            raise PlanError(
                f"expected the host pool to stay within {self.budget_bytes} bytes, found {num_bytes} more wanted with"
                f" {self._used_bytes} in use; raise the host budget, or plan again with less offloaded"
            )
        for size in sizes:
            if self._held_bytes + num_bytes <= self.budget_bytes:
                return
            self._discard(size)

    def _discard(self, size: int) -> None:
        buffer = self._free[size].pop()
        if buffer.last_use is not None:
            buffer.last_use.synchronize()
        if self._pinned and size:
            _unregister(buffer.data.data_ptr())
        self._held_bytes -= size
        self._num_buffers[size] -= 1
        self._owned.discard(buffer.data.untyped_storage().data_ptr())


def _register(storage: torch.UntypedStorage) -> None:
    status = torch.cuda.cudart().cudaHostRegister(storage.data_ptr(), storage.nbytes(), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise PlanError(
            f"expected CUDA to pin {storage.nbytes()} bytes of host memory, found error {int(status)};"
            " lower the host budget or raise the limit on locked memory (ulimit -l)"
        )


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
