"""The local call and its types: sizes among the arguments, and strides as torch computes them."""

import math
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ir import Arg, Mesh, Node, Partial, Ref, Replicate, Shard, Strided, TensorType, contiguous_strides
from shardwright.passes.localize import localize
from shardwright.passes.strides import dense_like, view_strides

MESH = Mesh(("dp", "tp"), (2, 2))
R = Replicate()


def f32(*shape: int) -> TensorType:
    return TensorType("f32", shape)


def call(op: str, *args: Arg, **kwargs: Arg) -> Node:
    return Node(op, args, tuple(kwargs.items()), ("y",))


def test_a_view_gets_its_local_shape() -> None:
    node, (made,) = localize(
        call("aten.view.default", Ref("x"), (32, 6)), (f32(4, 2, 6),), (f32(32, 6),), ((Shard(0), Strided(0, 8)),), MESH
    )
    assert (node.op, node.args, made) == ("aten.view.default", (Ref("x"), (8, 6)), f32(8, 6))


def test_a_view_that_only_the_whole_allows_becomes_a_copy() -> None:
    """Heads first in memory: [2, 3, 4] seen as [2, 12] crosses memory."""
    source = TensorType("f32", (2, 3, 4), (4, 8, 1))
    node, (made,) = localize(
        call("aten.view.default", Ref("x"), (4, 12)), (source,), (f32(4, 12),), ((Shard(0), R),), MESH
    )
    assert (node.op, node.args, made) == ("aten.reshape.default", (Ref("x"), (2, 12)), f32(2, 12))


def test_a_dim_that_is_one_only_locally_survives_a_squeeze() -> None:
    node, (made,) = localize(
        call("aten.squeeze.default", Ref("x")), (f32(1, 1, 4),), (f32(2, 4),), ((Shard(0), R),), MESH
    )
    assert (node.op, node.args, made) == ("aten.view.default", (Ref("x"), (1, 4)), f32(1, 4))


def test_factories_make_their_part() -> None:
    node, (made,) = localize(
        call("aten.full.default", (8, 4), 1.0, dtype=None), (), (f32(8, 4),), ((Shard(0), Shard(1)),), MESH
    )
    assert (node.args, node.kwargs, made) == (((4, 2), 1.0), (("dtype", None),), f32(4, 2))


def test_a_partial_product_adds_its_share_of_the_bias() -> None:
    node, _ = localize(
        call("aten.addmm.default", Ref("b"), Ref("x"), Ref("w"), beta=2),
        (f32(4), f32(8, 3), f32(3, 4)),
        (f32(8, 4),),
        ((Partial(), Partial()),),
        MESH,
    )
    assert dict(node.kwargs)["beta"] == 0.5


def test_a_whole_product_adds_its_bias_as_it_is() -> None:
    plain = call("aten.addmm.default", Ref("b"), Ref("x"), Ref("w"))
    assert localize(plain, (f32(4), f32(4, 6), f32(6, 4)), (f32(8, 4),), ((Shard(0), R),), MESH)[0] == plain


def test_group_norm_is_told_the_local_sizes() -> None:
    args = (Ref("x"), Ref("w"), Ref("b"), 8, 4, 36, 2, 1e-5)
    node, types = localize(
        call("aten.native_group_norm.default", *args),
        (f32(4, 4, 6, 6), f32(4), f32(4)),
        (f32(8, 4, 6, 6), f32(8, 2), f32(8, 2)),
        ((Shard(0), R),) * 3,
        MESH,
    )
    assert node.args[3:7] == (4, 4, 36, 2)
    assert [t.shape for t in types] == [(4, 4, 6, 6), (4, 2), (4, 2)]


def test_a_slice_along_a_whole_dim_keeps_its_bounds() -> None:
    node, (made,) = localize(
        call("aten.slice.Tensor", Ref("x"), 1, 2, 6), (f32(4, 8),), (TensorType("f32", (8, 4), (8, 1)),),
        ((Shard(0), R),), MESH,
    )  # fmt: skip
    assert (node.args[1:], made) == ((1, 2, 6), TensorType("f32", (4, 4), (8, 1)))


