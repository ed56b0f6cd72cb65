"""Random graphs of one device: up to eight storages of random sizes, made and read at random; prices to go with them.

Operators stand for what they cost and keep: nothing runs, so any size can come out of any of them.
"""

from dataclasses import dataclass, replace

from hypothesis import strategies as draw
from tests.planner.small_graphs import OPS, FixedPrices, machine
from tests.rank_graphs import GraphWriter

from shardwright.ir import Graph, InputKind, Node, Phase, Ref, TensorType
from shardwright.passes.optimizers import optimizer_spec
from shardwright.planner.formulation import Machine

__all__ = ["dags", "machines"]

WIDTH = 16
MOST_STORAGES = 8


@draw.composite
def dags(pick: draw.DrawFn) -> Graph:
    """Forward reads what was made before and ends in the loss; backward reads its own last value and forward at random.
    One parameter."""
    num_forward = pick(draw.integers(2, 5))
    num_backward = pick(draw.integers(1, MOST_STORAGES - num_forward))
    writer = GraphWriter("dag")
    writer.given("x", InputKind.INPUT, _size(pick), WIDTH)
    writer.given("p", InputKind.PARAM, _size(pick), WIDTH)
    made = ["x", "p"]
    for number in range(num_forward):
        newest = made[-1] if number else "x"
        made.append(_call(pick, writer, f"f{number}", newest, made))
    writer.phase = Phase.BACKWARD
    loss = last = made[-1]
    for number in range(num_backward - 1):
        last = _call(pick, writer, f"b{number}", last, made)
    shape = writer.types["p"].shape
    last = writer.call(OPS["mul"], Ref(last), Ref(pick(draw.sampled_from(made))), to="gradient", shape=shape)
    return writer.graph(loss=loss, gradients={"p": last})


def _size(pick: draw.DrawFn) -> int:
    return pick(draw.sampled_from((1, 2, 3, 5, 8)))


def _call(pick: draw.DrawFn, writer: GraphWriter, to: str, newest: str, made: list[str]) -> str:
    kind = pick(draw.sampled_from(("relu", "neg", "mul", "mm")))
    operands = [newest] if kind in ("relu", "neg") and to.startswith("f") else [newest, pick(draw.sampled_from(made))]
    op = OPS[kind] if len(operands) == OPERANDS[kind] else OPS["mul"]
    return writer.call(op, *map(Ref, operands), to=to, shape=(_size(pick), WIDTH))


OPERANDS = {"relu": 1, "neg": 1, "mul": 2, "mm": 2}


@dataclass(frozen=True)
class OpPrices(FixedPrices):
    """Each operator has seconds of its own for an element of its result."""

    rates: tuple[tuple[str, float], ...] = ()

    def op_seconds(self, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> float:
        return self.launch_seconds + dict(self.rates)[node.op] * results[0].num_elements


@draw.composite
def machines(pick: draw.DrawFn) -> Machine:
    """One device; some have a host, with room for everything or for little."""
    rates = tuple((OPS[kind], pick(draw.sampled_from((1e-7, 1e-6, 5e-6)))) for kind in OPERANDS)
    prices = OpPrices(copy_byte_seconds=pick(draw.sampled_from((1e-8, 1e-7, 1e-6))), rates=rates)
    host_bytes = pick(draw.sampled_from((0, 600, 1500, 10**6)))
    made = machine(1, prices, host_bytes=host_bytes, optimizer=optimizer_spec("adamw-fused"))
    return replace(made, host_bytes=host_bytes)
