"""Rank graphs written by hand, and what they must compute.

One model: two linear layers, relu between, mean square error. As captured it is `mlp("plain")`; the others are what a
rewriter would make of it for a mesh of one axis: data parallel with one bucket, fully sharded, tensor parallel, and
plain with its activation offloaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.ir import (
    Arg,
    Graph,
    Input,
    InputKind,
    Layout,
    Mesh,
    Node,
    Phase,
    Ref,
    Replicate,
    Shard,
    Strided,
    TensorType,
)
from shardwright.ir.ops import aliased_operand
from shardwright.runtime.shards import shard

__all__ = [
    "BATCH", "KINDS", "GraphWriter", "expected_peak_bytes", "local_inputs", "mlp", "mlp_layouts", "mlp_values",
    "plain_mlp",
]  # fmt: skip

BATCH, WIDE, HIDDEN, OUT = 24, 6, 12, 4
KINDS = ("dp", "fsdp", "tp")
AXIS = "x"


@dataclass
class GraphWriter:
    """Nodes one after the other; every method gives the name of the new value."""

    name: str
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD

    def given(self, name: str, kind: InputKind, *shape: int, dtype: str = "f32") -> str:
        self.inputs.append(Input(name, kind))
        self.types[name] = TensorType(dtype, shape)
        return name

    def call(self, op: str, *args: Arg, to: str, shape: tuple[int, ...], dtype: str = "f32") -> str:
        self.calls(op, *args, to={to: shape}, dtype=dtype)
        return to

    def calls(self, op: str, *args: Arg, to: Mapping[str, tuple[int, ...]], dtype: str = "f32") -> tuple[str, ...]:
        self.nodes.append(Node(op, args, (), tuple(to), self.phase))
        self.types.update({name: TensorType(dtype, shape) for name, shape in to.items()})
        return tuple(to)

    def waited(self, kind: str, x: str, *extra: Arg, to: str, shape: tuple[int, ...]) -> str:
        """A collective over the axis and its wait."""
        self.call(f"mesh.{kind}", Ref(x), AXIS, *extra, to=f"{to}/start", shape=shape)
        return self.call("mesh.wait", Ref(f"{to}/start"), Ref(x), to=to, shape=shape)

    def graph(self, **handed_back: object) -> Graph:
        return Graph(self.name, tuple(self.inputs), tuple(self.nodes), self.types, **handed_back)  # type: ignore[arg-type]


def mlp(kind: str, num_ranks: int = 1) -> Graph:
    """The rank graph of one kind."""
    n = num_ranks
    rows = BATCH // n if kind in ("dp", "fsdp") else BATCH
    hidden = HIDDEN // n if kind == "tp" else HIDDEN
    w = GraphWriter(kind)
    w1_shape, w2_shape = _weight_shapes(kind, n)
    w.given("up.weight", InputKind.PARAM, *w1_shape)
    w.given("down.weight", InputKind.PARAM, *w2_shape)
    x = w.given("data", InputKind.INPUT, rows, WIDE)
    target = w.given("target", InputKind.INPUT, rows, OUT)

    w1, w2 = _whole_weights(w, kind, n, "")
    w.call("aten.t.default", Ref(w1), to="up/t", shape=(WIDE, hidden))
    w.call("aten.mm.default", Ref(x), Ref("up/t"), to="up/mm", shape=(rows, hidden))
    h = w.call("aten.relu.default", Ref("up/mm"), to="act/relu", shape=(rows, hidden))
    w.call("aten.t.default", Ref(w2), to="down/t", shape=(hidden, OUT))
    y = w.call("aten.mm.default", Ref(h), Ref("down/t"), to="down/mm", shape=(rows, OUT))
    if kind == "tp":
        y = w.waited("all_reduce", y, "sum", to="down/whole", shape=(rows, OUT))
    d = w.call("aten.sub.Tensor", Ref(y), Ref(target), to="loss/sub", shape=(rows, OUT))
    w.call("aten.mul.Tensor", Ref(d), Ref(d), to="loss/mul", shape=(rows, OUT))
    w.call("aten.sum.default", Ref("loss/mul"), to="loss/sum", shape=())
    loss = w.call("aten.div.Tensor", Ref("loss/sum"), BATCH * OUT, to="loss/div", shape=())
    if kind in ("dp", "fsdp"):
        loss = w.waited("all_reduce", loss, "sum", to="loss/whole", shape=())
    if kind == "offload":
        w.call("tier.offload", Ref(h), "host", to="act/offload", shape=(rows, hidden))
        w.call("tier.wait", Ref("act/offload"), Ref(h), to="act/host", shape=(rows, hidden))

    w.phase = Phase.BACKWARD
    tangent = w.given("tangent", InputKind.TANGENT)
    if kind == "offload":
        w.call("tier.reload", Ref("act/host"), to="act/reload", shape=(rows, hidden))
        h = w.call("tier.wait", Ref("act/reload"), Ref("act/host"), to="act/again", shape=(rows, hidden))
    w.call("aten.mul.Tensor", Ref(d), Ref(tangent), to="grad(loss/mul)", shape=(rows, OUT))
    g = w.call("aten.mul.Tensor", Ref("grad(loss/mul)"), 2.0 / (BATCH * OUT), to="grad(down)", shape=(rows, OUT))
    w.call("aten.t.default", Ref(g), to="grad(down)/t", shape=(OUT, rows))
    g2 = w.call("aten.mm.default", Ref("grad(down)/t"), Ref(h), to="grad(down.weight)", shape=(OUT, hidden))
    if kind == "fsdp":
        g2 = _scatter(w, g2, n, dim=1, outer=2, shape=w2_shape)
        _, w2 = _whole_weights(w, kind, n, "~again", up=False)
    w.call("aten.mm.default", Ref(g), Ref(w2), to="grad(act)", shape=(rows, hidden))
    w.call("aten.threshold_backward.default", Ref("grad(act)"), Ref(h), 0, to="grad(up)", shape=(rows, hidden))
    w.call("aten.t.default", Ref("grad(up)"), to="grad(up)/t", shape=(hidden, rows))
    g1 = w.call("aten.mm.default", Ref("grad(up)/t"), Ref(x), to="grad(up.weight)", shape=(hidden, WIDE))
    if kind == "fsdp":
        g1 = _scatter(w, g1, n, dim=0, outer=1, shape=w1_shape)
    if kind == "dp":
        g1, g2 = _bucket(w, g1, g2)
    return w.graph(loss=loss, gradients={"up.weight": g1, "down.weight": g2}, outputs={"hidden": y})


def _weight_shapes(kind: str, n: int) -> tuple[tuple[int, int], tuple[int, int]]:
    if kind in ("fsdp", "tp"):
        return (HIDDEN // n, WIDE), (OUT, HIDDEN // n)
    return (HIDDEN, WIDE), (OUT, HIDDEN)


def _whole_weights(w: GraphWriter, kind: str, n: int, suffix: str, up: bool = True) -> tuple[str, str]:
    if kind != "fsdp":
        return "up.weight", "down.weight"
    w1 = ""
    if up:
        w1 = w.waited("all_gather", "up.weight", to=f"up.weight{suffix}/whole", shape=(HIDDEN, WIDE))
    stacked = f"down.weight{suffix}/parts"
    w.waited("all_gather", "down.weight", to=stacked, shape=(n * OUT, HIDDEN // n))
    w2 = w.call("mesh.merge", Ref(stacked), n, 1, 2, to=f"down.weight{suffix}/whole", shape=(OUT, HIDDEN))
    return w1, w2


def _scatter(w: GraphWriter, whole: str, n: int, *, dim: int, outer: int, shape: tuple[int, int]) -> str:
    if (dim, outer) != (0, 1):
        whole = w.call("mesh.stack", Ref(whole), n, dim, outer, to=f"{whole}/parts", shape=(n * shape[0], shape[1]))
    return w.waited("reduce_scatter", whole, "sum", to=f"{whole}/own", shape=shape)


def _bucket(w: GraphWriter, g1: str, g2: str) -> tuple[str, str]:
    size = HIDDEN * (WIDE + OUT)
    w.call("mesh.pack", Ref(g1), Ref(g2), to="bucket", shape=(size,))
    w.waited("all_reduce_", "bucket", "sum", to="bucket/sum", shape=(size,))
    shapes = {f"{g1}/sum": (HIDDEN, WIDE), f"{g2}/sum": (OUT, HIDDEN)}
    w.calls("mesh.unpack", Ref("bucket/sum"), tuple(shapes.values()), to=shapes)
    return f"{g1}/sum", f"{g2}/sum"


def mlp_layouts(kind: str) -> dict[str, Layout]:
    """Where inputs, and the gradients and output of `mlp(kind)`, live; on the one axis. Not named: replicated.

    The fully sharded down.weight is cut as [outer 2, rest] along dim 1: its parts are not consecutive."""
    if kind == "fsdp":
        return {"up.weight": (Shard(0),), "down.weight": (Strided(1, 2),), **_BATCH_SPLIT}
    if kind == "tp":
        return {"up.weight": (Shard(0),), "down.weight": (Shard(1),)}
    return dict(_BATCH_SPLIT) if kind == "dp" else {}


_BATCH_SPLIT: dict[str, Layout] = {"data": (Shard(0),), "target": (Shard(0),), "hidden": (Shard(0),)}


def mlp_values(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Global inputs of every kind."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"up.weight": (HIDDEN, WIDE), "down.weight": (OUT, HIDDEN), "data": (BATCH, WIDE), "target": (BATCH, OUT)}
    values = {name: torch.randn(*shape, generator=random, dtype=dtype) for name, shape in shapes.items()}
    return {**values, "tangent": torch.ones((), dtype=dtype)}


def local_inputs(kind: str, mesh: Mesh, values: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each rank is given."""
    layouts = mlp_layouts(kind)
    whole: Layout = (Replicate(),)
    return [
        {name: shard(value, layouts.get(name, whole), mesh, rank).clone() for name, value in values.items()}
        for rank in range(mesh.num_ranks)
    ]


