"""What DTensor knows of an operator on one axis: its rules, asked for every placement that a tensor can be brought to.

Needs an `OpCall`. Gives raw `Strategy` candidates: splits that may be uneven, in no order; `runtime.rules` filters.
New-style rules (`op_single_dim_strategy_funcs`) list their combinations once. Old-style rules (`op_strategy_funcs`)
answer for given placements, so they are asked once per placement of each operand. Nothing here needs or touches a
process group, and DTensor never searches its decompositions.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Placement as TorchPlacement
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

from shardwright.ir import Arg, Partial, Placement, Ref, Replicate, Shard, Strided, TensorType, contiguous_strides
from shardwright.passes.strategies import Strategy
from shardwright.runtime.compat import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    ShardingPlaceholder,
    StridedShard,
    TensorMeta,
    TupleStrategy,
    disable_dispatch_modes,
    one_axis_mesh,
    sharding_propagator,
)
from shardwright.runtime.op_call import OpCall
from shardwright.runtime.torch_ops import TORCH_DTYPES, torch_arg, torch_op

__all__ = ["ask_dtensor", "dtensor_knows"]

_REFUSALS = (RuntimeError, AssertionError, ValueError, NotImplementedError, IndexError, TypeError, KeyError)
"""How DTensor's rules say that a placement is not possible."""


def dtensor_knows(op: str) -> bool:
    """Whether DTensor has a rule of its own for the operator."""
    propagator, overload = sharding_propagator(), torch_op(op)
    return overload in propagator.op_single_dim_strategy_funcs or overload in propagator.op_strategy_funcs


def ask_dtensor(call: OpCall, cuts: frozenset[tuple[int, int]] = frozenset()) -> list[Strategy]:
    """All combinations that DTensor's rule for the operator allows; `cuts` are (size, outer) of strided splits."""
    propagator, overload = sharding_propagator(), torch_op(call.op)
    with disable_dispatch_modes():
        if overload in propagator.op_single_dim_strategy_funcs:
            return list(_single_dim(call))
        if overload in propagator.op_strategy_funcs:
            return list(_per_placement(call, cuts))
    return []


def _single_dim(call: OpCall) -> Iterator[Strategy]:
    info = sharding_propagator().op_single_dim_strategy_funcs[torch_op(call.op)]
    metas = tuple(map(_meta, call.operands))
    args = tuple(_with_tensors(arg, metas, tuple) for arg in call.args)
    kwargs = {key: _with_tensors(arg, metas, tuple) for key, arg in call.kwargs}
    try:
        found = info.func(torch_op(call.op), args, kwargs)
    except _REFUSALS:
        return
    for row in found:
        strategy = _strategy(call, row[len(row) - len(call.operands) :], row[: len(row) - len(call.operands)])
        if strategy is not None:
            yield strategy


def _per_placement(call: OpCall, cuts: frozenset[tuple[int, int]]) -> Iterator[Strategy]:
    mesh = one_axis_mesh(call.num_shards)
    for placements in dict.fromkeys(_questions(call, cuts)):
        yield from _one_question(call, mesh, placements)


def _questions(call: OpCall, cuts: frozenset[tuple[int, int]]) -> Iterator[tuple[Placement, ...]]:
    """Placements of all operands to ask about: one operand split and the rest whole, or equal shapes split alike."""
    whole = (Replicate(),) * len(call.operands)
    yield whole
    for position in _operands_to_vary(call):
        for placement in _candidates(call.operands[position], cuts):
            yield (*whole[:position], placement, *whole[position + 1 :])
            shape = call.operands[position].shape
            yield tuple(placement if t.shape == shape else Replicate() for t in call.operands)


def _operands_to_vary(call: OpCall) -> Sequence[int]:
    """Every operand; of a long list (cat, stack) only the largest, since the rest is asked alike."""
    positions = range(len(call.operands))
    return positions if len(positions) <= 8 else [max(positions, key=lambda i: call.operands[i].num_elements)]


def _candidates(type_: TensorType, cuts: frozenset[tuple[int, int]]) -> Iterator[Placement]:
    for dim, size in enumerate(type_.shape):
        yield Shard(dim)
        yield from (Strided(dim, outer) for whole, outer in sorted(cuts) if whole == size)
    yield Partial("sum")


