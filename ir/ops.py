"""What operators are, by overload name: view, random, effect; where a shape stands among the arguments.

Operators of ours, all with the axis by name so that one text serves every rank:

| operator | does |
| --- | --- |
| `mesh.all_gather(x, axis)` | starts; result stacks the ranks' parts on dim 0 |
| `mesh.reduce_scatter(x, axis, reduce)` | starts; x stacks the parts on dim 0, each rank gets the reduced part |
| `mesh.all_reduce(x, axis, reduce)` | starts; a fresh tensor of x's type |
| `mesh.all_reduce_(x, axis, reduce)` | the same in place: the result is x's storage |
| `mesh.all_to_all(x, axis)` | starts; dim 0 of x stacks what goes to each rank, the result what came |
| `mesh.wait(h, x)` | the finished result of a start; shares h's storage; x, what was sent, lives until here |
| `mesh.own(x, axis, dim, outer)` | this rank's part of a whole dim, as a fresh dense tensor |
| `mesh.merge(x, n, dim, outer)` | n parts stacked on dim 0 to one whole along `dim`; a view for (0, 1) |
| `mesh.stack(x, n, dim, outer)` | inverse of merge |
| `mesh.coordinate(axis)` | this rank's index on the axis, an i64 scalar |
| `mesh.pack(x...)` | one flat buffer with all of them, in order |
| `mesh.unpack(buffer, shapes)` | its inverse; results are views of the buffer |
| `tier.offload(x, tier)` | starts a copy of x to `host` or `disk`; the result is the copy and lives there |
| `tier.reload(h)` | starts the copy back, or that of a parameter on the host; the result is a device tensor |
| `tier.wait(h, x)` | the finished copy; shares h's storage; x, what was copied, lives until here |
| `tier.step(g, p, name)` | starts the optimizer's step of parameter p, whose state is on the host, with gradient g |
| `tier.sent(s, g)` | the same step once g has been copied to the host; g lives until here |
| `tier.stepped(p, s)` | the parameter, once it has its new value; shares p's storage |
"""

from typing import Final

from shardwright.ir.graph import Node

__all__ = [
    "COLLECTIVES",
    "COPY_OPS",
    "ELEMENTWISE_OPS",
    "RANDOM_OPS",
    "SHAPE_ARGUMENT",
    "VIEW_OPS",
    "aliased_operand",
    "is_async_start",
    "is_collective",
    "is_random",
    "is_view",
]

VIEW_OPS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "t.default", "transpose.int", "permute.default",
        "expand.default", "unsqueeze.default", "squeeze.default", "squeeze.dim", "squeeze.dims",
        "slice.Tensor", "select.int", "split.Tensor", "split_with_sizes.default", "chunk.default",
        "unbind.int", "detach.default", "alias.default", "as_strided.default", "narrow.default",
        "diagonal.default", "view.dtype", "unfold.default", "lift_fresh.default",
    )
) | {"mesh.wait", "mesh.unpack", "mesh.all_reduce_", "tier.wait", "tier.sent", "tier.stepped"}  # fmt: skip
"""Results share the storage of the first operand."""

RANDOM_OPS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "native_dropout.default", "bernoulli.p", "bernoulli.default", "rand.default", "rand_like.default",
        "randn.default", "randn_like.default", "randint.low", "randperm.default", "normal_functional.default",
        "multinomial.default", "rrelu_with_noise.default", "exponential.default", "uniform.default",
    )
)  # fmt: skip
"""Results depend on a generator."""

COPY_OPS: Final = frozenset({"aten.clone.default", "aten.contiguous.default", "aten._to_copy.default"})
"""Their result is the operand elsewhere: they move data and compute nothing."""

ELEMENTWISE_OPS: Final = frozenset(
    f"aten.{name}"
    for name in (
        "abs.default", "add.Tensor", "add.Scalar", "bitwise_and.Tensor", "bitwise_not.default", "bitwise_or.Tensor",
        "clamp.default", "clamp_max.default", "clamp_min.default", "cos.default", "div.Scalar", "div.Tensor",
        "elu.default", "eq.Scalar", "eq.Tensor", "erf.default", "exp.default", "expm1.default", "floor.default",
        "ge.Scalar", "ge.Tensor", "gelu.default", "gelu_backward.default", "gt.Scalar", "gt.Tensor",
        "hardtanh.default", "isinf.default", "isnan.default", "le.Scalar", "le.Tensor", "leaky_relu.default",
        "log.default", "log1p.default", "logical_and.default", "logical_not.default", "logical_or.default",
        "lt.Scalar", "lt.Tensor", "maximum.default", "minimum.default", "mul.Scalar", "mul.Tensor", "ne.Scalar",
        "ne.Tensor", "neg.default", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal.default", "relu.default",
        "round.default", "rsqrt.default", "rsub.Scalar", "sigmoid.default", "sigmoid_backward.default",
        "sign.default", "silu.default", "silu_backward.default", "sin.default", "softplus.default", "sqrt.default",
        "sub.Scalar", "sub.Tensor", "tanh.default", "tanh_backward.default", "threshold_backward.default",
        "where.self",
    )
)  # fmt: skip
"""Each element of the result is one of each operand, broadcast: torch orders the result's dims in memory as the
operands' are."""

SHAPE_ARGUMENT: Final[dict[str, int]] = {
    "aten.view.default": 1, "aten._unsafe_view.default": 1, "aten.reshape.default": 1, "aten.expand.default": 1,
    "aten.zeros.default": 0, "aten.ones.default": 0, "aten.empty.memory_format": 0, "aten.full.default": 0,
    "aten.new_zeros.default": 1, "aten.new_ones.default": 1, "aten.new_full.default": 1,
    "aten.new_empty.default": 1, "aten.select_backward.default": 1, "aten.slice_backward.default": 1,
    "aten.view_copy.default": 1, "aten.new_empty_strided.default": 1, "aten.empty_strided.default": 0,
}  # fmt: skip
"""Position of the argument that equals the shape of the (only) result: localised from the result's type."""

COLLECTIVES: Final = frozenset(
    {"mesh.all_gather", "mesh.reduce_scatter", "mesh.all_reduce", "mesh.all_reduce_", "mesh.all_to_all"}
)


def is_view(op: str) -> bool:
    return op in VIEW_OPS


def is_random(op: str) -> bool:
    return op in RANDOM_OPS


def is_collective(op: str) -> bool:
    return op in COLLECTIVES


def is_async_start(op: str) -> bool:
    """Whether the result is only there after a wait."""
    return op in COLLECTIVES or op in ("tier.offload", "tier.reload")


def aliased_operand(node: Node) -> str | None:
    """The operand whose storage all results of `node` share, or None where storage is new."""
    if node.op == "mesh.merge" and node.args[2:] == (0, 1):
        return node.operands[0]
    return node.operands[0] if node.op in VIEW_OPS else None
