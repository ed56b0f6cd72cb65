"""Random graphs and plans for the round trips of text."""

import dataclasses
import math

import pytest
from hypothesis import strategies as st

from shardwright.ir import (
    DTYPE_BYTES,
    Arg,
    Baseline,
    Budget,
    Certificate,
    Decisions,
    Fate,
    Gather,
    Graph,
    Identity,
    Input,
    InputKind,
    InputSpec,
    Layout,
    Mesh,
    Node,
    Partial,
    Phase,
    Plan,
    Prediction,
    Ref,
    Replicate,
    Schedule,
    Shard,
    Strided,
    TensorType,
    Tier,
    Token,
    divides,
    graph_hash,
)
from shardwright.ir.ops import is_view

_SEGMENTS = st.sampled_from(["model", "layers", "0", "1", "2", "3", "10", "w", "mm:2", "a#1", "q-k", "x~y", "#", "07"])
_PATHS = st.lists(_SEGMENTS, min_size=1, max_size=4).map(".".join)
_NAMES = st.one_of(
    _PATHS,
    st.builds("grad({})".format, _PATHS),
    st.builds("{}/{}".format, _PATHS, _SEGMENTS),
    st.text(min_size=1, max_size=6),
    st.text('ab.:()#/{}i+-%@" ,*0', min_size=1, max_size=8),
)
_TYPES = st.builds(
    lambda dtype, dims: TensorType(
        dtype, tuple(d for d, _ in dims), tuple(s for _, s in dims) if len(dims) > 2 else None
    ),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 4, 12]), st.integers(0, 99)), max_size=4),
)
_CONSTANTS = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.just(math.nan),
    st.booleans(),
    st.none(),
    st.text(max_size=6),
    st.builds(
        Token, st.sampled_from(["dtype.f32", "device.cpu", "strided", "true", "nan", "repeat", "i", "loss", "a b", ""])
    ),
)
_OPS = st.sampled_from(
    ["aten.mm.default", "aten.view.default", "mesh.wait", "aten.add_.Tensor", "repeat", "param", "loss"]
)
_KEYS = st.sampled_from(["dim", "dtype", "i", "repeat", "step", "none"])


def _args(names: list[str]) -> st.SearchStrategy[Arg]:
    leaves = st.one_of(_CONSTANTS, st.sampled_from(names).map(Ref)) if names else _CONSTANTS
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


@st.composite
def _graphs(draw: st.DrawFn) -> Graph:
    names = draw(st.lists(_NAMES, min_size=1, max_size=14, unique=True))
    num_inputs = draw(st.integers(0, len(names)))
    types = {name: draw(_TYPES) for name in names}
    inputs = tuple(Input(name, draw(st.sampled_from(InputKind))) for name in names[:num_inputs])
    nodes: list[Node] = []
    made, waiting = names[:num_inputs], names[num_inputs:]
    while waiting:
        count = min(len(waiting), draw(st.integers(1, 3)))
        results, waiting = tuple(waiting[:count]), waiting[count:]
        args = tuple(draw(st.lists(_args(made), max_size=3)))
        keys = draw(st.lists(_KEYS, max_size=2, unique=True))
        kwargs = tuple((key, draw(_args(made))) for key in keys)
        module = draw(st.one_of(st.just(""), _NAMES))
        nodes.append(Node(draw(_OPS), args, kwargs, results, Phase.FORWARD, module, draw(st.text(max_size=5))))
        made = [*made, *results]
    cut = draw(st.integers(0, len(nodes)))
    phased = [dataclasses.replace(n, phase=Phase.FORWARD if k < cut else Phase.BACKWARD) for k, n in enumerate(nodes)]
    pairs = st.dictionaries(st.sampled_from(names), st.sampled_from(names), max_size=3)
    outputs = draw(st.dictionaries(st.text(max_size=4), st.sampled_from(names), max_size=2))
    loss = draw(st.sampled_from(["", *names]))
    return Graph(draw(st.text(max_size=5)), inputs, tuple(phased), types, loss, draw(pairs), draw(pairs), outputs)


def _layouts(shape: tuple[int, ...], mesh: Mesh) -> st.SearchStrategy[Layout]:
    placements = [Replicate(), Partial(), Partial("max"), *(Shard(dim) for dim in range(len(shape))), Strided(0, 2)]
    each = st.sampled_from(placements)
    return st.tuples(*(each for _ in mesh.axes)).map(
        lambda layout: layout if divides(shape, layout, mesh) else (Replicate(),) * len(mesh.axes)
    )


