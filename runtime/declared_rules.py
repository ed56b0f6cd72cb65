"""Sharding rules declared by us, for operators that DTensor has no rule for or a wrong one. Data, one reason a rule.

A rule reads like an einsum: one term per tensor argument of the operator's schema (left-out ones are skipped), a
letter per dim, and the letters that may be split. A split letter is `S` wherever it stands and `R` elsewhere. A
result written with `+` is a sum over the split letter where that letter is not among its dims. `*` stands for any
number of dims, aligned from the right, each of which may be split when `*` is among the splits. A tensor with fewer
dims than its term has the last ones, and a dim of size 1 is broadcast: whole on every rank.

Needs an `OpCall`, gives raw candidates: splits may be uneven; `runtime.rules` filters and adds the all-whole one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shardwright.ir import Partial, Placement, Replicate, Shard, TensorType
from shardwright.ir.ops import RANDOM_OPS
from shardwright.passes.strategies import Strategy
from shardwright.runtime.op_call import OpCall

__all__ = ["ADDED", "REPLACED", "Splits", "added", "amended", "declared"]


@dataclass(frozen=True, slots=True)
class Splits:
    """Which letters of an operator's dims may be split."""

    terms: str
    letters: str
    when: Callable[[OpCall], bool] | None = None
    """Only for calls that satisfy this."""

    def strategies(self, call: OpCall) -> Iterator[Strategy]:
        if self.when is not None and not self.when(call):
            return
        left, right = self.terms.split("->")
        inputs = [term for term, slot in zip(left.split(","), call.slots(), strict=True) if slot is not None]
        reads = [_dims(term, t) for term, t in zip(inputs, call.operands, strict=True)]
        terms = right.split(",")
        results = [_dims(term.rstrip("+"), t) for term, t in zip(terms, call.results, strict=True)]
        for letter in self._split_letters([*reads, *results]):
            placed = tuple(_split(letter, dims, t) for dims, t in zip(reads, call.operands, strict=True))
            made = tuple(
                Partial("sum") if _adds_up(term, letter, dims, t) else _split(letter, dims, t)
                for term, dims, t in zip(terms, results, call.results, strict=True)
            )
            yield Strategy(placed, made)

    def _split_letters(self, dims: list[str]) -> list[str]:
        found = sorted({letter for text in dims for letter in text})
        return [letter for letter in found if letter in self.letters or (letter.isdigit() and "*" in self.letters)]


def _dims(term: str, type_: TensorType) -> str:
    """One letter per dim; the dims of `*` are digits, 0 the last of them. A result not asked for has none."""
    rank = len(type_.shape)
    if 0 in type_.shape:
        return ""
    if "*" not in term:
        return term[max(len(term) - rank, 0) :]
    before, after = term.split("*")
    num_star = max(rank - len(before) - len(after), 0)
    return before + "".join(str(i) for i in reversed(range(num_star))) + after


def _adds_up(term: str, letter: str, dims: str, type_: TensorType) -> bool:
    """Whether the result is a sum over the split letter; one that was not asked for has no elements."""
    return term.endswith("+") and letter not in dims and 0 not in type_.shape


def _split(letter: str, dims: str, type_: TensorType) -> Placement:
    if letter not in dims or type_.shape[dims.index(letter)] == 1:
        return Replicate()
    return Shard(dims.index(letter))


NONE, MEAN, SUM = 0, 1, 2
"""ATen's codes of a loss's reduction."""


def _reduces(*codes: int) -> Callable[[OpCall], bool]:
    return lambda call: call.integer("reduction", MEAN) in codes


def _not_causal(call: OpCall) -> bool:
    return not call.argument("is_causal", False)


def _mask_without_gradient(call: OpCall) -> bool:
    """The gradient of a broadcast mask would be a sum."""
    wanted = call.argument("grad_input_mask")
    return isinstance(wanted, tuple) and len(wanted) == 4 and not wanted[3]


def _plain_convolution(call: OpCall) -> bool:
    return call.integer("groups", 1) == 1 and not call.argument("transposed", False)


