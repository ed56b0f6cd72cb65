"""Cutting and joining follow the definition of layouts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ir import GraphError, Layout, Mesh, Partial, Replicate, Shard, Strided, divides, local_shape
from shardwright.runtime.shards import shard, unshard

PLACEMENTS = (Replicate(), Shard(0), Shard(1), Strided(0, 2), Strided(0, 4), Strided(1, 6), Partial("sum"))
MESH = Mesh(("dp", "tp"), (2, 3))


@settings(max_examples=60, deadline=None)
@given(st.tuples(st.sampled_from(PLACEMENTS), st.sampled_from(PLACEMENTS)))
def test_what_is_cut_joins_to_the_same_tensor(layout: Layout) -> None:
    whole = torch.arange(24 * 36, dtype=torch.float64).view(24, 36)
    if not divides((24, 36), layout, MESH):
        return
    parts = [shard(whole, layout, MESH, rank) for rank in range(6)]
    assert all(tuple(part.shape) == local_shape((24, 36), layout, MESH) for part in parts)
    assert torch.equal(unshard(parts, layout, MESH), whole)


def test_axes_cut_from_left_to_right() -> None:
    parts = [shard(torch.arange(12), (Shard(0), Shard(0)), MESH, rank).tolist() for rank in range(6)]
    assert parts == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize(
    ("split", "flat"),
    [
        ((Shard(0), Shard(1)), (Shard(0), Strided(0, 4))),
        ((Shard(1), Replicate()), (Strided(0, 4), Replicate())),
        ((Replicate(), Shard(1)), (Replicate(), Strided(0, 4))),
    ],
)
def test_a_strided_split_is_a_split_of_dim_1_after_flattening(split: Layout, flat: Layout) -> None:
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    for rank in range(6):
        flattened = shard(whole, split, MESH, rank).flatten(0, 1)
        assert torch.equal(shard(whole.flatten(0, 1), flat, MESH, rank), flattened)


def test_a_strided_split_before_a_plain_one_leaves_the_plain_one_the_outer_part() -> None:
    mesh = Mesh(("tp", "dp"), (3, 2))
    whole = torch.arange(4 * 6).view(4, 6)
    for rank in range(6):
        part = shard(whole, (Shard(1), Shard(0)), mesh, rank).flatten()
        assert torch.equal(shard(whole.flatten(), (Strided(0, 4), Shard(0)), mesh, rank), part)


@pytest.mark.parametrize(("reduce", "expected"), [("sum", 6.0), ("avg", 2.0), ("max", 3.0), ("min", 1.0)])
def test_terms_are_reduced(reduce: str, expected: float) -> None:
    mesh = Mesh(("dp",), (3,))
    terms = [torch.tensor([value]) for value in (1.0, 3.0, 2.0)]
    assert unshard(terms, (Partial(reduce),), mesh).item() == expected
    whole = torch.tensor([5.0])
    assert unshard([shard(whole, (Partial(reduce),), mesh, rank) for rank in range(3)], (Partial(reduce),), mesh) == 5.0


def test_an_uneven_split_is_refused_with_the_shape_found() -> None:
    with pytest.raises(GraphError, match=r"splits evenly over \(dp=2, tp=3\), found \[7\].*axis dp"):
        shard(torch.arange(7), (Shard(0), Replicate()), MESH, 0)
