"""The batch at the edge: what the user hands in becomes what the rank graph reads.

A tensor is the *global* batch, the same on every rank, unless `shard_loader` marked it or `inputs="local"` says that
each rank hands in its own part. Shapes, dtypes and devices are checked against the plan. On the first and every 100th
step a checksum is compared over all ranks that should hold the same.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.ir import InputError, Layout, TensorType, format_layout, local_shape
from shardwright.ir.placements import Shard, Strided
from shardwright.runtime.agreement import gather_numbers
from shardwright.runtime.parameters import Home, as_dtensor, local_part, whole

__all__ = ["CHECK_EVERY", "Batch", "InputMode", "LocalPart", "PlannedInput", "gathered", "require_equal_inputs"]

InputMode = Literal["global", "local"]

CHECK_EVERY = 100
"""Steps from one comparison of the inputs to the next."""


class LocalPart(Tensor):
    """A rank's own part of a global tensor, as `shard_loader` yields it; stays marked through `.to(...)` and slices."""


@dataclass(frozen=True, slots=True)
class PlannedInput:
    """One tensor of the batch, as planned."""

    name: str
    type: TensorType
    """Global."""
    layout: Layout


@dataclass(frozen=True)
class Batch:
    """Local tensors by name, as the rank graph reads them."""

    tensors: Mapping[str, Tensor]
    is_local: bool
    """Whether this rank was handed its own part: outputs then are its own part too."""
    checked: Mapping[str, Tensor]
    """What was handed in."""

    @classmethod
    def of(
        cls, given: Mapping[str, Tensor], planned: Mapping[str, PlannedInput], home: Home, mode: InputMode
    ) -> "Batch":
        """Check and place what was handed in. Raises InputError."""
        is_local = mode == "local" or any(isinstance(tensor, LocalPart) for tensor in given.values())
        plain = {name: tensor.detach().as_subclass(Tensor) for name, tensor in given.items()}
        for name, tensor in plain.items():
            _check(planned[name], tensor, home, mode == "local" or isinstance(given[name], LocalPart))
        placed = {
            name: tensor.contiguous()
            if mode == "local" or isinstance(given[name], LocalPart) or not _is_split(planned[name].layout)
            else local_part(tensor, name, home)
            for name, tensor in plain.items()
        }
        return cls(placed, is_local, plain)


def _is_split(layout: Layout) -> bool:
    return any(isinstance(placement, Shard | Strided) for placement in layout)


def _check(planned: PlannedInput, tensor: Tensor, home: Home, is_local: bool) -> None:
    part = local_shape(planned.type.shape, planned.layout, home.mesh)
    expected = part if is_local else planned.type.shape
    found = tuple(tensor.shape)
    if found != expected:
        raise InputError(
            f"expected {planned.name} of shape {list(expected)} ({_kind(planned, is_local)}), found {list(found)}; "
            f"{_advice(found, part, planned, is_local)}"
        )
    if tensor.device.type != home.device.type:
        raise InputError(f"expected {planned.name} on {home.device}, found it on {tensor.device}; move it there")


def _kind(planned: PlannedInput, is_local: bool) -> str:
    if not is_local:
        return "the global batch, the same on every rank"
    return f"this rank's part of {list(planned.type.shape)} under {format_layout(planned.layout)}"


def _advice(found: tuple[int, ...], part: tuple[int, ...], planned: PlannedInput, is_local: bool) -> str:
    if not is_local and found == part:
        return "a rank's own part is handed in through shard_loader, or with inputs='local'"
    if is_local and found == planned.type.shape:
        return "hand in global batches without shard_loader and without inputs='local'"
    return "pad or cut the batch (drop_last=True for the last one), or plan again for this shape"


def require_equal_inputs(batch: Batch, planned: Mapping[str, PlannedInput], home: Home) -> None:
    """Raises InputError on every rank when two ranks that should hold the same tensor do not. Collective."""
    if home.devices is None or not dist.is_initialized():
        return
    names = sorted(batch.checked)
    rows = gather_numbers([int(batch.is_local), *(_checksum(batch.checked[name]) for name in names)])
    if len({row[0] for row in rows}) > 1:
        raise InputError("expected all ranks to hand in global batches or all their own parts, found both")
    for column, name in enumerate(names, start=1):
        first: dict[tuple[int, ...], int] = {}
        layout = planned[name].layout if batch.is_local else ()
        for rank, row in enumerate(rows):
            twin = first.setdefault(_held_part(layout, rank, home), rank)
            if row[column] != rows[twin][column]:
                raise InputError(_difference(name, twin, rank, batch.is_local))


def _held_part(layout: Layout, rank: int, home: Home) -> tuple[int, ...]:
    """Which part a rank holds: its index on the axes that split; the same for all where nothing is split."""
    split = (isinstance(placement, Shard | Strided) for placement in layout)
    return tuple(index for index, is_cut in zip(home.mesh.coordinate(rank), split, strict=False) if is_cut)


def _difference(name: str, twin: int, rank: int, is_local: bool) -> str:
    if is_local:
        return (
            f"expected {name} to be the same part on ranks {twin} and {rank}, found other values; let shard_loader cut "
            "the batches, with the same seed for the sampler on every rank"
        )
    return (
        f"expected the same global {name} on every rank, found other values on ranks {twin} and {rank}; wrap the "
        "loader in shardwright.shard_loader(loader, model) to feed each rank its part, or seed the samplers alike"
    )


def _checksum(tensor: Tensor) -> int:
    data = tensor.detach().cpu().contiguous()
    return zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().tobytes())


def gathered(part: Tensor, layout: Layout, home: Home) -> Tensor:
    """The global tensor from every rank's part. Collective."""
    shape = list(part.shape)
    for placement, size in zip(layout, home.mesh.sizes, strict=True):
        if isinstance(placement, Shard | Strided):
            shape[placement.dim] *= size
    return whole(as_dtensor(part.contiguous(), torch.Size(shape), layout, home))
