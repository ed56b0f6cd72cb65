"""Where a tensor lives on a mesh: one placement per axis, printed as DTensor prints them.

A layout is a tuple of placements, one per mesh axis, in mesh order. Axes are applied from left to right:
`(S(0), S(0))` splits dim 0 over the first axis, then each part over the second.
"""

import math
import re
from dataclasses import dataclass

from shardwright.ir.errors import TextError

__all__ = [
    "Layout",
    "Mesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "Strided",
    "divides",
    "format_layout",
    "local_shape",
    "parse_layout",
    "parse_placement",
    "replicated",
]


@dataclass(frozen=True, slots=True, order=True)
class Replicate:
    """Every rank of the axis holds the whole."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """The dim is cut into equal consecutive parts, one per rank of the axis."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, order=True)
class Strided:
    """The dim is seen as [outer, rest] and `rest` is cut: what `S(1)` of [outer, rest] is after flattening."""

    dim: int
    outer: int
    """Size of the leading part at global shape."""

    def __str__(self) -> str:
        return f"T({self.dim}, {self.outer})"


@dataclass(frozen=True, slots=True, order=True)
class Partial:
    """Every rank holds a term; the value is their reduction."""

    reduce: str = "sum"
    """sum, avg, max or min. `avg` is never merged with `sum`."""

    def __str__(self) -> str:
        return f"P({self.reduce})"


Placement = Replicate | Shard | Strided | Partial
Layout = tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes, outermost (slowest link) first.

    >>> str(Mesh(("dp", "tp"), (2, 4)))
    '(dp=2, tp=4)'
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        return self.sizes[self.axes.index(axis)]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Row-major coordinate of a rank, as `init_device_mesh` numbers them."""
        result: list[int] = []
        for size in reversed(self.sizes):
            result.append(rank % size)
            rank //= size
        return tuple(reversed(result))

    def __str__(self) -> str:
        return f"({', '.join(f'{a}={n}' for a, n in zip(self.axes, self.sizes, strict=True))})"


def replicated(mesh: Mesh) -> Layout:
    return (Replicate(),) * len(mesh.sizes)


def divides(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether every split of `layout` cuts `shape` into equal parts, and what is cut strided is seen in one way."""
    cut = [(p, size) for p, size in zip(layout, mesh.sizes, strict=True) if isinstance(p, Shard | Strided)]
    return all(dim < len(shape) and _dim_divides(shape[dim], dim, cut) for dim in {p.dim for p, _ in cut})


def _dim_divides(size: int, dim: int, cut: "list[tuple[Shard | Strided, int]]") -> bool:
    plain = math.prod(n for p, n in cut if p == Shard(dim))
    outers = {p.outer for p, _ in cut if isinstance(p, Strided) and p.dim == dim}
    if not outers:
        return size > 0 and size % plain == 0
    if len(outers) > 1:
        return False
    (outer,) = outers
    strided = math.prod(n for p, n in cut if p == Strided(dim, outer))
    return size > 0 and size % outer == 0 and outer % plain == 0 and (size // outer) % strided == 0


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape one rank holds; the same on all ranks, since only even splits are planned.

    >>> local_shape((8, 6), (Shard(0), Shard(1)), Mesh(("dp", "tp"), (2, 3)))
    (4, 2)
    """
    local = list(shape)
    for placement, size in zip(layout, mesh.sizes, strict=True):
        if isinstance(placement, Shard | Strided):
            local[placement.dim] //= size
    return tuple(local)


_PATTERN = re.compile(r"R|S\((\d+)\)|T\((\d+),\s*(\d+)\)|P\((sum|avg|max|min)\)")


def parse_placement(text: str) -> Placement:
    """Inverse of `str`. Raises TextError."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise TextError(f"expected a placement R, S(dim), T(dim, outer) or P(sum|avg|max|min), found {text!r}")
    shard, strided, outer, reduce = match.groups()
    if shard is not None:
        return Shard(int(shard))
    if strided is not None:
        return Strided(int(strided), int(outer))
    return Partial(reduce) if reduce is not None else Replicate()


def parse_layout(text: str) -> Layout:
    """`"S(0), R"` to a layout.

    >>> format_layout(parse_layout("S(0), T(0, 8)"))
    'S(0), T(0, 8)'
    """
    return tuple(parse_placement(part) for part in re.split(r",\s*(?![^()]*\))", text.strip()) if part)


def format_layout(layout: Layout) -> str:
    return ", ".join(map(str, layout))