def _plain_without_bias(call: OpCall) -> bool:
    return _plain_convolution(call) and call.argument("bias") is None


_ATTENTION: Final = (
    # Batch entries and heads do not meet. With fewer key heads both kinds of heads are cut, so that each rank holds
    # whole groups. A mask follows where it is not broadcast.
    Splits("bhqe,bhke,bhkv,bhqk->bhqv,bhq", "bh"),
    # A query attends on its own; with `is_causal` its row number matters, which a local call does not know.
    Splits("bhqe,bhke,bhkv,bhqk->bhqv,bhq", "q", _not_causal),
)
_ATTENTION_BACKWARD: Final = (
    Splits("bhqv,bhqe,bhke,bhkv,bhqv,bhq,bhqk->bhqe,bhke,bhkv", "bh"),
    # Every query adds its term to the gradients of all keys and values.
    Splits("bhqv,bhqe,bhke,bhkv,bhqv,bhq,bhqk->bhqe,bhke+,bhkv+", "q", _not_causal),
)


def _loss(name: str, num_inputs: int) -> dict[str, tuple[Splits, ...]]:
    """A pointwise loss. A local mean divides by the local count, so mean is only offered whole: capture has
    already rewritten means to sums."""
    inputs = ",".join(["*"] * num_inputs)
    return {
        f"aten.{name}.default": (
            Splits(f"{inputs}->*", "*", _reduces(NONE)),
            Splits(f"{inputs}->+", "*", _reduces(SUM)),
        ),
        f"aten.{name}_backward.default": (Splits(f"*,{inputs}->*", "*", _reduces(NONE, SUM)),),
    }


REPLACED: Final[Mapping[str, tuple[Splits, ...]]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _ATTENTION,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _ATTENTION_BACKWARD,
    # Every label adds its own term to the sum of losses and to the sum of weights.
    "aten.nll_loss_forward.default": (
        Splits("bc,b,c->b,", "b", _reduces(NONE)),
        Splits("bc,b,c->+,+", "b", _reduces(SUM)),
    ),
    "aten.nll_loss2d_forward.default": (
        Splits("bc*,b*,c->b*,", "b*", _reduces(NONE)),
        Splits("bc*,b*,c->+,+", "b*", _reduces(SUM)),
    ),
    # A row's gradient needs only its label and, for the mean, the total weight, which is whole here.
    "aten.nll_loss_backward.default": (Splits("b,bc,b,c,->bc", "b"),),
    "aten.nll_loss2d_backward.default": (Splits("b*,bc*,b*,c,->bc*", "b*"),),
    **_loss("mse_loss", 2),
    **_loss("smooth_l1_loss", 2),
    **_loss("huber_loss", 2),
    **_loss("soft_margin_loss", 2),
    **_loss("binary_cross_entropy", 3),
}
"""Instead of whatever DTensor says: it has no rule, or one that is wrong (means over a split batch)."""

_POOL_BACKWARD: Final = (Splits("nc*,nc*->nc*", "nc"),)  # Images and channels are pooled one by one.

