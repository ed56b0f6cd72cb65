"""The memory of a step as it really is: bytes of all tensor storages alive on this rank, now and at the peak.

Needs nothing from a plan, so that it can judge one. A storage counts from the operator that allocates it until it
dies, rounded up to the allocator's block; views and in-place results allocate nothing. Host copies of offloaded
tensors live in pool buffers made before, which are not counted. Costs some microseconds an operator: meant for a few
steps, not for all.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from shardwright.runtime.compat import FakeTensor, TorchDispatchMode, tree_leaves

__all__ = ["StepMemory", "held_tensors"]


class StepMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Counts while it is entered.

    >>> x = torch.ones(1024)
    >>> with StepMemory([x]) as memory:
    ...     y = x.relu().neg()
    >>> memory.current_bytes, memory.peak_bytes
    (8192, 12288)
    """

    def __init__(self, held: Iterable[torch.Tensor] = (), block_bytes: int = 64) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block_bytes = block_bytes
        self.current_bytes = 0
        """Alive now."""
        self.peak_bytes = 0
        """Most that was alive at once, since entering."""
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        """Address to storage and bytes."""
        for tensor in held:
            self._count(tensor)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if _address(tensor) not in given:
                self._count(tensor)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        for local in _tensors(tensor):
            if local.device.type != "meta" and not isinstance(local, FakeTensor):
                self.count_storage(local.untyped_storage())

    def count_storage(self, storage: torch.UntypedStorage) -> None:
        """Enter a storage, once."""
        address = storage._cdata
        if address in self._alive:
            return
        num_bytes = -(-storage.nbytes() // self.block_bytes) * self.block_bytes
        self._alive[address] = weakref.ref(storage, lambda _: self._forget(address)), num_bytes
        self.current_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def forget_storage(self, storage: torch.UntypedStorage) -> None:
        """Leave a storage out, as if it had died; nothing where it is not counted."""
        self._forget(storage._cdata)

    def _forget(self, address: int) -> None:
        _, num_bytes = self._alive.pop(address, (None, 0))
        self.current_bytes -= num_bytes


def held_tensors(module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[torch.Tensor]:
    """What is held between steps: parameters, gradients, buffers, optimizer state."""
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    if optimizer is not None:
        yield from _tensors([list(state.values()) for state in optimizer.state.values()])


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    """Plain tensors in a structure; a DTensor stands for its local part."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, DTensor):
            yield from _tensors(leaf._local_tensor)
        elif isinstance(leaf, torch.Tensor):
            yield leaf


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
