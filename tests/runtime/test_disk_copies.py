"""Copies to disk and back: exact, beside the computation, through buffers of a fixed size, whole again after errors."""

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.runtime.test_copies import TENSORS, bits
from tests.tracker import StorageTracker
from torch import Tensor

from shardwright.ir import DiskError, PlanError
from shardwright.passes.copies import CHUNK_BYTES, buffer_bytes
from shardwright.runtime.disk_copies import DiskCopies, DiskCopy
from shardwright.runtime.disk_file import DiskFile
from shardwright.runtime.host_pool import HostPool

CPU = torch.device("cpu")
MIB = 2**20


def engine_in(directory: Path, host_bytes: int = MIB, disk_bytes: int = 64 * MIB) -> DiskCopies:
    return DiskCopies(CPU, HostPool(host_bytes), DiskFile(directory, disk_bytes))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[DiskCopies]:
    """Its chunks are a single block."""
    found = engine_in(tmp_path)
    found.reserve([1])
    yield found
    found.close()


def out(engine: DiskCopies, x: Tensor) -> DiskCopy:
    copy = engine.wait(engine.offload(x), x)
    assert isinstance(copy, DiskCopy)
    return copy


def back(engine: DiskCopies, copy: DiskCopy) -> Tensor:
    found = engine.wait(engine.reload(copy), copy)
    assert isinstance(found, Tensor)
    return found


MANY_CHUNKS: dict[str, Callable[[], Tensor]] = {
    "of whole blocks": lambda: torch.randn(4 * 1024),
    "with a byte to spare": lambda: torch.randint(256, (3 * 4096 + 1,)).byte(),
    "one byte short": lambda: torch.randint(256, (3 * 4096 - 1,)).byte(),
    "turned": lambda: torch.randn(117, 131).t(),
    "a slice of columns": lambda: torch.randn(300, 70)[5:, 3:61],
}


@pytest.mark.parametrize("make", [*TENSORS.values(), *MANY_CHUNKS.values()], ids=[*TENSORS, *MANY_CHUNKS])
def test_what_comes_back_has_the_same_bits_dtype_shape_and_strides(
    engine: DiskCopies, make: Callable[[], Tensor]
) -> None:
    x = make()
    found = back(engine, out(engine, x))
    assert (found.dtype, found.shape, found.stride()) == (x.dtype, x.shape, x.stride())
    assert bits(found) == bits(x) and (found.data_ptr() != x.data_ptr() or not x.numel())


def test_many_at_once_come_back_each_its_own_in_any_order(engine: DiskCopies) -> None:
    random = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 30_000, (40,), generator=random).tolist()
    tensors = [torch.randn(size, generator=random) for size in sizes]
    starts = [engine.offload(x) for x in tensors]
    copies = [engine.wait(start, x) for start, x in zip(starts, tensors, strict=True)]
    order = torch.randperm(len(copies), generator=random).tolist()
    reloads = [engine.reload(copies[at]) for at in order]
    for at, reload in zip(order, reloads, strict=True):
        assert torch.equal(engine.wait(reload, copies[at]), tensors[at])  # type: ignore[arg-type]
    del starts, copies, reloads, reload
    assert engine.file.used_bytes == 0


def test_buffers_are_all_the_host_memory_it_takes(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, host_bytes=buffer_bytes([10**5]))
    tensors = [torch.randn(25_000) for _ in range(20)]
    engine.reserve([x.nbytes for x in tensors])
    copies = [out(engine, x) for x in tensors]
    assert all(torch.equal(back(engine, copy), x) for copy, x in zip(copies, tensors, strict=True))
    assert engine.pool.peak_bytes == engine.pool.held_bytes == buffer_bytes([10**5]) < 3 * 10**5
    assert engine.file.peak_bytes == 20 * 25 * 4096
    engine.close()


