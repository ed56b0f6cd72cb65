"""Local mesh operators do what their definition by index says."""

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwright.runtime.kernels import merge, own, pack, stack, unpack


@st.composite
def wholes(draw: st.DrawFn) -> tuple[Tensor, int, int, int]:
    """A tensor, and how one dim of it is cut: (tensor, n, dim, outer)."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    n, outer, rest = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    shape[dim] = n * outer * rest
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    if draw(st.booleans()):
        whole = whole.transpose(0, -1).contiguous().transpose(0, -1)
    return whole, n, dim, outer


def part_by_index(whole: Tensor, index: int, n: int, dim: int, outer: int) -> Tensor:
    """Row by row: o * rest + r of the part is o * n * rest + index * rest + r of the whole."""
    rest = whole.shape[dim] // (n * outer)
    rows = [o * n * rest + index * rest + r for o, r in product(range(outer), range(rest))]
    return torch.stack([whole.select(dim, row) for row in rows], dim)


@settings(max_examples=60, deadline=None)
@given(wholes())
def test_own_is_the_part_that_the_indices_name(case: tuple[Tensor, int, int, int]) -> None:
    whole, n, dim, outer = case
    for index in range(n):
        found = own(whole, index, n, dim, outer)
        assert torch.equal(found, part_by_index(whole, index, n, dim, outer))
        assert found.is_contiguous() and found.data_ptr() != whole.data_ptr()


@settings(max_examples=60, deadline=None)
@given(wholes())
def test_stack_puts_the_parts_below_each_other_and_merge_undoes_it(case: tuple[Tensor, int, int, int]) -> None:
    whole, n, dim, outer = case
    stacked = stack(whole, n, dim, outer)
    assert torch.equal(stacked, torch.cat([part_by_index(whole, index, n, dim, outer) for index in range(n)]))
    merged = merge(stacked, n, dim, outer)
    assert torch.equal(merged, whole)
    assert (merged.data_ptr() == stacked.data_ptr()) == ((dim, outer) == (0, 1))
    assert (dim, outer) == (0, 1) or merged.is_contiguous()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5))
def test_unpack_gives_back_what_was_packed_as_views_of_the_buffer(shapes: list[list[int]]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    buffer = pack(tensors)
    found = unpack(buffer, shapes)
    assert buffer.shape == (sum(tensor.numel() for tensor in tensors),)
    assert all(torch.equal(a, b) for a, b in zip(tensors, found, strict=True))
    assert all(tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for tensor in found)
