"""Captured-like graphs of a few operators on square tensors, declared strategies for them, and fixed prices.

Backward need not be the derivative of forward: the planner does not ask. Every tensor is `SIDE` x `SIDE`, so that any
value can stand anywhere and every split divides on two and four ranks.
"""

from dataclasses import dataclass

from hypothesis import strategies as draw
from tests.rank_graphs import GraphWriter

from shardwright.ir import (
    Cluster,
    Device,
    Graph,
    Host,
    InputKind,
    Link,
    Mesh,
    Node,
    Partial,
    Phase,
    Placement,
    Ref,
    Replicate,
    Shard,
    TensorType,
    Tier,
)
from shardwright.passes.optimizers import OptimizerSpec, optimizer_spec
from shardwright.passes.strategies import Strategy
from shardwright.planner.formulation import Machine

__all__ = ["ONE", "SIDE", "FixedPrices", "TableRules", "cluster", "graphs", "machine", "square_graph"]

SIDE = 8
TENSOR_BYTES = SIDE * SIDE * 4
ONE = Mesh((), ())

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial("sum")
_ALIKE = ((R, R), (S0, S0), (S1, S1))
_TABLE: dict[str, tuple[tuple[Placement, ...], ...]] = {
    "relu": _ALIKE,
    "neg": (*_ALIKE, (P, P)),
    "t": ((R, R), (S0, S1), (S1, S0), (P, P)),
    "mul": ((R, R, R), (S0, S0, S0), (S1, S1, S1), (P, R, P), (R, P, P)),
    "add": ((R, R, R), (S0, S0, S0), (S1, S1, S1), (P, P, P)),
    "mm": ((R, R, R), (S0, R, S0), (R, S1, S1), (S1, S0, P)),
}
"""Operands, then the result."""
OPS = {
    "relu": "aten.relu.default",
    "neg": "aten.neg.default",
    "t": "aten.t.default",
    "mul": "aten.mul.Tensor",
    "add": "aten.add.Tensor",
    "mm": "aten.mm.default",
}


class TableRules:
    """The table above, on any axis."""

    def strategies(self, graph: Graph, node: Node, num_shards: int) -> tuple[Strategy, ...]:
        kind = node.op.split(".")[1]
        rows = dict.fromkeys(Strategy(row[:-1], row[-1:]) for row in _TABLE[kind])
        # An operand that is read twice is read in one layout.
        return tuple(s for s in rows if len(set(node.operands)) == len(node.operands) or len(set(s.reads)) == 1)