def test_larger_copies_than_a_chunk_go_through_in_parts(tmp_path: Path) -> None:
    engine = engine_in(tmp_path, host_bytes=buffer_bytes([CHUNK_BYTES]))
    x = torch.randn(2 * CHUNK_BYTES // 4 + 5)
    engine.reserve([x.nbytes])
    assert torch.equal(back(engine, out(engine, x)), x)
    engine.close()


def test_the_device_copy_is_freed_after_the_wait(engine: DiskCopies) -> None:
    x = torch.ones(1000)
    with StorageTracker([x], excluded=engine.pool.owns) as memory:
        for _ in range(20):
            y = x * 2
            copy = out(engine, y)
            del y
            # No waiting, no collection: the worker must have let go before `wait` came back.
            assert memory.current_bytes == 4000
            again = back(engine, copy)
            assert memory.current_bytes == 8000
            del again, copy
    assert memory.peak_bytes == 8000 and engine.file.used_bytes == 0


def test_starts_do_not_wait_for_the_disk(engine: DiskCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, write = threading.Event(), os.pwrite

    def gated(descriptor: int, data: memoryview, offset: int) -> int:
        assert gate.wait(10)
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", gated)
    x = torch.randn(10)
    start = engine.offload(x)
    reload = engine.reload(start)
    assert start.done is not None and not start.done.done()  # type: ignore[union-attr]
    gate.set()
    assert torch.equal(engine.wait(reload, start), x)  # type: ignore[arg-type]


def test_an_error_of_the_disk_is_raised_at_the_wait_and_the_next_copy_is_whole(
    engine: DiskCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    x = torch.randn(10)
    for name in ("pwrite", "preadv"):
        with monkeypatch.context() as broken:
            copy = out(engine, x)
            broken.setattr(os, name, fails)
            start = engine.offload(x) if name == "pwrite" else engine.reload(copy)
            with pytest.raises(DiskError, match="No space left on device; free space"):
                engine.wait(start, x)
        del start, copy
        assert engine.file.used_bytes == 0
        assert torch.equal(back(engine, out(engine, x)), x)


def test_an_aborted_step_leaves_no_slot_in_use_no_tensor_alive_and_spoils_nothing(
    engine: DiskCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is taken again while what the aborted step wanted with it is still to be done."""
    gate, write = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *call: (gate.wait(10), write(*call))[1])
    x, y = torch.randn(1000), torch.randn(1000)
    start = engine.offload(x)
    reload = engine.reload(start)
    watcher = weakref.ref(reload.tensor)
    del start, reload
    assert engine.file.used_bytes == 0
    second = engine.offload(y)
    assert second.slot.offset == 0
    gate.set()
    assert torch.equal(back(engine, engine.wait(second, y)), y)  # type: ignore[arg-type]
    del second
    gc.collect()
    assert watcher() is None and engine.file.used_bytes == 0


def test_more_than_a_budget_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="disk tier to stay within 8192 bytes, found 12288 more wanted"):
        engine_in(tmp_path, disk_bytes=8192).reserve([4096, 5000])
    with pytest.raises(PlanError, match="host pool to stay within 10000 bytes, found 12288 more wanted"):
        engine_in(tmp_path, host_bytes=10_000).reserve([4096])
    nothing = engine_in(tmp_path, 0, 0)
    nothing.reserve([])
    nothing.reserve([0])


def test_without_a_reservation_the_first_copy_makes_the_buffers_even_an_empty_one(tmp_path: Path) -> None:
    engine = engine_in(tmp_path)
    for x in (torch.empty(0, 3), torch.randn(5000)):
        assert torch.equal(back(engine, out(engine, x)), x)
    assert engine.pool.peak_bytes == buffer_bytes([1])
    engine.close()


def test_the_worker_ends_with_the_engine(tmp_path: Path) -> None:
    def workers() -> int:
        return sum(thread.name.startswith("shardwright-disk") for thread in threading.enumerate())

    before = workers()
    engine = engine_in(tmp_path)
    x = torch.randn(10)
    copy = out(engine, x)
    thread = next(t for t in threading.enumerate() if t.name.startswith("shardwright-disk"))
    assert workers() == before + 1
    descriptor = engine.file._descriptor
    del engine, copy
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and workers() == before
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies_are_exact_while_the_device_computes_and_reuses_memory(tmp_path: Path) -> None:
    device = torch.device("cuda")
    engine = DiskCopies(device, HostPool(1 << 26, pinned=True), DiskFile(tmp_path, 1 << 28))
    for seed in range(8):
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(3 << 20, device=device, generator=generator)
        expected = x.clone()
        copy = engine.wait(engine.offload(x), x)
        del x
        # Reuses x's memory on the compute stream: the wait must have ordered it behind the copy.
        junk = torch.full((3 << 20,), 7.0, device=device)
        again = engine.wait(engine.reload(copy), copy)  # type: ignore[arg-type]
        assert torch.equal(again, expected) and float(junk.sum()) == 7.0 * (3 << 20)  # type: ignore[arg-type]
        del copy, again, junk
    assert engine.file.used_bytes == 0
    engine.close()
