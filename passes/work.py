"""What an operator call has to do: floating-point operations and bytes moved. No device, no seconds.

Needs a node and the types of its operands and results (local or global alike). Gives `Work`: for the matmul family its
equivalent matrix products and their operations, for attention the operations alone, for everything else bytes only.
Bytes are read + written once, as a kernel that fuses its own passes does; a view moves nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardwright.ir import DTYPE_BYTES, Arg, Node, TensorType
from shardwright.ir.ops import aliased_operand, is_async_start

__all__ = ["Products", "Work", "numbered", "work_of"]

Types = tuple[TensorType, ...]


@dataclass(frozen=True, slots=True)
class Products:
    """`batch` independent matrix products [m, k] x [k, n]."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of one call, before any device."""

    flops: int
    """Multiplications and additions of matrix units; 0 for operators bound by memory."""
    num_bytes: int
    """Read plus written; expanded dims count once."""
    dtype: str
    """Of the first operand (or result): which peak rate applies."""
    products: tuple[Products, ...] = ()
    """The matrix products the flops come from; empty for attention, whose kernel tiles by itself."""


def numbered(node: Node) -> Node:
    """The call with its operands named 0, 1, ... by first use: equal calls on other values become equal.

    >>> from shardwright.ir import Ref
    >>> numbered(Node("aten.mul.Tensor", (Ref("x"), Ref("x")), (), ("y",))).operands
    ('0', '0')
    """
    ordinals = {name: str(number) for number, name in enumerate(dict.fromkeys(node.operands))}
    return node.with_operands(tuple(ordinals[name] for name in node.operands))


NO_WORK: Final = Work(0, 0, "f32")


def work_of(node: Node, operands: Types, results: Types) -> Work:
    """Work of one call; `operands` in the order of `Node.operands`, repeated when read twice."""
    if aliased_operand(node) is not None or is_async_start(node.op) or not results:
        return NO_WORK
    dtype = (operands or results)[0].dtype
    moved = _bytes_moved(node, operands, results)
    if node.op in _ATTENTION:
        return Work(_attention_flops(node, operands), moved, dtype)
    products = _PRODUCTS[node.op](node, operands, results) if node.op in _PRODUCTS else ()
    return Work(sum(p.flops for p in products), moved, dtype, products)


# Reading part of the first operand: the rows an index names, not the table.
_LOOKUPS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "embedding.default", "index_select.default", "gather.default", "index.Tensor", "_unsafe_index.Tensor",
        "nll_loss_forward.default", "take.default",
    )
) | {"mesh.own"}  # fmt: skip


def _bytes_moved(node: Node, operands: Types, results: Types) -> int:
    reads = {name: _touched_bytes(kind) for name, kind in zip(node.operands, operands, strict=True)}
    if node.op in _LOOKUPS:
        table = node.operands[0]
        reads[table] = min(reads[table], max(_touched_bytes(kind) for kind in results))
    return sum(reads.values()) + sum(_touched_bytes(kind) for kind in results)


def _touched_bytes(kind: TensorType) -> int:
    """Bytes of the distinct elements: a dim of stride 0 (expanded) is one element deep."""
    if kind.strides is None:
        return kind.num_bytes
    sizes = (size for size, stride in zip(kind.shape, kind.strides, strict=True) if stride or not size)
    return math.prod(sizes) * DTYPE_BYTES[kind.dtype]


def _matmul(first: int, node: Node, operands: Types, results: Types) -> tuple[Products, ...]:
    """mm, bmm and relatives: operands `first` and `first + 1` are [..., m, k] and [..., k, n]."""
    left, out = operands[first].shape, results[0].shape
    return (Products(math.prod(out[:-2]), out[-2], out[-1], left[-1]),)


def _linear(node: Node, operands: Types, results: Types) -> tuple[Products, ...]:
    data, weight = operands[0].shape, operands[1].shape
    return (Products(1, math.prod(data[:-1]), weight[0], weight[-1]),)


