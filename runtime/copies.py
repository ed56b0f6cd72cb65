"""Copies of storages to host and back, beside the computation: what `tier.offload`, `tier.reload`, `tier.wait` do.
Those to disk are in `disk_copies`.

Three edges order each copy: after the write of what is copied; no reuse of either memory before the copy has ended; no
use of the result before it is there. On CUDA two streams of their own and events carry them, and nothing waits on the
host. On CPU one worker thread copies in order, and `wait` blocks. Host memory comes from the pool and goes back when
the last handle dies, so an aborted step leaks nothing.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from shardwright.runtime.host_pool import HostBuffer, HostPool

__all__ = [
    "Away", "Copies", "CpuCopies", "CudaCopies", "HostCopy", "Reload", "bytes_of", "copies_on", "extent",
]  # fmt: skip

Done = Future[None] | torch.cuda.Event


class Away:
    """A storage that lives on another tier: the value of `tier.offload`."""

    __slots__ = ("done", "dtype", "num_bytes", "shape", "strides")

    def __init__(self, x: Tensor) -> None:
        self.dtype = x.dtype
        self.shape = x.shape
        self.strides = x.stride()
        self.num_bytes = extent(x.shape, x.stride()) * x.element_size()
        self.done: Done | None = None

    def fresh(self, device: torch.device) -> Tensor:
        """An unwritten device tensor of the same dtype, shape and strides."""
        flat = torch.empty(extent(self.shape, self.strides), dtype=self.dtype, device=device)
        return flat.as_strided(self.shape, self.strides)


class HostCopy(Away):
    """One on the host."""

    __slots__ = ("buffer", "pool")

    def __init__(self, x: Tensor, pool: HostPool) -> None:
        super().__init__(x)
        self.pool = pool
        self.buffer: HostBuffer = pool.acquire(self.num_bytes)

    @property
    def memory(self) -> Tensor:
        """Flat, u8."""
        return self.buffer.data

    def __del__(self) -> None:
        # Unset when the pool refused.
        buffer = getattr(self, "buffer", None)
        if buffer is not None:
            self.pool.release(buffer)


class _Lying(Away):
    """A parameter that lies on the host: nobody made a copy, and nobody waits for one."""

    __slots__ = ("memory",)

    def __init__(self, x: Tensor) -> None:
        super().__init__(x)
        self.memory = bytes_of(x)


def _on_host(h: HostCopy | Tensor) -> HostCopy | _Lying:
    return _Lying(h) if isinstance(h, Tensor) else h


class Reload:
    """A device tensor that is being written from another tier: the value of `tier.reload`."""

    __slots__ = ("done", "source", "tensor")

    def __init__(self, source: Away, tensor: Tensor) -> None:
        self.source: Away | None = source
        self.tensor = tensor
        self.done: Done | None = None


class Copies(Protocol):
    """What the emitted program calls."""

    @property
    def pool(self) -> HostPool: ...

    def offload(self, x: Tensor) -> HostCopy:
        """Starts a copy of `x` to host."""
        ...

    def reload(self, h: HostCopy | Tensor) -> Reload:
        """Allocates a device tensor and starts the copy back, or that of a parameter that lies on the host."""
        ...

    def wait(self, h: HostCopy | Reload, x: object) -> HostCopy | Tensor:
        """The finished copy. `x`, what is copied, is named so that it lives until here."""
        ...


def copies_on(device: torch.device, pool: HostPool) -> Copies:
    """The copy engine of a device."""
    return CudaCopies(device, pool) if device.type == "cuda" else CpuCopies(device, pool)


class CpuCopies:
    """One worker thread; the copy itself runs without the interpreter lock."""

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self._device = device
        self._pool = pool
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardwright-copies")

    @property
    def pool(self) -> HostPool:
        return self._pool

    def offload(self, x: Tensor) -> HostCopy:
        host = HostCopy(x, self._pool)
        host.done = self._submit(host.buffer.data, bytes_of(x))
        return host

    def reload(self, h: HostCopy | Tensor) -> Reload:
        source = _on_host(h)
        back = Reload(source, source.fresh(self._device))
        back.done = self._submit(bytes_of(back.tensor), source.memory)
        return back

    def wait(self, h: HostCopy | Reload, x: object) -> HostCopy | Tensor:
        if isinstance(h.done, Future):
            h.done.result()
        h.done = None
        return _finished(h)

    def close(self) -> None:
        """Ends the worker when its copies are done."""
        self._worker.shutdown(wait=True)

    def _submit(self, target: Tensor, source: Tensor) -> Future[None]:
        # The box is empty when the future is done: the worker keeps no storage alive beyond its copy.
        return self._worker.submit(_copy_boxed, [target, source])


class CudaCopies:
    """One stream out, one stream in."""

    def __init__(self, device: torch.device, pool: HostPool) -> None:
        self._device = device
        self._pool = pool
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def pool(self) -> HostPool:
        return self._pool

    def offload(self, x: Tensor) -> HostCopy:
        host = HostCopy(x, self._pool)
        if host.buffer.last_use is not None:
            self._out.wait_event(host.buffer.last_use)
        host.done = self._run(self._out, lambda: host.buffer.data.copy_(bytes_of(x), non_blocking=True))
        return host

    def reload(self, h: HostCopy | Tensor) -> Reload:
        source = _on_host(h)
        back = _CudaReload(source, source.fresh(self._device), self._in)
        # The copy out may still be on its way; its stream knows.
        self._in.wait_stream(self._out)
        back.done = self._run(self._in, lambda: bytes_of(back.tensor).copy_(source.memory, non_blocking=True))
        if isinstance(source, HostCopy):
            source.buffer.last_use = back.done
        return back

    def wait(self, h: HostCopy | Reload, x: object) -> HostCopy | Tensor:
        if isinstance(h.done, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(h.done)
        h.done = None
        return _finished(h)

    def _run(self, stream: torch.cuda.Stream, copy: Callable[[], Tensor]) -> torch.cuda.Event:
        # What is copied is written on the current stream, and what is written was freed on it.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event


class _CudaReload(Reload):
    __slots__ = ("stream",)

    def __init__(self, source: Away, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        super().__init__(source, tensor)
        self.stream = stream

    def __del__(self) -> None:
        # An aborted step: nobody waited, so the allocator must not hand the memory out before the copy ends.
        if self.done is not None:
            self.tensor.record_stream(self.stream)


def _finished(h: HostCopy | Reload) -> HostCopy | Tensor:
    if isinstance(h, HostCopy):
        return h
    h.source = None
    return h.tensor


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last that the tensor touches."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def bytes_of(x: Tensor) -> Tensor:
    """The memory that `x` touches, flat: one plain copy keeps dtype and strides, whatever they are."""
    return x.as_strided((extent(x.shape, x.stride()),), (1,)).view(torch.uint8)


def _copy_boxed(box: list[Tensor]) -> None:
    source, target = box.pop(), box.pop()
    target.copy_(source)
