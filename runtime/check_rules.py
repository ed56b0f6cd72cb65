"""Whether a sharding rule is right: the operator on the parts equals the parts of the operator on the whole.

Needs a node of a captured graph and one `Strategy`. Runs the operator on random data, in float64 where it can, once
whole and once for every simulated rank through `passes.localize`, in this process and without any communication.
Gives a `Verdict`. Random operators cannot be compared, and operators of another device cannot run: both are untried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

from shardwright.ir import Graph, Mesh, Node, Partial, Placement, Shard, Strided, TensorType, Token
from shardwright.ir.graph import Arg
from shardwright.ir.ops import is_random
from shardwright.passes.localize import localize
from shardwright.passes.strategies import Strategy
from shardwright.runtime.check_data import operands_for
from shardwright.runtime.torch_ops import TORCH_DTYPES, torch_arg, torch_op

__all__ = ["Outcome", "Verdict", "check", "check_strategy"]

_CPU = torch.device("cpu")
_RAISED = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, AssertionError)


_EPSILON: Final = {torch.float64: 1e-9, torch.float32: 1e-5}
"""What a result may be off by, relative to its largest entry; 16-bit sums are rounded per term."""


class Outcome(StrEnum):
    EQUAL = "equal"
    DIFFERS = "differs"
    """Wrong numbers, or wrong shapes."""
    RAISES = "raises"
    """The local call is not possible."""
    UNTRIED = "untried"
    """Random, or the whole call cannot run on this machine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a check."""

    outcome: Outcome
    reason: str = ""


def check_strategy(graph: Graph, node: Node, strategy: Strategy, num_shards: int, seed: int = 0) -> str | None:
    """Why the strategy is wrong or impossible, or None where nothing speaks against it."""
    verdict = check(graph, node, strategy, num_shards, seed)
    return verdict.reason if verdict.outcome in (Outcome.DIFFERS, Outcome.RAISES) else None


def check(graph: Graph, node: Node, strategy: Strategy, num_shards: int, seed: int = 0) -> Verdict:
    """Run the operator whole and in parts, and compare."""
    types = tuple(graph.types[name] for name in node.operands)
    results = tuple(graph.types[name] for name in node.results)
    if is_random(node.op) or node.op.startswith("aten.empty") or node.op.startswith("aten.new_empty"):
        return Verdict(Outcome.UNTRIED, f"{node.op} gives other numbers each time")
    generator = torch.Generator().manual_seed(seed)
    data, whole, widened = _whole(node, types, generator)
    if whole is None:
        return Verdict(Outcome.UNTRIED, f"{node.op} does not run on this machine")
    parts = [_terms(x, p, num_shards, generator) for x, p in zip(data, strategy.reads, strict=True)]
    made: list[list[Tensor]] = []
    for rank in range(num_shards):
        local = [part[rank] for part in parts]
        try:
            outs, shapes = _local(node, local, types, results, strategy, num_shards, widened)
        except _RAISED as error:
            return Verdict(Outcome.RAISES, _message(node, strategy, f"raises {type(error).__name__}: {error}"))
        found = [tuple(out.shape) for out in outs]
        if found != shapes:
            return Verdict(Outcome.DIFFERS, _message(node, strategy, f"gives shapes {found}, expected {shapes}"))
        made.append(outs)
    return _compared(node, strategy, whole, made)


def _whole(
    node: Node, types: tuple[TensorType, ...], generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor] | None, bool]:
    """Data, results, and whether floats are widened to float64."""
    for widened in (True, False):
        data = operands_for(node, types, generator, widened)
        try:
            return data, _run(node, data, widened), widened
        except _RAISED:
            continue
    return [], None, False


def _local(
    node: Node,
    local: list[Tensor],
    types: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    strategy: Strategy,
    num_shards: int,
    widened: bool,
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """One rank's results, and the shapes that the rank graph says they have."""
    mesh = Mesh(("axis",), (num_shards,))
    local_types = tuple(
        TensorType.of(t.dtype, tuple(x.shape), tuple(x.stride())) for t, x in zip(types, local, strict=True)
    )
    call, made = localize(node, local_types, results, tuple((p,) for p in strategy.results), mesh)
    return _run(call, local, widened), [t.shape for t in made]


