"""Seconds of one operator, by running it: random operands of the exact local types, fresh results as in a real step.

Needs a node (aten, another torch library, or a local `mesh.*` operator), the types around it and a device. Gives the
median of repeats that together take some tens of milliseconds; a slow operator runs twice. CPU runs use one thread, as
ranks do, and count its processor time: what other processes take, other ranks among them, is priced apart. Repeats go
round several sets of operands, since in a step they are no longer in the core's own cache. Raises MeasureError where
the operator cannot be run on made-up data.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from shardwright.ir import Node, ShardwrightError, TensorType
from shardwright.ir.ops import aliased_operand, is_async_start
from shardwright.runtime import kernels
from shardwright.runtime.operand_values import make_operands
from shardwright.runtime.torch_ops import torch_arg, torch_op

__all__ = ["MeasureError", "measure_op", "one_thread", "time_call"]

Types = tuple[TensorType, ...]

ENOUGH_SECONDS: Final = 0.02
"""Of timed repeats; more only sharpens a median that other processes disturb anyway."""
MAX_REPEATS: Final = 200
MIN_REPEATS: Final = 3
SLOW_SECONDS: Final = 0.06
"""An operator that takes this long is timed once after its warm-up."""
COLD_BYTES: Final = 48 * 2**20
MAX_SETS: Final = 8
"""Operands are copied until they fill `COLD_BYTES`, more than the last cache of most processors holds for a rank, at
most so many times."""


class MeasureError(ShardwrightError):
    """An operator that cannot be measured; its price is estimated and the reason kept."""


def measure_op(node: Node, operands: Types, results: Types, device: torch.device) -> float:
    """Seconds of one call; 0 for views and for starts, whose time is on other streams."""
    if aliased_operand(node) is not None or is_async_start(node.op) or not results:
        return 0.0
    try:
        with one_thread(device), torch.no_grad():
            calls = [_call(node, values, operands, results, device) for values in _sets(node, operands, device)]
            rounds = itertools.cycle(calls)
            return time_call(lambda: next(rounds)(), device)
    except ShardwrightError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        raise MeasureError(
            f"expected {node.op} to run on random operands {', '.join(map(str, operands))}, found "
            f"{type(error).__name__}: {error}; its price is estimated instead"
        ) from error


def _sets(node: Node, operands: Types, device: torch.device) -> list[dict[str, Tensor]]:
    """Several sets of operands, equal in value, too large together for the core's own cache where they are not tiny."""
    first = make_operands(node, operands, device)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in first.values())
    num_sets = max(1, min(MAX_SETS, math.ceil(COLD_BYTES / max(1, num_bytes))))
    return [first, *({name: _copy(tensor) for name, tensor in first.items()} for _ in range(num_sets - 1))]


def _copy(tensor: Tensor) -> Tensor:
    """With its strides, overlapping ones included."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return flat.clone().as_strided(tensor.shape, tensor.stride())


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """torch with one thread, as on a rank; the caller's number is restored."""
    before = torch.get_num_threads()
    if device.type == "cpu" and before != 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of `call`, on CPU of processor time of this thread; its result is freed before the next repeat."""
    clock = _cuda_seconds if device.type == "cuda" else _cpu_seconds
    warm_up = clock(call)
    if warm_up > SLOW_SECONDS:
        return clock(call)
    warm_up = clock(call)  # the first one also loads code and fills caches
    repeats = math.ceil(ENOUGH_SECONDS / max(warm_up, 1e-7))
    return statistics.median(clock(call) for _ in range(min(MAX_REPEATS, max(MIN_REPEATS, repeats))))


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _cuda_seconds(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _call(
    node: Node, values: dict[str, Tensor], operands: Types, results: Types, device: torch.device
) -> Callable[[], object]:
    if node.op.startswith("mesh."):
        return _mesh_call(node, [values[name] for name in node.operands], operands, results)
    op = torch_op(node.op)
    args = [torch_arg(arg, values, device) for arg in node.args]
    kwargs = {key: torch_arg(arg, values, device) for key, arg in node.kwargs}
    return lambda: op(*args, **kwargs)


def _mesh_call(node: Node, values: list[Tensor], operands: Types, results: Types) -> Callable[[], object]:
    """The local operators of ours, as the emitted program calls them."""
    whole, part = (operands[0].shape if operands else ()), results[0].shape
    match node.op, node.args[1:]:
        case "mesh.own", (str(), int(dim), int(outer)):
            return lambda: kernels.own(values[0], 0, whole[dim] // part[dim], dim, outer)
        case "mesh.merge", (int(n), int(dim), int(outer)):
            return lambda: kernels.merge(values[0], n, dim, outer)
        case "mesh.stack", (int(n), int(dim), int(outer)):
            return lambda: kernels.stack(values[0], n, dim, outer)
        case "mesh.pack", _:
            return lambda: kernels.pack(values)
        case "mesh.coordinate", _:
            return lambda: torch.tensor(0)
    raise MeasureError(f"expected a local operator, found {node.op}{node.args}; its price is estimated instead")