def _grouped(node: Node, operands: Types, results: Types) -> tuple[Products, ...]:
    """`_grouped_mm`: the groups share one operand's rows ([t, k] x [g, k, n]), columns, or the contracted dim."""
    left, right = operands[0].shape, operands[1].shape
    if len(left) == 2 and len(right) == 3:
        return (Products(right[0], -(-left[0] // right[0]), right[2], right[1]),)
    if len(left) == 3 and len(right) == 2:
        return (Products(left[0], left[1], -(-right[1] // left[0]), left[2]),)
    if len(left) == 2:
        groups = results[0].shape[0]
        return (Products(groups, left[0], right[1], -(-left[1] // groups)),)
    return (Products(left[0], left[1], right[2], left[2]),)


def _convolution(node: Node, operands: Types, results: Types) -> tuple[Products, ...]:
    """convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    groups = _integer(_argument(node, 8, "groups"), 1)
    transposed = _argument(node, 6, "transposed") is True
    return (_convolution_product(operands[0], operands[1], results[0], groups, transposed),)


def _convolution_backward(node: Node, operands: Types, results: Types) -> tuple[Products, ...]:
    """(grad, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask)."""
    groups = _integer(_argument(node, 9, "groups"), 1)
    transposed = _argument(node, 7, "transposed") is True
    forward = _convolution_product(operands[1], operands[2], operands[0], groups, transposed)
    mask = _argument(node, 10, "output_mask")
    wanted = mask[:2] if isinstance(mask, tuple) else (True, True)
    to_input = Products(forward.batch, forward.m, forward.k, forward.n)
    to_weight = Products(forward.batch, forward.n, forward.k, forward.m)
    return tuple(product for product, want in zip((to_input, to_weight), wanted, strict=True) if want)


def _convolution_product(data: TensorType, weight: TensorType, out: TensorType, groups: int, flipped: bool) -> Products:
    """As a matrix product over unfolded patches; a transposed convolution has input and output swapped."""
    small = data if flipped else out
    positions = small.shape[0] * math.prod(small.shape[2:])
    return Products(groups, positions, weight.shape[0] // groups, math.prod(weight.shape[1:]))


def _argument(node: Node, position: int, name: str) -> Arg:
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(name)


def _integer(arg: Arg, default: int) -> int:
    return arg if isinstance(arg, int) else default


_PRODUCTS: Final[dict[str, Callable[[Node, Types, Types], tuple[Products, ...]]]] = {
    "aten.mm.default": lambda *call: _matmul(0, *call),
    "aten.bmm.default": lambda *call: _matmul(0, *call),
    "aten.matmul.default": lambda *call: _matmul(0, *call),
    "aten._scaled_mm.default": lambda *call: _matmul(0, *call),
    "aten.addmm.default": lambda *call: _matmul(1, *call),
    "aten.baddbmm.default": lambda *call: _matmul(1, *call),
    "aten.linear.default": _linear,
    "aten._grouped_mm.default": _grouped,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
}


@dataclass(frozen=True, slots=True)
class _Attention:
    """Where an attention operator keeps its query (key and value follow) and its causal flag."""

    query: int
    causal: int
    backward: bool


_ATTENTION: Final[dict[str, _Attention]] = {
    "aten.scaled_dot_product_attention.default": _Attention(0, 5, False),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _Attention(0, 4, False),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _Attention(1, 7, True),
    "aten._scaled_dot_product_flash_attention.default": _Attention(0, 4, False),
    "aten._scaled_dot_product_flash_attention_backward.default": _Attention(1, 11, True),
    "aten._scaled_dot_product_efficient_attention.default": _Attention(0, 6, False),
    "aten._scaled_dot_product_efficient_attention_backward.default": _Attention(1, 11, True),
    "aten._scaled_dot_product_cudnn_attention.default": _Attention(0, 6, False),
    "aten._scaled_dot_product_cudnn_attention_backward.default": _Attention(1, 14, True),
}


def _attention_flops(node: Node, operands: Types) -> int:
    """Of [batch, heads, length, size] operands. A causal mask (aligned top left) skips the upper triangle."""
    shape = _ATTENTION[node.op]
    query, key, value = (operands[shape.query + i].shape for i in range(3))
    num_queries, num_keys = query[-2], key[-2]
    pairs = num_queries * num_keys
    if _argument(node, shape.causal, "is_causal") is True:
        pairs = sum(min(position + 1, num_keys) for position in range(num_queries))
    # Forward: scores and their product with the values. Backward: scores again, dV, dP, dQ and dK.
    depth = 3 * query[-1] + 2 * value[-1] if shape.backward else query[-1] + value[-1]
    return 2 * math.prod(query[:-2]) * pairs * depth