def _run(node: Node, data: Sequence[Tensor], widened: bool) -> list[Tensor]:
    numbered = node.with_operands(tuple(map(str, range(len(data)))))
    values = {str(position): x for position, x in enumerate(data)}
    args = [torch_arg(_widened(arg, widened), values, _CPU) for arg in numbered.args]
    kwargs = {key: torch_arg(_widened(arg, widened), values, _CPU) for key, arg in numbered.kwargs}
    found = torch_op(node.op)(*args, **kwargs)
    several = found if isinstance(found, tuple | list) else (found,)
    return [x if isinstance(x, Tensor) else torch.empty(0, dtype=torch.uint8) for x in several]


def _widened(arg: Arg, widened: bool) -> Arg:
    """Floating dtypes among the arguments are widened with the data."""
    if isinstance(arg, tuple):
        return tuple(_widened(item, widened) for item in arg)
    if widened and isinstance(arg, Token) and arg.text.startswith("dtype."):
        return Token("dtype.f64") if TORCH_DTYPES[arg.text[6:]].is_floating_point else arg
    return arg


def _compared(node: Node, strategy: Strategy, whole: list[Tensor], made: list[list[Tensor]]) -> Verdict:
    for index, (expected, placement) in enumerate(zip(whole, strategy.results, strict=True)):
        parts = [outs[index] for outs in made]
        for rank, (wanted, found) in enumerate(_pairs(expected, placement, parts)):
            close = wanted.shape == found.shape and torch.allclose(
                _wide(wanted), _wide(found), rtol=1e-4, atol=_tolerance(wanted), equal_nan=True
            )
            if not close:
                what = f"result {index} on rank {rank} is off by {_distance(wanted, found)}"
                return Verdict(Outcome.DIFFERS, _message(node, strategy, what))
    return Verdict(Outcome.EQUAL)


def _pairs(expected: Tensor, placement: Placement, parts: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """What should be there and what is there: per rank, or once for a reduction."""
    if not isinstance(placement, Partial):
        yield from zip(cut(expected, placement, len(parts)), parts, strict=True)
        return
    stacked = torch.stack(parts)
    reduced = {"max": stacked.amax, "min": stacked.amin}.get(placement.reduce, stacked.sum)(0)
    yield expected, reduced.to(expected.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.is_complex() else x.double()


def _tolerance(x: Tensor) -> float:
    """Relative to the largest entry: sums of many terms cancel."""
    if not x.is_floating_point() or x.numel() == 0:
        return 0.0
    finite = torch.nan_to_num(x.double(), 0.0, 0.0, 0.0).abs().max().item()
    return _EPSILON.get(x.dtype, 3e-2) * max(finite, 1e-30)


def _distance(wanted: Tensor, found: Tensor) -> str:
    if wanted.shape != found.shape:
        return f"shape {tuple(found.shape)} for {tuple(wanted.shape)}"
    return f"{(_wide(wanted) - _wide(found)).abs().max().item():.3g}"


def cut(x: Tensor, placement: Placement, num_shards: int) -> list[Tensor]:
    """The parts of the ranks, laid out in memory in the order of the whole."""
    if isinstance(placement, Shard):
        return [_dense(part, x) for part in x.chunk(num_shards, placement.dim)]
    if isinstance(placement, Strided):
        dim, outer = placement.dim, placement.outer
        seen = x.reshape(*x.shape[:dim], outer, x.shape[dim] // outer, *x.shape[dim + 1 :])
        return [_dense(part.flatten(dim, dim + 1), x) for part in seen.chunk(num_shards, dim + 1)]
    return [x] * num_shards


def _dense(part: Tensor, whole: Tensor) -> Tensor:
    """A copy without gaps, its dims in memory in the order of the whole's; row-major where the whole repeats."""
    strides = whole.stride()
    if 0 in strides:
        return part.contiguous()
    order = sorted(range(whole.dim()), key=lambda dim: (-strides[dim], dim))
    back = [order.index(dim) for dim in range(whole.dim())]
    return part.permute(order).contiguous().permute(back)


def _terms(x: Tensor, placement: Placement, num_shards: int, generator: torch.Generator) -> list[Tensor]:
    """What each rank reads: its part, or for a sum random terms that add up."""
    if not isinstance(placement, Partial):
        return cut(x, placement, num_shards)
    terms = [_random_like(x, generator) for _ in range(num_shards - 1)]
    rest = x.clone()
    for term in terms:
        rest = rest - term
    return [*terms, rest]


def _random_like(x: Tensor, generator: torch.Generator) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)
    return torch.randint(-3, 4, x.shape, generator=generator, dtype=x.dtype)


def _message(node: Node, strategy: Strategy, what: str) -> str:
    reads, results = (", ".join(map(str, placements)) for placements in (strategy.reads, strategy.results))
    return f"{node.op} ({node.name}) with {reads} -> {results}: {what}"
