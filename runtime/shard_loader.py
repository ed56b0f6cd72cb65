"""Each rank its own part of every global batch, cut as the plan cuts the inputs, and marked as such.

Wraps what yields *global* batches, the same on every rank. A `DataLoader` over a map-style data set is rebuilt so that
a rank loads only its own samples, where the plan cuts all inputs alike on their first dim; from any other iterable the
rank's part is cut out of each batch. Shuffling samplers need the same seed on every rank: the sample numbers of the
first and every 100th batch are compared over the ranks.

Before the model is planned, batches are passed on whole, so that the first one can be what planning sees.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from shardwright.ir import InputError, Layout, Mesh, Plan, Shard, Strided, divides, format_layout, local_shape
from shardwright.runtime.agreement import gather_numbers
from shardwright.runtime.inputs import CHECK_EVERY, LocalPart
from shardwright.runtime.ranks import world
from shardwright.runtime.session import find_session
from shardwright.runtime.shards import shard
from shardwright.runtime.trees import KeyPath, format_path, leaves, map_leaves

__all__ = ["ShardLoader", "shard_loader"]


def shard_loader(loader: Iterable[object], model_or_plan: nn.Module | Plan) -> "ShardLoader":
    """`loader`'s batches, this rank's part of each. As often iterable as `loader` is; as long, too."""
    return ShardLoader(loader, model_or_plan)


@dataclass(frozen=True)
class _Cut:
    """How a plan cuts the batch."""

    layouts: Mapping[str, Layout]
    """By input, in the order of the plan."""
    mesh: Mesh
    rank: int

    @property
    def common(self) -> Layout | None:
        """The layout of all inputs, where they have the same."""
        found = set(self.layouts.values())
        return next(iter(found)) if len(found) == 1 else None

    @property
    def cuts_samples(self) -> bool:
        """Whether a rank's part of a batch is some of its samples, whole."""
        split = [p for p in self.common or () if isinstance(p, Shard | Strided)]
        return bool(split) and all(p == Shard(0) for p in split)

    def batch(self, batch: object) -> object:
        """This rank's part of every tensor."""
        tensors = [path for path, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        by_position = dict(zip(tensors, self.layouts, strict=True)) if len(tensors) == len(self.layouts) else {}

        def part(path: KeyPath, leaf: object) -> object:
            if not isinstance(leaf, Tensor) or not leaf.dim():
                return leaf
            name = format_path(path).removeprefix(".")
            layout = self.layouts.get(name) or self.layouts.get(by_position.get(path, "")) or self.common
            if layout is None:
                raise InputError(
                    f"expected the inputs {', '.join(self.layouts)}, which the plan cuts differently, found "
                    f"{name or 'a tensor'}; yield dicts with the names of the inputs"
                )
            self.check(name or next(iter(self.layouts)), tuple(leaf.shape), layout)
            return shard(leaf, layout, self.mesh, self.rank).as_subclass(LocalPart)

        return map_leaves(batch, part)

    def samples(self, indices: Sequence[object]) -> list[object]:
        """This rank's samples of a batch."""
        layout = self.common or ()
        self.check("the batch", (len(indices),), layout)
        own = shard(torch.arange(len(indices)), layout, self.mesh, self.rank)
        return [indices[position] for position in own.tolist()]

    def check(self, name: str, shape: tuple[int, ...], layout: Layout) -> None:
        """Raises InputError for a shape that does not divide."""
        if divides(shape, layout, self.mesh):
            return
        ones = tuple(1 for _ in shape)
        parts = [
            f"dim {dim} by {whole}"
            for dim, (one, whole) in enumerate(zip(ones, _num_parts(len(shape), layout, self.mesh), strict=True))
            if one != whole
        ]
        raise InputError(
            f"expected {name} to divide over the ranks ({format_layout(layout)} on {self.mesh}: {', '.join(parts)}), "
            f"found {list(shape)}; drop the last batch (drop_last=True), pad it, or plan for another batch"
        )


def _num_parts(num_dims: int, layout: Layout, mesh: Mesh) -> list[int]:
    """Into how many parts each dim is cut."""
    big = 1
    for size in mesh.sizes:
        big *= size
    cut = tuple(p if not isinstance(p, Shard | Strided) or p.dim < num_dims else Shard(0) for p in layout)
    local = local_shape((big,) * num_dims, cut, mesh)
    return [big // size for size in local]


class ShardLoader:
    """Made by `shard_loader`."""

    def __init__(self, loader: Iterable[object], source: nn.Module | Plan) -> None:
        self._loader = loader
        self._source = source
        self._own: DataLoader[object] | None = None

    def __len__(self) -> int:
        if not isinstance(self._loader, Sized):
            raise TypeError(f"expected a loader with a length, found {type(self._loader).__name__}")
        return len(self._loader)

    def __iter__(self) -> Iterator[object]:
        cut = self._cut()
        if cut is not None and self._own is None and isinstance(self._loader, DataLoader) and cut.cuts_samples:
            self._own = _loader_of_samples(self._loader, cut)
        if self._own is not None:
            for batch in self._own:
                yield map_leaves(batch, _marked)
            return
        for batch in self._loader:
            cut = cut or self._cut()  # planned by the batch before
            yield batch if cut is None else cut.batch(batch)

    def _cut(self) -> _Cut | None:
        """None before planning, and where there is one rank."""
        if isinstance(self._source, Plan):
            decisions = self._source.decisions
            names = [spec.name for spec in self._source.identity.inputs]
        else:
            session = find_session(self._source)
            if session is None:
                return None
            decisions, names = session.installed.decisions, list(session.installed.inputs)
        if decisions.mesh.num_ranks == 1:
            return None
        return _Cut({name: decisions.layouts[name] for name in names}, decisions.mesh, world().rank)


def _marked(_: KeyPath, leaf: object) -> object:
    return leaf.as_subclass(LocalPart) if isinstance(leaf, Tensor) and leaf.dim() else leaf


class _RankBatches:
    """A batch sampler: this rank's samples of each batch of another."""

    def __init__(self, batches: Iterable[Sequence[object]], cut: _Cut) -> None:
        self._batches = batches
        self._cut = cut

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[object]]:
        for number, indices in enumerate(self._batches):
            if number % CHECK_EVERY == 0:
                _require_same_samples(indices)
            yield self._cut.samples(indices)


def _require_same_samples(indices: Sequence[object]) -> None:
    rows = gather_numbers([zlib.crc32(repr(list(indices)).encode())])
    others = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if others:
        raise InputError(
            f"expected the same samples in a batch on every rank, found others on rank {others[0]} than on rank 0; "
            "give the loader's sampler a generator with the same seed on every rank (DataLoader(generator=...))"
        )


def _loader_of_samples(loader: DataLoader[object], cut: _Cut) -> DataLoader[object] | None:
    """The same loader for this rank's samples alone; None where it does not go by sample numbers."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return None
    return DataLoader(
        loader.dataset,
        batch_sampler=_RankBatches(loader.batch_sampler, cut),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