def test_an_expanded_result_takes_no_memory_along_new_dims() -> None:
    _, (made,) = localize(
        call("aten.expand.default", Ref("x"), (8, 4)),
        (f32(1, 4),),
        (TensorType("f32", (8, 4), (0, 1)),),
        ((Shard(0), R),),
        MESH,
    )
    assert made == TensorType("f32", (4, 4), (0, 1))


def test_what_came_row_major_from_a_redistribution_stays_so() -> None:
    transposed = TensorType("f32", (8, 4), (1, 8))
    _, (follows,) = localize(
        call("aten.relu.default", Ref("x")), (TensorType("f32", (4, 4), (1, 4)),), (transposed,), ((Shard(0), R),), MESH
    )
    _, (dense,) = localize(call("aten.relu.default", Ref("x")), (f32(4, 4),), (transposed,), ((Shard(0), R),), MESH)
    assert (follows, dense) == (TensorType("f32", (4, 4), (1, 4)), f32(4, 4))


VIEWS = [
    ("aten.t.default", (), (4, 6)),
    ("aten.transpose.int", (0, -1), (4, 6, 2)),
    ("aten.permute.default", ((2, 0, 1),), (4, 6, 2)),
    ("aten.unsqueeze.default", (1,), (4, 6)),
    ("aten.unsqueeze.default", (-1,), (4, 6)),
    ("aten.select.int", (1, 3), (4, 6)),
    ("aten.slice.Tensor", (1, 0, 6, 2), (4, 6)),
    ("aten.expand.default", ((3, 4, 6),), (4, 6)),
    ("aten.split.Tensor", (2, 1), (4, 6)),
]


@pytest.mark.parametrize(("op", "args", "shape"), VIEWS, ids=[f"{op}{args}" for op, args, _ in VIEWS])
@pytest.mark.parametrize("flipped", [False, True])
def test_strides_of_views_are_those_of_torch(
    op: str, args: tuple[Arg, ...], shape: tuple[int, ...], flipped: bool
) -> None:
    x = torch.empty(shape[::-1]).permute(*reversed(range(len(shape)))) if flipped else torch.empty(shape)
    _, packet, overload = op.split(".")
    found = getattr(getattr(torch.ops.aten, packet), overload)(x, *args)
    expected = [found] if isinstance(found, torch.Tensor) else list(found)
    types = tuple(TensorType.of("f32", tuple(y.shape), tuple(y.stride())) for y in expected)
    operand = TensorType.of("f32", shape, tuple(x.stride()))
    _, made = localize(call(op, Ref("x"), *args), (operand,), types, ((R, R),) * len(types), MESH)
    assert made == types


shapes = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(shapes, shapes, st.randoms(use_true_random=False))
def test_view_strides_agree_with_torch(before: list[int], after: list[int], random: Random) -> None:
    """For any order of dims in memory: the same strides, and a refusal exactly where torch refuses."""
    order = list(range(len(before)))
    random.shuffle(order)
    back = [order.index(dim) for dim in range(len(order))]
    x = torch.empty([before[dim] for dim in order]).permute(back)
    target = tuple(after) if math.prod(after) == math.prod(before) else (math.prod(before),)
    found = view_strides(TensorType.of("f32", tuple(before), tuple(x.stride())), target)
    try:
        expected = x.view(target)
    except RuntimeError:
        assert found is None
        return
    assert found is not None
    matter = [dim for dim, size in enumerate(target) if size > 1]
    assert [found[dim] for dim in matter] == [expected.stride(dim) for dim in matter]


@given(shapes, st.randoms(use_true_random=False))
def test_a_dense_part_lies_in_memory_like_the_whole(shape: list[int], random: Random) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    back = [order.index(dim) for dim in range(len(order))]
    strides = [contiguous_strides(tuple(2 * shape[dim] for dim in order))[i] for i in back]
    whole = TensorType.of("f32", tuple(2 * size for size in shape), tuple(strides))
    part = torch.empty([shape[dim] for dim in order]).permute(back)
    assert dense_like(whole, tuple(shape)) == TensorType.of("f32", tuple(shape), tuple(part.stride()))
