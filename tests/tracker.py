"""What is really alive, by watching torch: an oracle for memory that knows nothing of plans.

Counts each storage once, in bytes, from the first operator that shows it until it is freed. Storages for which
`excluded` is true (buffers of a host pool) do not count. Sees the thread that enters it; not the inside of gloo, whose
thread may hold what was sent some microseconds longer than the collective takes: it is given a moment behind each.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["StorageTracker"]

MOMENT_SECONDS = 2e-4


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes alive now and at most, while entered."""

    def __init__(self, held: Iterable[Tensor] = (), *, excluded: Callable[[Tensor], bool] = lambda _: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current_bytes = 0
        self.peak_bytes = 0
        self.num_storages = 0
        """Alive now."""
        self._excluded = excluded
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """With where its life begins in the log."""
        self._log: list[tuple[int, int]] = []
        """Bytes that come and go, in order, each with where in the log that life began."""
        for tensor in held:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that was there before. Fake ones, which DTensor asks for shapes, have no memory."""
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or self._excluded(tensor):
            return
        birth = len(self._log)
        self._alive[key] = weakref.ref(storage, self._death(key, birth, storage.nbytes())), birth
        self._log.append((birth, storage.nbytes()))
        self.num_storages += 1
        self.current_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def peak_bytes_without(self, tensors: Iterable[Tensor]) -> int:
        """The peak, had the storages of these tensors, still alive, not counted."""
        keys = {tensor.untyped_storage()._cdata for tensor in tensors}
        left_out = {birth for key, (_, birth) in self._alive.items() if key in keys}
        return max(accumulate(change for birth, change in self._log if birth not in left_out), default=0)

    def _death(self, key: int, birth: int, num_bytes: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self._log.append((birth, -num_bytes))
            self.num_storages -= 1
            self.current_bytes -= num_bytes

        return died

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as the operators on local tensors that it stands for
        result = func(*args, **(kwargs or {}))
        if func is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(MOMENT_SECONDS)
        # Operands too: what another thread allocated, a reloaded tensor say, shows up here first.
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self.add(leaf)
        return result
