"""Rank graphs of layered models as the rewriter leaves them: starts and waits side by side, reductions at the end.

Layers are `h = relu(h @ w)`, the loss is the sum of the last `h`. Every weight has a way to live on a mesh of two axes
`a` and `b`; every activation may be offloaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tests.rank_graphs import GraphWriter
from torch import Tensor

from shardwright.ir import Arg, Graph, InputKind, Mesh, Phase, Ref

MESH = Mesh(("a", "b"), (2, 2))
WAYS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "replicated": (),
    "a0": (("a", 0),),
    "b1": (("b", 1),),
    "a0b0": (("a", 0), ("b", 0)),
    "a1b0": (("a", 1), ("b", 0)),
}
"""How a weight is split: (axis, dim), outermost axis first."""


@dataclass(frozen=True)
class Layer:
    """One layer's plan."""

    way: str = "replicated"
    offload: bool = False
    watched: bool = False
    """Whether its gradient is read, in between, for an output: before the first reduction and behind it."""
    disk: bool = False
    """Whether what is offloaded lies on disk, not on the host."""


class _Builder(GraphWriter):
    """Adds what `lower` writes."""

    def pair(self, op: str, x: str, *extra: Arg, to: str, shape: tuple[int, ...]) -> str:
        family = op.split(".")[0]
        self.call(op, Ref(x), *extra, to=f"{to}.start", shape=shape)
        return self.call(f"{family}.wait", Ref(f"{to}.start"), Ref(x), to=to, shape=shape)

    def whole(self, weight: str, way: str, to: str) -> str:
        """Gather a weight, innermost axis first."""
        for axis, dim in reversed(WAYS[way]):
            shape = self.types[weight].shape
            stacked = (shape[0] * 2, *shape[1:])
            weight = self.pair("mesh.all_gather", weight, axis, to=f"{to}.{axis}", shape=stacked)
            if dim:
                shape = (shape[0], shape[1] * 2)
                weight = self.call("mesh.merge", Ref(weight), 2, dim, 1, to=f"{to}.{axis}.merge", shape=shape)
        return weight

    def watch(self, value: str) -> str:
        """A copy that is read at the very end. Merging one part is a copy."""
        return self.call("mesh.merge", Ref(value), 1, 1, 1, to=f"{value}.copy", shape=self.types[value].shape)

    def reduced(self, gradient: str, layer: Layer, watched: list[str]) -> str:
        """Sum a gradient over both axes, to the part that this rank keeps."""
        split = dict(WAYS[layer.way])
        for axis in ("a", "b"):
            shape = self.types[gradient].shape
            to = f"{gradient}.{axis}"
            if layer.watched:
                watched.append(self.watch(gradient))
            if axis not in split:
                gradient = self.pair("mesh.all_reduce", gradient, axis, "sum", to=to, shape=shape)
                continue
            if split[axis]:
                stacked = (shape[0] * 2, shape[1] // 2)
                gradient = self.call("mesh.stack", Ref(gradient), 2, 1, 1, to=f"{to}.stack", shape=stacked)
                shape = stacked
            gradient = self.pair("mesh.reduce_scatter", gradient, axis, "sum", to=to, shape=(shape[0] // 2, shape[1]))
        return gradient


def layer_graph(layers: Sequence[Layer], width: int = 8, rows: int = 3) -> Graph:
    """The rank graph of these layers."""
    b = _Builder("layers")
    b.given("x", InputKind.INPUT, rows, width)
    b.given("one", InputKind.TANGENT)
    for i, layer in enumerate(layers):
        shape = [width, width]
        for _, dim in WAYS[layer.way]:
            shape[dim] //= 2
        b.given(f"layers.{i}.w", InputKind.PARAM, *shape)
    h, saved, hosts = "x", [], {}
    for i, layer in enumerate(layers):
        w = b.whole(f"layers.{i}.w", layer.way, f"layers.{i}.w~whole")
        mm = b.call("aten.mm.default", Ref(h), Ref(w), to=f"layers.{i}/mm", shape=(rows, width))
        saved.append(h)
        if i and layers[i - 1].offload:
            tier = "disk" if layers[i - 1].disk else "host"
            hosts[h] = b.pair("tier.offload", h, tier, to=f"{h}~{tier}", shape=(rows, width))
        h = b.call("aten.relu.default", Ref(mm), to=f"layers.{i}/relu", shape=(rows, width))
    saved.append(h)
    local = b.call("aten.sum.default", Ref(h), to="loss~local", shape=())
    loss = b.pair("mesh.all_reduce", local, "a", "sum", to="loss", shape=())
    _write_backward(b, layers, saved, hosts, width, rows)
    watched: list[str] = []
    gradients = {f"layers.{i}.w": b.reduced(f"grad(layers.{i}.w)", layer, watched) for i, layer in enumerate(layers)}
    outputs = {name: b.call("aten.sum.default", Ref(name), to=f"{name}.sum", shape=()) for name in watched}
    return b.graph(loss=loss, gradients=gradients, outputs=outputs)


def _write_backward(
    b: _Builder, layers: Sequence[Layer], saved: list[str], hosts: dict[str, str], width: int, rows: int
) -> None:
    b.phase = Phase.BACKWARD
    g = b.call("aten.expand.default", Ref("one"), (rows, width), to="grad(last)", shape=(rows, width))
    again: dict[str, str] = {}
    for i in reversed(range(len(layers))):
        for name in (saved[i + 1], saved[i]):
            if name in hosts and name not in again:
                again[name] = b.pair("tier.reload", hosts[name], to=f"{name}~again", shape=(rows, width))
        out, into = again.get(saved[i + 1], saved[i + 1]), again.get(saved[i], saved[i])
        path = f"grad(layers.{i})"
        g = b.call("aten.threshold_backward.default", Ref(g), Ref(out), 0, to=f"{path}/relu", shape=(rows, width))
        w = b.whole(f"layers.{i}.w", layers[i].way, f"layers.{i}.w~again")
        turned = b.call("aten.t.default", Ref(into), to=f"{path}/h_t", shape=(width, rows))
        b.call("aten.mm.default", Ref(turned), Ref(g), to=f"grad(layers.{i}.w)", shape=(width, width))
        turned = b.call("aten.t.default", Ref(w), to=f"{path}/w_t", shape=(width, width))
        g = b.call("aten.mm.default", Ref(g), Ref(turned), to=f"{path}/mm", shape=(rows, width))


def given(graph: Graph, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random inputs for the four ranks; small integers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            i.name: torch.ones(())
            if i.kind is InputKind.TANGENT
            else torch.randint(-2, 3, graph.types[i.name].shape, generator=generator).float()
            for i in graph.inputs
        }
        for _ in range(MESH.num_ranks)
    ]