ADDED: Final[Mapping[str, tuple[Splits, ...]]] = {
    # An output channel needs its own filters and bias, and all input channels.
    # Input channels add up; a bias would be added once per rank.
    "aten.convolution.default": (
        Splits("ni*,oi*,o->no*", "o", _plain_convolution),
        Splits("ni*,oi*,o->no*+", "i", _plain_without_bias),
    ),
    # Transposed: each output channel adds a term to the input's gradient; each input channel has its own.
    "aten.convolution_backward.default": (
        Splits("no*,ni*,oi*->ni*+,oi*,o", "o", _plain_convolution),
        Splits("no*,ni*,oi*->ni*,oi*,o", "i", _plain_convolution),
    ),
    # As on the CPU; DTensor cuts a mask that is broadcast, which then does not divide.
    "aten._scaled_dot_product_efficient_attention.default": (Splits("bhqe,bhke,bhkv,bhqk->bhqv,bhq,,", "bh"),),
    "aten._scaled_dot_product_efficient_attention_backward.default": (
        Splits("bhqv,bhqe,bhke,bhkv,bhqk,bhqv,bhq,,->bhqe,bhke,bhkv,bhqk", "bh", _mask_without_gradient),
    ),
    "aten.avg_pool2d_backward.default": _POOL_BACKWARD,
    "aten._adaptive_avg_pool2d_backward.default": _POOL_BACKWARD,
    # Statistics are of one sample's groups; scale and shift gather terms from every sample.
    "aten.native_group_norm_backward.default": (Splits("nc*,nc*,ng,ng,c->nc*,c+,c+", "n"),),
    # A window along the last dim of one sample's channel.
    "aten.reflection_pad1d.default": (Splits("nc*->nc*", "nc"),),
    "aten.reflection_pad2d.default": (Splits("nc*->nc*", "nc"),),
    "aten.replication_pad2d.default": (Splits("nc*->nc*", "nc"),),
    # Elementwise; a filling value is whole.
    "aten.floor_divide.default": (Splits("*,*->*", "*"),),
    "aten.copy.default": (Splits("*,*->*", "*"),),
    "aten.fill.Tensor": (Splits("*,->*", "*"),),
    "aten.fill.Scalar": (Splits("*->*", "*"),),
    # Samples and channels are unfolded or upsampled one by one; columns mix channels, so only samples.
    "aten.im2col.default": (Splits("n*->n*", "n"),),
    "aten.col2im.default": (Splits("n*->n*", "n"),),
}
"""Beside what DTensor says."""

_BIASED: Final = frozenset(("aten.addmm.default", "aten.baddbmm.default"))
_FILLS: Final = frozenset(
    f"aten.{name}"
    for name in ("full.default", "zeros.default", "ones.default", "empty.memory_format", "scalar_tensor.default")
)
_NEW: Final = frozenset(f"aten.new_{kind}.default" for kind in ("zeros", "ones", "full", "empty"))


def declared(call: OpCall) -> tuple[Strategy, ...] | None:
    """Our own rule instead of DTensor's, or None where DTensor is to be asked."""
    if call.op in REPLACED:
        return tuple(s for splits in REPLACED[call.op] for s in splits.strategies(call))
    if not call.operands and (call.op in _FILLS or call.op in RANDOM_OPS):
        # Every part of a constant is that constant; random numbers are drawn by global index.
        return tuple(Strategy((), (Shard(dim),)) for dim in range(len(call.results[0].shape)))
    return None


def amended(call: OpCall, strategy: Strategy) -> Strategy:
    """DTensor wants the bias of a partial product as a sum too, which nothing makes. Here it is read whole, and each
    rank adds its share (`passes.localize` divides beta)."""
    if call.op in _BIASED and strategy.reads[0] == Partial("sum"):
        return replace(strategy, reads=(Replicate(), *strategy.reads[1:]))
    return strategy


def added(call: OpCall) -> tuple[Strategy, ...]:
    """Rules beside DTensor's."""
    if call.op == "aten.expand.default":
        return tuple(_grown(call))
    if call.op == "aten.clone.default":
        # A copy of each term is a term of the copy.
        return (Strategy((Partial("sum"),), (Partial("sum"),)),)
    if call.op in _NEW:
        # Only the dtype of the operand is used.
        return tuple(Strategy((Replicate(),), (Shard(dim),)) for dim in range(len(call.results[0].shape)))
    return tuple(s for splits in ADDED.get(call.op, ()) for s in splits.strategies(call))


def _grown(call: OpCall) -> Iterator[Strategy]:
    """Along a dim that is only repeated, every part is made from the same whole."""
    before, after = call.operands[0].shape, call.results[0].shape
    fresh = len(after) - len(before)
    for dim, size in enumerate(after):
        if size > 1 and (dim < fresh or before[dim - fresh] == 1):
            yield Strategy((Replicate(),), (Shard(dim),))
