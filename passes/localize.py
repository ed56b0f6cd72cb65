"""One captured operator on the local parts of its tensors: arguments that hold sizes, and the types that come out.

Needs the node (on local operands), the operands' local types, the results' whole types and layouts. Gives the node
to run on every rank, the same text for all of them, and the local types of its results: shapes by even splits,
strides by view arithmetic for views, and in the order of the whole result otherwise.

An operator whose local form is several operators has no place here yet: `localize` would return a tuple of nodes.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from shardwright.ir import Arg, Layout, Mesh, Node, Partial, TensorType, local_shape
from shardwright.ir.ops import ELEMENTWISE_OPS, SHAPE_ARGUMENT
from shardwright.passes.strides import dense_like, elementwise_strides, strides_of, view_strides

__all__ = ["localize"]

_Rewrite = Callable[[Node, tuple[TensorType, ...], tuple[TensorType, ...]], Node]
"""Of a node, its operands' local types and its results' local types."""

_SIZES: Final[Mapping[str, int]] = {
    **SHAPE_ARGUMENT,
    "aten.rand.default": 0, "aten.randn.default": 0, "aten.randint.low": 2, "aten.randint.default": 1,
    "aten.unfold_backward.default": 1, "aten.diagonal_backward.default": 1, "aten._reshape_alias.default": 1,
    "aten.upsample_nearest1d_backward.default": 2, "aten.upsample_nearest2d_backward.default": 2,
    "aten._upsample_nearest_exact2d_backward.default": 2, "aten.upsample_linear1d_backward.default": 2,
    "aten.upsample_bilinear2d_backward.default": 2, "aten.upsample_bicubic2d_backward.default": 2,
    "aten._upsample_bilinear2d_aa_backward.default": 2, "aten._upsample_bicubic2d_aa_backward.default": 2,
    "aten.upsample_nearest3d_backward.default": 2, "aten.upsample_trilinear3d_backward.default": 2,
}  # fmt: skip
"""Position of the argument that equals the shape of the result."""

_STRIDES: Final[Mapping[str, int]] = {
    "aten.new_empty_strided.default": 2, "aten.empty_strided.default": 1, "aten._reshape_alias.default": 2,
}  # fmt: skip
"""Position of the argument that equals the strides of the result."""

_FIRST_LIKE_FIRST: Final = frozenset(("aten._scaled_dot_product_flash_attention_for_cpu.default",))
"""The first of several results is laid out as the first operand."""

_ROW_MAJOR: Final = frozenset(("aten.native_layer_norm_backward.default",))
"""Row-major whatever the operands are; torch's shape functions have it otherwise."""
_CONVOLUTIONS: Final = frozenset(("aten.convolution.default", "aten.convolution_backward.default"))
"""Channels last where an operand is; row-major else."""

_BIASED: Final = frozenset(("aten.addmm.default", "aten.baddbmm.default"))
_FLATTENING: Final = frozenset(f"aten.{name}.default" for name in ("view", "_unsafe_view", "reshape", "_reshape_alias"))
_SQUEEZES: Final = frozenset(("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"))


def localize(
    node: Node,
    operands: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    layouts: tuple[Layout, ...],
    mesh: Mesh,
) -> tuple[Node, tuple[TensorType, ...]]:
    """The local call and its results' local types. `operands` are local, `results` whole."""
    shapes = tuple(local_shape(t.shape, layout, mesh) for t, layout in zip(results, layouts, strict=True))
    plain = tuple(dense_like(t, shape) for t, shape in zip(results, shapes, strict=True))
    if node.op in _SIZES and plain:
        node = _with_arg(node, _SIZES[node.op], plain[0].shape)
    if node.op in _STRIDES:
        node = _with_arg(node, _STRIDES[node.op], strides_of(plain[0]))
    if node.op in _BIASED:
        node = _share_of_bias(node, layouts[0], mesh)
    if node.op in _REWRITES:
        node = _REWRITES[node.op](node, operands, plain)
    if node.op in _SQUEEZES:
        # A dim that is only locally of size 1 must stay.
        node = replace(node, op="aten.view.default", args=(node.args[0], plain[0].shape))
    if node.op in _FLATTENING:
        return _flattened(node, operands[0], plain[0])
    if node.op in _VIEWS:
        return node, tuple(_VIEWS[node.op](node, operands[0], t) for t in plain)
    return node, _following(node, operands, plain)


