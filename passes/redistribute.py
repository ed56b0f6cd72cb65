"""From one layout to another: which collectives, on which axis, in which order.

Axes nest from left to right, so two axes that cut the same dim can only be undone from the inside and made from the
outside. `steps` finds an order of single-axis steps in which each is legal; where there is none it goes through whole
tensors. `emit_step` writes one step as nodes on local tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import permutations

from shardwright.ir import (
    Arg,
    Layout,
    Mesh,
    Partial,
    Placement,
    PlanError,
    Ref,
    Replicate,
    Shard,
    Strided,
    TensorType,
    format_layout,
)

__all__ = ["Emit", "Step", "can_redistribute", "emit_step", "step_kind", "steps"]


@dataclass(frozen=True, slots=True)
class Step:
    """One axis changes its placement."""

    axis: int
    source: Placement
    target: Placement


def can_redistribute(source: Placement, target: Placement) -> bool:
    """Whether one axis can go from `source` to `target`: nothing becomes a partial value again."""
    return source == target or not isinstance(target, Partial)


@cache
def steps(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Single-axis steps from `source` to `target`, in order; the order that moves least over outer axes.

    Raises PlanError where a partial value is wanted.

    >>> [str(step.axis) for step in steps((Partial(), Partial()), (Shard(0), Shard(0)))]
    ['0', '1']
    """
    if not all(can_redistribute(p, q) for p, q in zip(source, target, strict=True)):
        raise PlanError(
            f"expected a layout that {format_layout(source)} can be brought to, found {format_layout(target)}:"
            " only an operator makes a partial value"
        )
    changing = [axis for axis, (p, q) in enumerate(zip(source, target, strict=True)) if p != q]
    found = [steps for order in permutations(changing) if (steps := _in_order(source, target, order)) is not None]
    return min(found, key=lambda steps: _traffic(source, steps)) if found else _through_whole(source, target)


def _traffic(source: Layout, steps: tuple[Step, ...]) -> float:
    """Bytes moved, relative, with an axis four times as dear as the next inner one and all axes of two ranks.

    So outer axes gather before inner ones, while parts are small, and reduce after them.
    """
    size = 0.5 ** sum(isinstance(p, Shard | Strided) for p in source)
    total = 0.0
    for step in steps:
        after = size * _growth(step)
        weight = {"all_reduce": 2.0, None: 0.0}.get(step_kind(step), 1.0)
        total += weight * max(size, after) * 4.0**-step.axis
        size = after
    return total


def _growth(step: Step) -> float:
    cut_before, cut_after = (isinstance(p, Shard | Strided) for p in (step.source, step.target))
    return 2.0 ** (cut_before - cut_after)


def _in_order(source: Layout, target: Layout, order: tuple[int, ...]) -> tuple[Step, ...] | None:
    current = list(source)
    found: list[Step] = []
    for axis in order:
        inner = current[axis + 1 :]
        if any(_same_cut(p, current[axis]) or _same_cut(p, target[axis]) for p in inner):
            return None
        found.extend(_axis_steps(axis, current[axis], target[axis]))
        current[axis] = target[axis]
        if _mixes(tuple(current), source, target):
            return None
    return tuple(found)


def _mixes(layout: Layout, source: Layout, target: Layout) -> bool:
    """Whether two axes cut one dim in different ways that neither end has: that need not come out even."""
    for one, other in permutations(range(len(layout)), 2):
        p, q = layout[one], layout[other]
        if not isinstance(p, Shard | Strided) or not isinstance(q, Shard | Strided) or p == q or p.dim != q.dim:
            continue
        if (p, q) not in ((source[one], source[other]), (target[one], target[other])):
            return True
    return False


def _axis_steps(axis: int, source: Placement, target: Placement) -> tuple[Step, ...]:
    """One step, or two through the whole where both cut the same dim: an exchange can only swap one dim for another."""
    if isinstance(source, Shard | Strided) and isinstance(target, Shard | Strided) and source.dim == target.dim:
        return Step(axis, source, Replicate()), Step(axis, Replicate(), target)
    return (Step(axis, source, target),)


def _same_cut(one: Placement, other: Placement) -> bool:
    return isinstance(one, Shard | Strided) and one == other