@st.composite
def _plans(draw: st.DrawFn) -> tuple[Plan, Graph]:
    graph = draw(_graphs())
    axes = draw(st.lists(st.sampled_from(["dp", "tp", "pp", "a b"]), max_size=2, unique=True))
    mesh = Mesh(tuple(axes), tuple(draw(st.sampled_from([1, 2, 3])) for _ in axes))
    some = st.integers(0, 4).map(bool)
    layouts = {name: draw(_layouts(t.shape, mesh)) for name, t in graph.types.items() if draw(some)}
    reads = {
        node.name: tuple(draw(_layouts(graph.types[operand].shape, mesh)) for operand in node.operands)
        for node in graph.nodes
        if draw(some)
    }
    stored = [r for n in graph.nodes if n.phase is Phase.FORWARD and not is_view(n.op) for r in n.results]
    fates = {name: draw(st.sampled_from(Fate)) for name in stored if draw(st.booleans())}
    params = graph.inputs_of(InputKind.PARAM)
    gathers = {name: draw(st.sampled_from(Gather)) for name in params if draw(st.booleans())}
    states = st.sampled_from((Tier.DEVICE, Tier.HOST))
    tiers = {name: draw(states) for name in params if draw(st.booleans())}
    tiers |= {name: Tier.DISK for name, fate in fates.items() if fate is Fate.OFFLOAD and draw(st.booleans())}
    sizes = st.integers(0, 2**50)
    lying = {name: draw(states) for name in params if draw(st.booleans())}
    decisions = Decisions(mesh, layouts, reads, fates, gathers, tiers, lying, Schedule(draw(sizes), draw(sizes)))
    numbers = st.floats(allow_nan=False)
    words = st.one_of(st.sampled_from(["train", ".loss", "adamw"]), st.text(max_size=5))
    identity = Identity(
        graph_hash(graph), draw(words), draw(words), draw(words), draw(words), draw(st.integers(-5, 2**64)), 1,
        tuple(draw(st.lists(st.builds(InputSpec, words, _TYPES), max_size=2))),
    )  # fmt: skip
    certificate = st.builds(Certificate, numbers, numbers, words, words, st.booleans())
    baselines = st.builds(Baseline, words, st.none() | numbers, st.none() | sizes, words)
    plan = Plan(
        draw(words), identity, draw(words), Budget(draw(sizes), draw(sizes), draw(sizes)), decisions,
        Prediction(draw(numbers), draw(numbers), draw(sizes), draw(sizes), draw(sizes)), draw(st.none() | certificate),
        tuple(draw(st.lists(baselines, max_size=2))), tuple(draw(st.lists(st.tuples(words, words), max_size=2))),
    )  # fmt: skip
    return plan, graph


@pytest.fixture(scope="session")
def graphs() -> st.SearchStrategy[Graph]:
    return _graphs()


@pytest.fixture(scope="session")
def plans() -> st.SearchStrategy[tuple[Plan, Graph]]:
    return _plans()


@pytest.fixture(scope="session")
def deep() -> Graph:
    """Six equal layers of four operators with a head, forward and backward, each layer with two parameters."""
    return _layered(6)


def _layered(num_layers: int) -> Graph:
    square = TensorType("f32", (4, 4))
    inputs = [Input("x", InputKind.INPUT)]
    inputs += [Input(f"net.layers.{k}.{w}.weight", InputKind.PARAM) for k in range(num_layers) for w in ("up", "down")]
    nodes: list[Node] = []

    def add(op: str, operands: tuple[str, ...], result: str, phase: Phase, module: str) -> str:
        nodes.append(Node(op, tuple(map(Ref, operands)), (), (result,), phase, module, "net.py:7"))
        return result

    last = "x"
    for k in range(num_layers):
        path = f"net.layers.{k}"
        up = add("aten.mm.default", (last, f"{path}.up.weight"), f"{path}.up/mm", Phase.FORWARD, f"{path}.up")
        act = add("aten.silu.default", (up,), f"{path}.act/silu", Phase.FORWARD, f"{path}.act")
        down = add("aten.mm.default", (act, f"{path}.down.weight"), f"{path}.down/mm", Phase.FORWARD, f"{path}.down")
        last = add("aten.add.Tensor", (last, down), f"{path}/add", Phase.FORWARD, path)
    loss = last
    last = add("aten.ones_like.default", (last,), f"grad({last})", Phase.BACKWARD, "")
    gradients = {}
    for k in reversed(range(num_layers)):
        path = f"net.layers.{k}"
        gradients[f"{path}.down.weight"] = add(
            "aten.mm.default", (f"{path}.act/silu", last), f"grad({path}.down.weight)", Phase.BACKWARD, f"{path}.down"
        )
        gradients[f"{path}.up.weight"] = add(
            "aten.mm.default", (f"{path}.up/mm", last), f"grad({path}.up.weight)", Phase.BACKWARD, f"{path}.up"
        )
        last = add("aten.neg.default", (last,), f"grad({path})", Phase.BACKWARD, path)
    types = {name: square for name in (*(i.name for i in inputs), *(n.name for n in nodes))}
    return Graph("Net", tuple(inputs), tuple(nodes), types, loss=loss, gradients=gradients)
