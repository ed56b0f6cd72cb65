"""The peak of memory of a step: CUDA's allocator says it; on a CPU every storage is followed."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import Training

__all__ = ["Peak", "peak_of", "synchronize", "workspace_bytes"]


@dataclass(frozen=True)
class Peak:
    """Bytes on the device at once in one step; one of the two is None."""

    max_memory_allocated: int | None
    """As CUDA's allocator counts, in blocks of 512 B; what cuBLAS keeps included."""
    tracked_bytes: int | None
    """All storages outside of host memory, to the byte."""


def peak_of(training: Training) -> Peak:
    """Of one step, which is run for it."""
    if training.device.type == "cuda":
        synchronize(training.device)
        torch.cuda.reset_peak_memory_stats(training.device)
        training.step()
        synchronize(training.device)
        return Peak(torch.cuda.max_memory_allocated(training.device), None)
    with _Tracker(training) as tracker:
        training.step()
    return Peak(None, tracker.peak_bytes)


def synchronize(device: torch.device) -> None:
    """Wait for what was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def workspace_bytes(device: torch.device) -> int:
    """What cuBLAS keeps in torch's allocator from its first matmul on. Call it before anything else."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(256, 256, dtype=dtype, device=device)
        torch.mm(x, x)
        del x
    synchronize(device)
    return torch.cuda.memory_allocated(device) - before


class _Tracker(TorchDispatchMode):
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.peak_bytes = self._current_bytes = 0
        self._training = training
        self._alive: dict[int, weakref.ref] = {}
        for tensor in training.held():
            self._add(tensor)

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._alive or self._training.owns(tensor):
            return
        self._alive[key] = weakref.ref(storage, lambda _: self._died(key, num_bytes))
        self._current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._current_bytes)

    def _died(self, key: int, num_bytes: int) -> None:
        del self._alive[key]
        self._current_bytes -= num_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # Operands too: what another thread allocated, a reloaded tensor say, shows up here first.
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result