def _through_whole(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Undo every axis that cuts, from the inside; then cut from the outside."""
    whole = tuple(Replicate() if isinstance(p, Shard | Strided) or p != q else p for p, q in _pairs(source, target))
    undo = [Step(axis, p, w) for axis, (p, w) in enumerate(_pairs(source, whole)) if p != w]
    cut = [Step(axis, w, q) for axis, (w, q) in enumerate(_pairs(whole, target)) if w != q]
    return (*reversed(undo), *cut)


def _pairs(one: Layout, other: Layout) -> list[tuple[Placement, Placement]]:
    return list(zip(one, other, strict=True))


def step_kind(step: Step) -> str | None:
    """The collective a step needs, without `mesh.`; None where the rank already has what it needs."""
    match step.source, step.target:
        case Partial("sum"), Shard() | Strided():
            return "reduce_scatter"
        case Partial(), _:
            return "all_reduce"
        case Replicate(), _:
            return None
        case _, Replicate():
            return "all_gather"
        case _:
            return "all_to_all"


Emit = Callable[[str, tuple[Arg, ...], TensorType], str]
"""`(op, args, result type) -> name of the new value`; args hold `Ref`s and constants."""


def emit_step(
    step: Step, name: str, local: TensorType, layout: Layout, mesh: Mesh, emit: Emit
) -> tuple[str, TensorType]:
    """Nodes that change one axis of the local tensor `name`, whose layout is `layout`.

    Returns the new local value and its type. A merge or stack on dim 0 is no work and no node.
    """
    writer = _StepWriter(mesh.axes[step.axis], mesh.sizes[step.axis], layout, mesh, emit)
    kind = step_kind(step)
    if kind is None:
        return writer.own(name, local, step.target)
    if kind == "all_gather":
        return writer.merge(*writer.collective("all_gather", name, local, (writer.num_parts, 1)), step.source)
    if kind == "reduce_scatter":
        stacked, stacked_type = writer.stack(name, local, step.target)
        return writer.collective("reduce_scatter", stacked, stacked_type, (1, writer.num_parts), "sum")
    if kind == "all_reduce":
        reduce = step.source.reduce if isinstance(step.source, Partial) else "sum"
        reduced, reduced_type = writer.collective("all_reduce", name, local, (1, 1), reduce)
        return (reduced, reduced_type) if step.target == Replicate() else writer.own(reduced, reduced_type, step.target)
    stacked, stacked_type = writer.stack(name, local, step.target)
    return writer.merge(*writer.collective("all_to_all", stacked, stacked_type, (1, 1)), step.source)


@dataclass(frozen=True, slots=True)
class _StepWriter:
    axis: str
    num_parts: int
    layout: Layout
    mesh: Mesh
    emit: Emit

    def collective(
        self, kind: str, name: str, local: TensorType, growth: tuple[int, int], *extra: str
    ) -> tuple[str, TensorType]:
        if kind != "all_reduce":  # which makes its fresh result row-major by itself
            name, local = self.dense(name, local)
        result = TensorType(local.dtype, local.shape if growth == (1, 1) else _scaled(local.shape, (0, *growth)))
        started = self.emit(f"mesh.{kind}", (Ref(name), self.axis, *extra), result)
        return self.emit("mesh.wait", (Ref(started), Ref(name)), result), result

    def dense(self, name: str, local: TensorType) -> tuple[str, TensorType]:
        """Collectives read memory in order; what does not lie so is copied first, where all can see it."""
        if local.strides is None:
            return name, local
        result = TensorType(local.dtype, local.shape)
        return self.emit("aten.contiguous.default", (Ref(name),), result), result

    def own(self, name: str, local: TensorType, target: Placement) -> tuple[str, TensorType]:
        dim, outer = self._cut(target)
        result = TensorType(local.dtype, _scaled(local.shape, (dim, 1, self.num_parts)))
        return self.emit("mesh.own", (Ref(name), self.axis, dim, outer), result), result

    def stack(self, name: str, local: TensorType, target: Placement) -> tuple[str, TensorType]:
        dim, outer = self._cut(target)
        if (dim, outer) == (0, 1):
            return name, local
        result = TensorType(local.dtype, _scaled(local.shape, (dim, 1, self.num_parts), (0, self.num_parts, 1)))
        return self.emit("mesh.stack", (Ref(name), self.num_parts, dim, outer), result), result

    def merge(self, name: str, local: TensorType, source: Placement) -> tuple[str, TensorType]:
        dim, outer = self._cut(source)
        if (dim, outer) == (0, 1):
            return name, local
        result = TensorType(local.dtype, _scaled(local.shape, (0, 1, self.num_parts), (dim, self.num_parts, 1)))
        return self.emit("mesh.merge", (Ref(name), self.num_parts, dim, outer), result), result

    def _cut(self, placement: Placement) -> tuple[int, int]:
        """The dim and the outer size *on this rank*: other axes may already cut the outer part."""
        if isinstance(placement, Shard):
            return placement.dim, 1
        if not isinstance(placement, Strided):
            raise PlanError(f"expected a split, found {placement}")
        cut = math.prod(n for p, n in zip(self.layout, self.mesh.sizes, strict=True) if p == Shard(placement.dim))
        return placement.dim, placement.outer // cut


def _scaled(shape: tuple[int, ...], *factors: tuple[int, int, int]) -> tuple[int, ...]:
    """Shape with the size of each (dim, up, down) multiplied by up / down, one after the other."""
    local = list(shape)
    for dim, up, down in factors:
        local[dim] = local[dim] * up // down
    return tuple(local)
