"""The memory of a peer's step: as `StepMemory`, and storages that FSDP2 resizes in place, which no operator shows."""

from types import TracebackType
from typing import Self

import torch

from shardwright.runtime.tracker import StepMemory

__all__ = ["PeerMemory"]


class PeerMemory(StepMemory):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Counts while it is entered; replaces `torch.UntypedStorage.resize_` meanwhile."""

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            self.forget_storage(storage)
            self._resize(storage, num_bytes)
            self.count_storage(storage)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(kind, error, at)  # type: ignore[no-untyped-call]