def plain_mlp(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss, output and gradients by autograd of plain torch."""
    w1, w2 = (values[name].clone().requires_grad_() for name in ("up.weight", "down.weight"))
    y = torch.relu(values["data"] @ w1.T) @ w2.T
    loss = torch.nn.functional.mse_loss(y, values["target"])
    loss.backward()  # type: ignore[no-untyped-call]
    assert w1.grad is not None and w2.grad is not None
    return {"loss": loss.detach(), "hidden": y.detach(), "up.weight": w1.grad, "down.weight": w2.grad}


def expected_peak_bytes(graph: Graph) -> int:
    """Most bytes alive at once if every storage lives from the node that makes it to the last node that reads it or a
    view of it; inputs and what is handed back live to the end. Results of a node are made while it still reads."""
    root: dict[str, str] = {i.name: i.name for i in graph.inputs}
    for node in graph.nodes:
        base = aliased_operand(node)
        root.update({name: name if base is None else root[base] for name in node.results})
    last = {root[name]: at for at, node in enumerate(graph.nodes) for name in (*node.operands, *node.results)}
    last.update({root[name]: len(graph.nodes) for name in (*root, *graph.returned) if _lasts(graph, name)})
    alive = {i.name for i in graph.inputs}
    peak = 0
    for at, node in enumerate(graph.nodes):
        alive |= {root[name] for name in node.results}
        on_device = [
            name for name in alive if name not in graph.producers or graph.producers[name].op != "tier.offload"
        ]
        peak = max(peak, sum(graph.types[name].num_bytes for name in on_device))
        alive = {name for name in alive if last[name] > at}
    return peak


def _on_device(graph: Graph, root: str) -> bool:
    return root not in graph.producers or graph.producers[root].op != "tier.offload"


def _lasts(graph: Graph, name: str) -> bool:
    return name in graph.returned or name not in graph.producers
