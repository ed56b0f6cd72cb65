"""Copies to host and back: exact, ordered, and gone when they should be."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.rank_graphs import GraphWriter, mlp
from tests.tracker import StorageTracker
from torch import Tensor

from shardwright.ir import Graph, InputKind, PlanError, Ref
from shardwright.runtime import copies as module
from shardwright.runtime.copies import Copies, CpuCopies, HostCopy, copies_on
from shardwright.runtime.host_buffers import host_buffer_sizes
from shardwright.runtime.host_pool import HostPool

CPU = torch.device("cpu")


@pytest.fixture
def engine() -> Iterator[CpuCopies]:
    found = CpuCopies(CPU, HostPool(1 << 20))
    yield found
    found.close()


def there_and_back(engine: Copies, x: Tensor) -> Tensor:
    host = engine.wait(engine.offload(x), x)
    assert isinstance(host, HostCopy)
    found = engine.wait(engine.reload(host), host)
    assert isinstance(found, Tensor)
    return found


TENSORS: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.randn(5, 7),
    "turned": lambda: torch.randn(5, 7).t(),
    "a slice of columns": lambda: torch.randn(5, 7)[1:, 2:4],
    "expanded": lambda: torch.randn(5, 1).expand(5, 3),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "not a number": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
    "bf16": lambda: torch.randn(9).bfloat16(),
    "bool": lambda: torch.tensor([True, False, True]),
    "i64": lambda: torch.arange(11) << 40,
}


def bits(x: Tensor) -> bytes:
    return bytes(x.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_what_comes_back_has_the_same_bits_dtype_shape_and_strides(
    engine: CpuCopies, make: Callable[[], Tensor]
) -> None:
    x = make()
    found = there_and_back(engine, x)
    assert (found.dtype, found.shape, found.stride()) == (x.dtype, x.shape, x.stride())
    assert bits(found) == bits(x) and (found.data_ptr() != x.data_ptr() or not x.numel())


def test_the_device_copy_is_freed_after_the_wait_and_the_host_copy_is_not_counted(engine: CpuCopies) -> None:
    x = torch.ones(1000)
    with StorageTracker([x], excluded=engine.pool.owns) as memory:
        for _ in range(20):
            y = x * 2
            host = engine.wait(engine.offload(y), y)
            del y
            # No waiting, no collection: the worker must have let go before `wait` came back.
            assert memory.current_bytes == 4000
            back = engine.wait(engine.reload(host), host)
            assert memory.current_bytes == 8000
            del back, host
    assert memory.peak_bytes == 8000 and engine.pool.peak_bytes == 4000 and engine.pool.used_bytes == 0


def test_reload_allocates_when_it_starts(engine: CpuCopies) -> None:
    x = torch.ones(1000)
    host = engine.wait(engine.offload(x), x)
    with StorageTracker(excluded=engine.pool.owns) as memory:
        start = engine.reload(host)
        assert memory.current_bytes == 4000
        engine.wait(start, host)


def test_a_host_copy_may_be_reloaded_twice_and_its_buffer_comes_back_after_the_last(engine: CpuCopies) -> None:
    x = torch.randn(10)
    host = engine.wait(engine.offload(x), x)
    first = engine.wait(engine.reload(host), host)
    second = engine.wait(engine.reload(host), host)
    assert torch.equal(first, x) and torch.equal(second, x)  # type: ignore[arg-type]
    assert engine.pool.used_bytes == 40
    del host
    assert engine.pool.used_bytes == 0


def test_starts_do_not_wait_for_the_copy(engine: CpuCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    original = module._copy_boxed

    def gated(box: list[Tensor]) -> None:
        gate.wait(10)
        original(box)

    monkeypatch.setattr(module, "_copy_boxed", gated)
    x = torch.randn(10)
    start = engine.offload(x)
    assert start.done is not None and not start.done.done()  # type: ignore[union-attr]
    back = engine.reload(start)
    gate.set()
    assert torch.equal(engine.wait(back, start), x)  # type: ignore[arg-type]


def test_an_error_in_the_worker_is_raised_at_the_wait(engine: CpuCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(box: list[Tensor]) -> None:
        raise RuntimeError("the wire is cut")

    monkeypatch.setattr(module, "_copy_boxed", fails)
    x = torch.randn(10)
    start = engine.offload(x)
    with pytest.raises(RuntimeError, match="the wire is cut"):
        engine.wait(start, x)


def test_an_aborted_step_leaves_no_buffer_in_use_and_no_tensor_alive(engine: CpuCopies) -> None:
    x = torch.randn(1000)
    start = engine.offload(x)
    back = engine.reload(start)
    watcher = weakref.ref(back.tensor)
    del start, back
    there_and_back(engine, x)  # the worker is in order: it is done with what came before
    gc.collect()
    assert watcher() is None and engine.pool.used_bytes == 0


def test_more_than_the_host_budget_is_refused_and_nothing_is_lost() -> None:
    engine = CpuCopies(CPU, HostPool(100))
    with pytest.raises(PlanError, match="within 100 bytes, found 4000 more wanted"):
        engine.offload(torch.randn(1000))
    assert torch.equal(there_and_back(engine, torch.ones(25)), torch.ones(25))
    engine.close()


def test_the_engine_is_that_of_the_device() -> None:
    assert isinstance(copies_on(CPU, HostPool(0)), CpuCopies)


def offloads(*sizes: int, together: bool) -> Graph:
    w = GraphWriter("sizes")
    w.given("x", InputKind.INPUT, 1)
    names = [
        w.call("aten.expand.default", Ref("x"), (size,), to=f"v{at}", shape=(size,)) for at, size in enumerate(sizes)
    ]
    for last in (False, True):
        for name, size in zip(names, sizes, strict=True):
            if not last:
                w.call("tier.offload", Ref(name), "host", to=f"{name}/h", shape=(size,))
                w.call("tier.wait", Ref(f"{name}/h"), Ref(name), to=f"{name}/host", shape=(size,))
            if last == together:
                w.call("tier.reload", Ref(f"{name}/host"), to=f"{name}/r", shape=(size,))
                w.call("tier.wait", Ref(f"{name}/r"), Ref(f"{name}/host"), to=f"{name}/back", shape=(size,))
    return w.graph(outputs={f"{name}/back": f"{name}/back" for name in names})


def test_buffers_to_make_before_are_those_in_use_at_once() -> None:
    assert host_buffer_sizes(offloads(10, 10, 20, together=True)) == (40, 40, 80)
    assert host_buffer_sizes(offloads(10, 10, 20, together=False)) == (40, 80)
    assert host_buffer_sizes(mlp("plain")) == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copies_are_exact_while_the_device_computes_and_reuses_memory() -> None:
    device = torch.device("cuda")
    engine = copies_on(device, HostPool(1 << 28, pinned=True))
    for seed in range(8):
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(1 << 20, device=device, generator=generator)
        expected = x.clone()
        start = engine.offload(x)
        host = engine.wait(start, x)
        del x
        # Reuses x's memory on the compute stream: the wait must have ordered it behind the copy.
        junk = torch.full((1 << 20,), 7.0, device=device)
        back = engine.wait(engine.reload(host), host)
        assert torch.equal(back, expected) and float(junk.sum()) == 7.0 * (1 << 20)  # type: ignore[arg-type]
        del start, host, back, junk
    assert engine.pool.used_bytes == 0
