"""Memory layout of results, by arithmetic: what torch's views and dense results do with strides, without torch.

All strides are in elements. A tensor is `(shape, strides)`; TensorType keeps None where strides are row-major.
"""

from collections.abc import Iterable, Sequence

from shardwright.ir import TensorType, contiguous_strides

__all__ = ["dense_like", "elementwise_strides", "strides_of", "view_strides"]


def strides_of(type_: TensorType) -> tuple[int, ...]:
    return contiguous_strides(type_.shape) if type_.strides is None else type_.strides


def dense_like(whole: TensorType, shape: tuple[int, ...]) -> TensorType:
    """A dense tensor of `shape` whose dims lie in memory in the order of `whole`'s; broadcast dims stay broadcast.

    >>> dense_like(TensorType("f32", (4, 6), (1, 4)), (2, 6)).strides
    (1, 2)
    >>> dense_like(TensorType("f32", (4, 6), (0, 1)), (2, 6)).strides
    (0, 1)
    """
    if whole.shape == shape:
        return whole
    if whole.strides is None:
        return TensorType(whole.dtype, shape)
    strides = [0] * len(shape)
    step = 1
    for dim in sorted(range(len(shape)), key=lambda d: (whole.strides[d] if whole.strides else 0, -d)):
        if whole.strides[dim] == 0 and whole.shape[dim] > 1:
            continue
        strides[dim] = step
        step *= max(shape[dim], 1)
    return TensorType.of(whole.dtype, shape, tuple(strides))


def elementwise_strides(operands: Sequence[TensorType], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an elementwise result of `shape`: dense, dims in the order of the operands', the first deciding.

    As torch's TensorIterator has it. An expanded dim decides nothing; where no operand does, dims keep their order.

    >>> elementwise_strides([TensorType("f32", (4, 6), (1, 4))], (4, 6))
    (1, 4)
    >>> elementwise_strides([TensorType("f32", (4, 6), (24, 2)), TensorType("f32", (6,))], (4, 6))
    (6, 1)
    """
    given = [_expanded_strides(operand, shape) for operand in operands]
    inner_first = list(reversed(range(len(shape))))
    for end in range(1, len(inner_first)):
        at = end
        for before in reversed(range(end)):
            order = _compare(inner_first[before], inner_first[at], given, shape)
            if order < 0:
                break
            if order > 0:
                inner_first[before], inner_first[at] = inner_first[at], inner_first[before]
                at = before
    return _packed(shape, inner_first)


def _expanded_strides(operand: TensorType, shape: tuple[int, ...]) -> tuple[int, ...]:
    fresh = len(shape) - len(operand.shape)
    pairs = zip(operand.shape, shape[fresh:], strides_of(operand), strict=True)
    return (0,) * fresh + tuple(0 if own == 1 and size != 1 else stride for own, size, stride in pairs)


def _compare(one: int, other: int, given: Iterable[tuple[int, ...]], shape: tuple[int, ...]) -> int:
    """Negative where dim `one` is inside of dim `other`, positive where outside, 0 where nothing tells."""
    for strides in given:
        if strides[one] == 0 or strides[other] == 0:
            continue
        if strides[one] != strides[other]:
            return strides[one] - strides[other]
        if shape[one] > shape[other]:
            return 1
    return 0


def _packed(shape: tuple[int, ...], inner_first: Iterable[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def view_strides(source: TensorType, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides of `source` seen as `shape`, or None where only a copy can be seen so.

    Dims of the source that lie in one run of memory form a block; a new dim may divide a block, never cross two.

    >>> view_strides(TensorType("f32", (4, 6)), (2, 2, 6))
    (12, 6, 1)
    >>> view_strides(TensorType("f32", (4, 6), (1, 4)), (24,)) is None
    True
    """
    if 0 in source.shape:
        return contiguous_strides(shape)
    blocks = _blocks(source)
    strides: list[int] = []
    position = len(shape) - 1
    for size, step in reversed(blocks):
        covered = 1
        while position >= 0 and (covered < size or shape[position] == 1):
            strides.append(step * covered)
            covered *= shape[position]
            position -= 1
        if covered != size:
            return None
    while position >= 0 and shape[position] == 1:
        strides.append(strides[-1] if strides else 1)
        position -= 1
    return tuple(reversed(strides)) if position < 0 else None


def _blocks(source: TensorType) -> list[tuple[int, int]]:
    """(size, stride of the innermost element) of each run of dims that could be one dim."""
    blocks: list[tuple[int, int]] = []
    for size, stride in zip(source.shape, strides_of(source), strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == size * stride:
            blocks[-1] = (blocks[-1][0] * size, stride)
        else:
            blocks.append((size, stride))
    return blocks
