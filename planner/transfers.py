"""What it costs to bring a value from one layout to another: the very nodes the rewriter would write, priced."""

from dataclasses import dataclass, field

from shardwright.ir import Arg, Graph, Layout, Mesh, Node, Placement, TensorType, local_shape
from shardwright.ir.ops import is_async_start
from shardwright.passes.node_prices import NodePrices
from shardwright.passes.prices import Prices
from shardwright.passes.redistribute import can_redistribute, emit_step, steps

__all__ = ["Transfers", "reachable"]


def reachable(source: Layout, target: Layout) -> bool:
    """Whether every axis can be brought from `source` to `target`."""
    return all(can_redistribute(p, q) for p, q in zip(source, target, strict=True))


@dataclass(frozen=True)
class Transfers:
    """Seconds of redistributions on one mesh, remembered by type and layouts."""

    mesh: Mesh
    prices: Prices
    _seconds: dict[tuple[TensorType, Layout, Layout], float] = field(default_factory=dict)

    def seconds(self, whole: TensorType, source: Layout, target: Layout) -> float:
        """Of one rank, with nothing hidden behind compute. Raises PlanError where it cannot be done."""
        key = (TensorType(whole.dtype, whole.shape), source, target)
        if key not in self._seconds:
            self._seconds[key] = 0.0 if source == target else self._price(*key)
        return self._seconds[key]

    def _price(self, whole: TensorType, source: Layout, target: Layout) -> float:
        nodes: list[Node] = []
        types = {"0": TensorType(whole.dtype, local_shape(whole.shape, source, self.mesh))}

        def emit(op: str, args: tuple[Arg, ...], result: TensorType) -> str:
            name = str(len(types))
            nodes.append(Node(op, args, (), (name,)))
            types[name] = result
            return name

        current, local, layout = "0", types["0"], source
        for step in steps(source, target):
            current, local = emit_step(step, current, local, layout, self.mesh, emit)
            layout = _placed(layout, step.axis, step.target)
        asked = NodePrices(Graph("transfer", (), tuple(nodes), types), self.mesh, self.prices)
        return sum(asked.move_seconds(n) if is_async_start(n.op) else asked.compute_seconds(n) for n in nodes)


def _placed(layout: Layout, axis: int, placement: Placement) -> Layout:
    return (*layout[:axis], placement, *layout[axis + 1 :])