def _share_of_bias(node: Node, layout: Layout, mesh: Mesh) -> Node:
    """Where the result is a sum over ranks, each adds its share of the bias, which all of them read whole."""
    num_terms = math.prod(n for p, n in zip(layout, mesh.sizes, strict=True) if isinstance(p, Partial))
    if num_terms == 1:
        return node
    given = dict(node.kwargs)
    beta = given.pop("beta", 1)
    share = beta / num_terms if isinstance(beta, int | float) else beta
    return replace(node, kwargs=(("beta", share), *given.items()))


def _with_arg(node: Node, position: int, value: Arg) -> Node:
    if position >= len(node.args):
        return node
    return replace(node, args=(*node.args[:position], value, *node.args[position + 1 :]))


def _flattened(node: Node, source: TensorType, result: TensorType) -> tuple[Node, tuple[TensorType, ...]]:
    """A view where the part's memory allows it, a copy where only the whole's does."""
    strides = view_strides(source, result.shape)
    if strides is None:
        copy = replace(node, op="aten.reshape.default", args=(node.args[0], result.shape), kwargs=())
        return copy, (TensorType(result.dtype, result.shape),)
    return node, (TensorType.of(result.dtype, result.shape, strides),)


def _following(node: Node, operands: tuple[TensorType, ...], plain: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Fresh results, dense. Where their dims lie in memory, an operand says: it may come row-major from a
    redistribution where the whole one was not, so what the whole result looks like is not enough."""
    if node.op in ELEMENTWISE_OPS and operands:
        strides = elementwise_strides(operands, plain[0].shape)
        return (TensorType.of(plain[0].dtype, plain[0].shape, strides),)
    if node.op in _FIRST_LIKE_FIRST:
        strides = elementwise_strides(operands[:1], plain[0].shape)
        return (TensorType.of(plain[0].dtype, plain[0].shape, strides), *plain[1:])
    if node.op in _ROW_MAJOR or (node.op in _CONVOLUTIONS and all(t.strides is None for t in operands)):
        return tuple(TensorType(t.dtype, t.shape) for t in plain)
    alike = [t for t in operands if plain and t.shape == plain[0].shape]
    if len(plain) != 1 or plain[0].strides is None or not alike or 0 in plain[0].strides:
        return plain
    row_major = all(t.strides is None for t in alike)
    return (TensorType(plain[0].dtype, plain[0].shape),) if row_major else plain


def _dim(value: Arg, rank: int) -> int:
    return value % rank if isinstance(value, int) and rank else 0


def _arg(node: Node, position: int, default: Arg = None) -> Arg:
    return node.args[position] if position < len(node.args) else default


def _transposed(node: Node, source: TensorType, result: TensorType) -> TensorType:
    rank = len(source.shape)
    if node.op == "aten.t.default":
        one, other = 0, rank - 1
    else:
        one, other = _dim(_arg(node, 1), rank), _dim(_arg(node, 2), rank)
    order = list(range(rank))
    order[one], order[other] = order[other], order[one]
    return _reordered(source, order, result)


def _permuted(node: Node, source: TensorType, result: TensorType) -> TensorType:
    order = _arg(node, 1)
    dims = order if isinstance(order, tuple) else ()
    return _reordered(source, [_dim(d, len(source.shape)) for d in dims], result)


def _reordered(source: TensorType, order: list[int], result: TensorType) -> TensorType:
    strides = strides_of(source)
    return TensorType.of(result.dtype, result.shape, tuple(strides[dim] for dim in order))


def _expanded(node: Node, source: TensorType, result: TensorType) -> TensorType:
    """New and grown dims have stride 0."""
    fresh = len(result.shape) - len(source.shape)
    strides = [0] * fresh + [
        0 if before == 1 and after != 1 else stride
        for before, after, stride in zip(source.shape, result.shape[fresh:], strides_of(source), strict=True)
    ]
    return TensorType.of(result.dtype, result.shape, tuple(strides))


def _unsqueezed(node: Node, source: TensorType, result: TensorType) -> TensorType:
    strides = list(strides_of(source))
    dim = _dim(_arg(node, 1), len(source.shape) + 1)
    strides.insert(dim, source.shape[dim] * strides[dim] if dim < len(strides) else 1)
    return TensorType.of(result.dtype, result.shape, tuple(strides))


def _selected(node: Node, source: TensorType, result: TensorType) -> TensorType:
    dim = _dim(_arg(node, 1, 0), len(source.shape))
    strides = strides_of(source)
    return TensorType.of(result.dtype, result.shape, strides[:dim] + strides[dim + 1 :])


def _sliced(node: Node, source: TensorType, result: TensorType) -> TensorType:
    dim, step = _dim(_arg(node, 1, 0), len(source.shape)), _arg(node, 4, 1)
    strides = list(strides_of(source))
    strides[dim] *= step if isinstance(step, int) else 1
    return TensorType.of(result.dtype, result.shape, tuple(strides))


def _same_strides(node: Node, source: TensorType, result: TensorType) -> TensorType:
    return TensorType.of(result.dtype, result.shape, strides_of(source))


_VIEWS: Final[Mapping[str, Callable[[Node, TensorType, TensorType], TensorType]]] = {
    "aten.t.default": _transposed,
    "aten.transpose.int": _transposed,
    "aten.permute.default": _permuted,
    "aten.expand.default": _expanded,
    "aten.unsqueeze.default": _unsqueezed,
    "aten.select.int": _selected,
    "aten.unbind.int": _selected,
    "aten.slice.Tensor": _sliced,
    "aten.split.Tensor": _same_strides,
    "aten.split_with_sizes.default": _same_strides,
    "aten.chunk.default": _same_strides,
    "aten.narrow.default": _same_strides,
    "aten.detach.default": _same_strides,
    "aten.alias.default": _same_strides,
}
"""Strides of a view's result from those of its source."""


def _clipped(node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> Node:
    """A slice ends where the local dim ends."""
    end = _arg(node, 3)
    size = operands[0].shape[_dim(_arg(node, 1, 0), len(operands[0].shape))]
    return _with_arg(node, 3, size) if isinstance(end, int) and end > size else node


def _group_norm(first: int, image: int) -> _Rewrite:
    """Samples, channels, positions and groups of the local image; groups are cut with the channels."""

    def rewrite(node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> Node:
        num_samples, num_channels, *rest = operands[image].shape
        channels, groups = node.args[first + 1], node.args[first + 3]
        if not isinstance(channels, int) or not isinstance(groups, int):
            return node
        sizes = (num_samples, num_channels, math.prod(rest), groups * num_channels // channels)
        return replace(node, args=(*node.args[:first], *sizes, *node.args[first + 4 :]))

    return rewrite


def _bias_sizes(node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> Node:
    """The bias has as many elements as the local output has channels."""
    return node if node.args[3] is None else _with_arg(node, 3, (operands[0].shape[1],))


def _num_embeddings(node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> Node:
    return _with_arg(node, 2, results[0].shape[0])


_REWRITES: Final[Mapping[str, _Rewrite]] = {
    "aten.slice.Tensor": _clipped,
    "aten.native_group_norm.default": _group_norm(3, 0),
    "aten.native_group_norm_backward.default": _group_norm(5, 1),
    "aten.convolution_backward.default": _bias_sizes,
    "aten.embedding_dense_backward.default": _num_embeddings,
}
"""Arguments that depend on sizes and are not the result's shape."""