@dataclass(frozen=True)
class FixedPrices:
    """Seconds proportional to elements, with a floor."""

    element_seconds: float = 1e-6
    launch_seconds: float = 1e-5
    byte_seconds: float = 2e-7
    latency_seconds: float = 2e-5
    copy_byte_seconds: float = 1e-7
    free_cuts: bool = False
    """Whether taking and joining parts costs nothing, so that doing it in two steps costs no more than in one."""

    def op_seconds(self, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> float:
        if self.free_cuts and node.op.startswith("mesh."):
            return 0.0
        work = results[0].num_elements
        if node.op == OPS["mm"]:
            work *= operands[0].shape[1]
        return self.launch_seconds + work * self.element_seconds

    def collective_seconds(self, kind: str, num_bytes: int, group_sizes: tuple[int, ...], axis: int) -> float:
        """Every rank sends what it does not keep; all axes have one kind of link."""
        size = group_sizes[axis]
        moved = num_bytes * (size - 1) / size * (2 if kind.startswith("all_reduce") else 1)
        if kind == "all_to_all":
            moved = num_bytes * (size - 1) / size
        return self.latency_seconds + moved * self.byte_seconds

    def copy_seconds(self, num_bytes: int, tier: Tier = Tier.HOST, back: bool = False) -> float:
        """A disk takes twice as long as the host to write, and three times to read."""
        slower = (3 if back else 2) if tier is Tier.DISK else 1
        return self.launch_seconds + num_bytes * self.copy_byte_seconds * slower

    def optimizer_seconds(self, num_elements: int, state_bytes: int, on_host: bool) -> float:
        return num_elements * self.element_seconds * (4 if on_host else 1)


def cluster(num_ranks: int, overlap: float = 1.0, host_overlap: float = 1.0) -> Cluster:
    device = Device("cpu", 2**34, 1e10, {"f32": 1e11}, 0.8, 1e-6, 1, False)
    link = Link(1e9, 1e-6, overlap)
    return Cluster("small", 1, num_ranks, device, link, link, Host(2**34, 1e9, 1e-6, 1, 1e8, host_overlap))


def machine(
    num_ranks: int = 1,
    prices: FixedPrices | None = None,
    *,
    host_bytes: int = 0,
    disk_bytes: int = 0,
    overlap: float = 1.0,
    host_overlap: float = 1.0,
    optimizer: OptimizerSpec | None = None,
) -> Machine:
    spec = optimizer_spec("sgd") if optimizer is None else optimizer
    return Machine(cluster(num_ranks, overlap, host_overlap), prices or FixedPrices(), spec, host_bytes, disk_bytes)


def square_graph(
    forward: list[tuple[str, ...]],
    backward: list[tuple[str, ...]],
    num_params: int = 1,
    returned: tuple[str, ...] = (),
) -> Graph:
    """Rows are (operator, operand, ...): inputs `x`, `p0`, `p1`, …; results `f0`, `f1`, …, then `b0`, `b1`, ….

    The gradient of `p<i>` is the i-th value of backward counted from its end. `returned` are outputs.
    """
    writer = GraphWriter("small")
    writer.given("x", InputKind.INPUT, SIDE, SIDE)
    params = [writer.given(f"p{number}", InputKind.PARAM, SIDE, SIDE) for number in range(num_params)]
    for prefix, phase, rows in (("f", Phase.FORWARD, forward), ("b", Phase.BACKWARD, backward)):
        writer.phase = phase
        for number, (kind, *operands) in enumerate(rows):
            writer.call(OPS[kind], *map(Ref, operands), to=f"{prefix}{number}", shape=(SIDE, SIDE))
    gradients = {param: f"b{len(backward) - 1 - number}" for number, param in enumerate(params)}
    return writer.graph(gradients=gradients, outputs={name: name for name in returned})


_KINDS = ("relu", "neg", "mul", "add", "mm", "t")


@draw.composite
def graphs(pick: draw.DrawFn, num_forward: tuple[int, int] = (2, 4), num_backward: tuple[int, int] = (1, 2)) -> Graph:
    """Chains, diamonds and what lies between: every operator of forward reads the one before it; backward reads
    forward at random, and every operator of it the one before."""
    forward: list[tuple[str, ...]] = []
    made = ["x", "p0"]
    for number in range(pick(draw.integers(*num_forward))):
        newest = made[-1] if number else "x"
        # A view of a view of another layout is derived twice; one view deep is enough here.
        kinds = [k for k in _KINDS if k != "t" or not forward or forward[-1][0] != "t"]
        forward.append(_row(pick, pick(draw.sampled_from(kinds)), newest, made))
        made.append(f"f{number}")
    backward: list[tuple[str, ...]] = []
    last = made[-1]
    for number in range(pick(draw.integers(*num_backward))):
        kind = pick(draw.sampled_from(("mul", "mm", "add")))
        backward.append((kind, *_shuffled(pick, last, pick(draw.sampled_from(made)))))
        last = f"b{number}"
    returned = (f"f{len(forward) - 1}",) if pick(draw.booleans()) else ()
    return square_graph(forward, backward, 1, returned)


def _row(pick: draw.DrawFn, kind: str, newest: str, made: list[str]) -> tuple[str, ...]:
    if kind in ("relu", "neg", "t"):
        return (kind, newest)
    return (kind, *_shuffled(pick, newest, pick(draw.sampled_from(made))))


def _shuffled(pick: draw.DrawFn, one: str, other: str) -> tuple[str, str]:
    return (one, other) if pick(draw.booleans()) else (other, one)