def _one_question(call: OpCall, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Iterator[Strategy]:
    asked = [_op_strategy(t, p, mesh) for t, p in zip(call.operands, placements, strict=True)]
    args = tuple(_with_tensors(arg, asked, TupleStrategy) for arg in call.args)
    kwargs = {key: _with_tensors(arg, asked, TupleStrategy) for key, arg in call.kwargs}
    overload = torch_op(call.op)
    try:
        answer = sharding_propagator().op_strategy_funcs[overload](OpSchema(overload, args, kwargs))
    except _REFUSALS:
        return
    if not isinstance(answer, OpStrategy):
        return
    for spec in answer.strategies:
        results = spec.output_specs if isinstance(spec.output_specs, tuple | list) else [spec.output_specs]
        inputs = [results[0]] * len(call.operands) if spec.input_specs is None else list(spec.input_specs)
        # Rules written before keyword tensors leave them out: those stay whole.
        rest: list[TorchPlacement | None] = [TorchReplicate()] * (len(call.operands) - len(inputs))
        strategy = _strategy(call, [*_first(inputs), *rest], _first(results))
        if strategy is not None:
            yield strategy


def _first(specs: Iterable[DTensorSpec | None]) -> list[TorchPlacement | None]:
    return [None if spec is None else spec.placements[0] for spec in specs]


def _strategy(call: OpCall, reads: Sequence[object], results: Sequence[object]) -> Strategy | None:
    """In our words, or None where it has a placement that we do not plan with."""
    outs = [p for p in results if p is not None]
    if len(results) == len(call.results):
        outs = [TorchReplicate() if p is None else p for p in results]
    if len(outs) == 1 and len(call.results) > 1:
        outs *= len(call.results)
    if len(reads) != len(call.operands) or len(outs) != len(call.results):
        return None
    placed_in = [_placement(p, t) for p, t in zip(reads, call.operands, strict=True)]
    placed_out = [_placement(p, t) for p, t in zip(outs, call.results, strict=True)]
    if None in placed_in or None in placed_out:
        return None
    return Strategy(tuple(p for p in placed_in if p), tuple(p for p in placed_out if p))


def _placement(placement: object, type_: TensorType) -> Placement | None:
    rank = len(type_.shape)
    if isinstance(placement, TorchReplicate) or 0 in type_.shape:
        return Replicate()
    if isinstance(placement, StridedShard):
        return Strided(placement.dim % max(rank, 1), int(placement.split_factor))
    if isinstance(placement, TorchShard | ShardingPlaceholder):
        return Shard(placement.dim % max(rank, 1)) if rank else None
    # Subclasses are partial in other ways (masked embedding rows); an average is not a sum.
    if type(placement) is TorchPartial and placement.reduce_op in ("sum", "max", "min"):
        return Partial(placement.reduce_op)
    return None


def _meta(type_: TensorType) -> TensorMeta:
    strides = type_.strides or contiguous_strides(type_.shape)
    return TensorMeta(torch.Size(type_.shape), strides, TORCH_DTYPES[type_.dtype])


def _op_strategy(type_: TensorType, placement: Placement, mesh: DeviceMesh) -> OpStrategy:
    spec = DTensorSpec(mesh, (_torch_placement(placement),), tensor_meta=_meta(type_))
    return OpStrategy([OpSpec(spec)])


def _torch_placement(placement: Placement) -> TorchPlacement:
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    if isinstance(placement, Strided):
        return StridedShard(placement.dim, split_factor=placement.outer)
    return TorchPartial(placement.reduce) if isinstance(placement, Partial) else TorchReplicate()


def _with_tensors(arg: Arg, tensors: Sequence[object], make_list: type) -> object:
    """The argument as DTensor's rules see it: tensors replaced by what stands for them."""
    if isinstance(arg, Ref):
        return tensors[int(arg.name)]
    if isinstance(arg, tuple) and arg and all(isinstance(item, Ref) for item in arg):
        return make_list([_with_tensors(item, tensors, make_list) for item in arg])
    if isinstance(arg, tuple):
        return [_with_tensors(item, tensors, make_list) for item in arg]
    return torch_arg(arg, {}, torch.device("cpu"))
