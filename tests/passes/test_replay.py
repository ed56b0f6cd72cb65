"""Replay against a timeline computed by hand, and against liveness by brute force."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given as over
from hypothesis import settings
from tests.passes.layer_graphs import MESH, WAYS, Layer, layer_graph

from shardwright.ir import Graph, GraphError, InputKind, Mesh, Node, Phase, Schedule, TensorType, Tier
from shardwright.ir.cluster import Cluster, Device, Host, Link
from shardwright.ir.ops import aliased_operand
from shardwright.ir.parse import parse_graph
from shardwright.passes.copy_room import CopyRoom
from shardwright.passes.host_steps import HostSteps
from shardwright.passes.lifetimes import lifetimes
from shardwright.passes.optimizers import StepKind, optimizer_spec
from shardwright.passes.pipeline import scheduled
from shardwright.passes.prefetch import Prefetch
from shardwright.passes.replay import Replay, replay
from shardwright.passes.timeline import axis_link

BLOCK = 64
LINK = Link(1.0, 0.0, 1.0)


def cluster(overlap: float = 1.0, ranks_per_node: int = 4, host_overlap: float = 1.0) -> Cluster:
    device = Device("cpu", 2**30, 1.0, {"f32": 1.0}, 1.0, 0.0, BLOCK, False)
    inter = replace(LINK, overlap=overlap / 2)
    return Cluster("test", 4 // ranks_per_node, ranks_per_node, device, replace(LINK, overlap=overlap), inter,
                   Host(2**30, 1.0, 0.0, 0, 1.0, host_overlap))  # fmt: skip


@dataclass
class Flat:
    """A second per operator, ten for matrix products; 32 bytes copied a second, to disk 16 and from there 8; counts
    what it is asked."""

    asked: list[str] = field(default_factory=list)

    def op_seconds(self, node: Node, operands: Sequence[TensorType], results: Sequence[TensorType]) -> float:
        self.asked.append(node.op)
        return 10.0 if node.op == "aten.mm.default" else 1.0

    def collective_seconds(self, kind: str, num_bytes: int, group_sizes: tuple[int, ...], axis: int) -> float:
        self.asked.append(kind)
        return {"all_gather": 4.0, "all_reduce": 6.0, "reduce_scatter": 6.0}[kind.rstrip("_")]

    def copy_seconds(self, num_bytes: int, tier: Tier = Tier.HOST, back: bool = False) -> float:
        return num_bytes / 32 * ((4 if back else 2) if tier is Tier.DISK else 1)

    def optimizer_seconds(self, num_elements: int, state_bytes: int, on_host: bool) -> float:
        return state_bytes / 1000 * (10 if on_host else 1)


def run(
    graph: Graph,
    overlap: float = 1.0,
    tiers: Mapping[str, Tier] | None = None,
    name: str = "adamw",
    machines: Cluster | None = None,
) -> Replay:
    return replay(graph, MESH, Flat(), machines or cluster(overlap), optimizer_spec(name), tiers or {})


OVERLAPPED = """
graph "overlapped" {
  param   %p: f32[8, 8]
  input   %x: f32[8, 8]
  tangent %one: f32[]
  forward {
    %start: f32[16, 8] = mesh.all_gather(%p, "a")
    %first: f32[8, 8] = aten.relu.default(%x)
    %whole: f32[16, 8] = mesh.wait(%start, %p)
    %mm: f32[16, 8] = aten.mm.default(%whole, %first)
    %loss: f32[] = aten.sum.default(%mm)
  }
  backward {
    %q: f32[16, 8] = aten.mm.default(%whole, %first)
    %q.start: f32[8, 8] = mesh.reduce_scatter(%q, "a", "sum")
    %q.b.start: f32[16, 8] = mesh.all_reduce(%q, "b", "sum")
    %more: f32[16, 8] = aten.mm.default(%whole, %first)
    %grad: f32[8, 8] = mesh.wait(%q.start, %q)
    %other: f32[16, 8] = mesh.wait(%q.b.start, %q)
    %last.start: f32[16, 8] = mesh.all_reduce(%more, "b", "sum")
    %last: f32[16, 8] = mesh.wait(%last.start, %more)
  }
  return {
    loss %loss
    output "other" = %other
    output "last" = %last
    grad %p = %grad
  }
}
"""


def test_timeline_by_hand() -> None:
    """Gather 0-4 against relu 0-1: 3 exposed. mm 4-14, sum 14-15, q 15-25; both axes 25-31 behind more 25-35; the last
    all-reduce hides behind nothing: 35-41. Adam's state is two tensors of 64 floats and a scalar: 516 bytes."""
    found = run(parse_graph(OVERLAPPED))
    spans = {event.name: (event.stream, event.start_seconds, event.end_seconds) for event in found.events}
    assert spans == {
        "start": ("a", 0, 4),
        "first": ("compute", 0, 1),
        "mm": ("compute", 4, 14),
        "loss": ("compute", 14, 15),
        "q": ("compute", 15, 25),
        "q.start": ("a", 25, 31),
        "q.b.start": ("b", 25, 31),
        "more": ("compute", 25, 35),
        "last.start": ("b", 35, 41),
        "optimizer": ("compute", 41, 41.516),
    }
    assert found.exposed_communication_seconds == 3 + 6
    assert found.compute_seconds == 1 + 10 + 1 + 10 + 10
    assert found.optimizer_seconds == pytest.approx(0.516)
    assert found.step_seconds == pytest.approx(41.516)


def test_a_link_that_hides_half_costs_compute_the_other_half() -> None:
    """The gather: 1 + max(3, 2). Both reductions are hidden, but each takes half of its 6 seconds. The last: 6."""
    found = run(parse_graph(OVERLAPPED), overlap=0.5)
    assert found.exposed_communication_seconds == 3 + 3 + 3 + 6


def test_one_stream_serves_one_axis() -> None:
    """Two collectives of one axis queue: the second starts when the first is done."""
    found = run(parse_graph(OVERLAPPED.replace('mesh.all_reduce(%q, "b"', 'mesh.all_reduce(%q, "a"')))
    second = next(event for event in found.events if event.name == "q.b.start")
    assert (second.start_seconds, second.end_seconds) == (31, 37)


def test_an_unknown_axis_is_an_error() -> None:
    with pytest.raises(GraphError, match="expected an axis of the mesh"):
        run(parse_graph(OVERLAPPED.replace('"a"', '"tp"')))


def test_an_axis_across_nodes_has_the_slower_link() -> None:
    """On two nodes of two ranks, the outer axis crosses and the inner does not."""
    machines = cluster(ranks_per_node=2)
    assert axis_link(machines, MESH, "a") is machines.inter
    assert axis_link(machines, MESH, "b") is machines.intra
    assert axis_link(machines, Mesh(("all",), (4,)), "all") is machines.inter


def test_every_question_is_asked_once() -> None:
    """Twelve equal layers ask as much as three do: constants and shapes count, names do not."""
    asked = []
    for num_layers in (3, 12):
        prices = Flat()
        replay(layer_graph([Layer("a1b0")] * num_layers), MESH, prices, cluster(), optimizer_spec("sgd"), {})
        asked.append(sorted(prices.asked))
    assert asked[0] == asked[1]


def test_reading_one_tensor_twice_is_another_question() -> None:
    text = OVERLAPPED.replace("aten.mm.default(%whole, %first)", "aten.mul.Tensor(%whole, %whole)", 1)
    prices = Flat()
    graph = parse_graph(text.replace("aten.mm.default(%whole, %first)", "aten.mul.Tensor(%whole, %mm)"))
    replay(graph, MESH, prices, cluster(), optimizer_spec("sgd"), {})
    assert prices.asked.count("aten.mul.Tensor") == 2


def test_a_copy_to_the_host_counts_there_until_it_is_read_back() -> None:
    graph = layer_graph([Layer("replicated", offload=True), Layer("replicated")])
    found = run(graph)
    assert found.host_peak_bytes == 3 * 8 * 4
    names = [node.name for node in graph.nodes]
    begin, end = names.index("layers.0/relu~host.start"), names.index("layers.0/relu~again")
    curve = found.footprint.host_curve_bytes
    assert {position for position, value in enumerate(curve) if value} == set(range(begin, end + 1))
    assert found.exposed_copy_seconds == 6


def test_compute_loses_what_the_host_does_not_hide_of_a_copy_by_hand() -> None:
    """The copies take 3 each way, and both are waited for at once; with room, one of them hides behind a layer."""
    at_once = layer_graph([Layer("replicated", offload=True), Layer("replicated")])
    for graph, expected in ((at_once, [6, 6, 6]), (CopyRoom(2**20).run(at_once), [3, 4.5, 6])):
        found = [run(graph, machines=cluster(host_overlap=share)) for share in (1.0, 0.5, 0.0)]
        assert [one.exposed_copy_seconds for one in found] == expected


def test_compute_loses_to_a_copy_on_disk_what_it_loses_to_one_on_the_host() -> None:
    graphs = [
        CopyRoom(2**20).run(layer_graph([Layer("replicated", offload=True, disk=disk), *[Layer("replicated")] * 3]))
        for disk in (False, True)
    ]
    on_host, on_disk = (run(graph, machines=cluster(host_overlap=0.0)) for graph in graphs)
    assert on_host.exposed_copy_seconds == on_disk.exposed_copy_seconds == 6


def test_a_copy_on_disk_counts_there_in_whole_blocks_and_its_buffers_on_the_host_all_along() -> None:
    layers = [Layer("replicated", offload=True, disk=True), Layer("replicated", offload=True), Layer("replicated")]
    found, on_host = run(layer_graph(layers)), run(layer_graph([replace(layer, disk=False) for layer in layers]))
    tensor, buffers = 3 * 8 * 4, 2 * 4096 + 4096
    assert found.curve_bytes == on_host.curve_bytes
    assert (found.disk_peak_bytes, on_host.disk_peak_bytes) == (4096, 0)
    assert (found.host_peak_bytes, on_host.host_peak_bytes) == (buffers + tensor, 2 * tensor)
    assert min(found.footprint.host_curve_bytes) == buffers and min(found.footprint.disk_curve_bytes) == 0


def test_the_disk_has_one_stream_which_writes_and_reads_at_rates_of_its_own() -> None:
    """96 bytes: 3 seconds to the host and back each, on disk 6 to write and 12 to read."""
    graph = layer_graph([Layer("replicated", offload=True, disk=True), Layer("replicated", offload=True), Layer()])
    moved = {event.name: (event.stream, event.end_seconds - event.start_seconds) for event in run(graph).events}
    assert {name: moved[name] for name in moved if "~" in name and "relu" in name} == {
        "layers.0/relu~disk.start": ("disk", 6.0),
        "layers.1/relu~host.start": ("copy-out", 3.0),
        "layers.1/relu~again.start": ("copy-in", 3.0),
        "layers.0/relu~again.start": ("disk", 12.0),
    }


@pytest.mark.parametrize(("tier", "found"), [("tape", "'tape'"), ("device", "'device'")])
def test_a_copy_to_nowhere_is_an_error(tier: str, found: str) -> None:
    graph = layer_graph([Layer(offload=True), Layer()])
    nodes = tuple(
        replace(node, args=(node.args[0], tier)) if node.op == "tier.offload" else node for node in graph.nodes
    )
    with pytest.raises(GraphError, match=f"expected tier host or disk in tier.offload of .*, found {found}"):
        run(replace(graph, nodes=nodes))


def test_state_on_the_host_leaves_the_device_and_is_stepped_there() -> None:
    """Value and gradient of 256 bytes each go out, the value comes back, and the host is ten times slower."""
    graph = layer_graph([Layer()])
    kept, moved = run(graph), run(graph, tiers={"layers.0.w": Tier.HOST})
    state, scalar = 2 * 8 * 8 * 4, 4
    assert kept.curve_bytes[0] - moved.curve_bytes[0] == state + BLOCK
    assert moved.host_peak_bytes == state + scalar + (2 + 2) * 256
    assert moved.optimizer_seconds == pytest.approx(16 + 10 * kept.optimizer_seconds + 8)


BFLOAT = """
graph "bfloat16" {
  param   %w: bf16[8, 8]
  param   %scale: f32[8]
  tangent %one: f32[]
  forward {
    %mm: bf16[8, 8] = aten.mm.default(%w, %w)
    %loss: f32[] = aten.sum.default(%mm)
  }
  backward {
    %dw: bf16[8, 8] = aten.mm.default(%w, %w)
    %ds: f32[8] = aten.mul.Tensor(%scale, %scale)
  }
  return {
    loss %loss
    grad %w = %dw
    grad %scale = %ds
  }
}
"""


def test_a_master_counts_on_its_tier_and_its_gradient_is_cast_to_step() -> None:
    """Of 64 bfloat16: master and two moments of 256 bytes and a scalar's block; the float32 scale has moments alone.
    The step holds a float32 gradient. On the host: no blocks, and gradient and value staged beside it."""
    graph = parse_graph(BFLOAT)
    plain, master = run(graph, name="adamw-fused"), run(graph, name="adamw-master")
    moved = run(graph, name="adamw-master", tiers={"w": Tier.HOST})
    states = {s.name: s.num_bytes for s in master.footprint.peak_storages if s.name.startswith("state")}
    assert states == {"state(w)": 3 * 256 + BLOCK, "state(scale)": 2 * BLOCK + BLOCK}
    assert master.curve_bytes[0] - plain.curve_bytes[0] == 256 + 2 * 128
    assert master.curve_bytes[-1] - plain.curve_bytes[-1] == 256 + 2 * 128 + 256
    assert master.curve_bytes[0] - moved.curve_bytes[0] == 3 * 256 + BLOCK
    assert moved.host_peak_bytes == (3 * 256 + 4) + 2 * 128 + 256
    copied = {e.stream: (e.end_seconds - e.start_seconds) * 32 for e in moved.optimizer_events if e.name == "w"}
    assert copied["copy-out"] == copied["copy-in"] == 128


def test_parameters_without_gradient_have_no_state() -> None:
    graph = layer_graph([Layer(), Layer()])
    fewer = replace(graph, gradients={"layers.0.w": graph.gradients["layers.0.w"]})
    assert run(graph).curve_bytes[0] - run(fewer).curve_bytes[0] == 2 * 256 + BLOCK


# Brute force: which names are reachable at each moment, with no storage bookkeeping beyond sets of names.


def brute_force_bytes(graph: Graph, block: int) -> tuple[list[int], list[int], list[int]]:
    """(device, host, disk) bytes while each node runs: storages of all names that are held, found by walking views."""
    end = len(graph.nodes)
    forward_end = max((i for i, node in enumerate(graph.nodes) if node.phase is Phase.FORWARD), default=-1)
    forever = {i.name for i in graph.inputs} | {graph.loss, *graph.gradients.values(), *graph.outputs.values()}
    makers = graph.producers

    def owner(name: str) -> str:
        while name in makers and aliased_operand(makers[name]) is not None:
            name = makers[name].operands[0]
        return name

    def last_need(name: str) -> int:
        if name in forever:
            return end
        reads = [i for i, node in enumerate(graph.nodes) if name in node.operands or name in node.results]
        return max([*reads, *([forward_end] if name in graph.updates.values() else [])])

    first = {r: i for i, node in enumerate(graph.nodes) for r in node.results}
    spans = {name: (first.get(name, 0), last_need(name)) for name in graph.types}
    device, host, disk = [], [], []
    for moment in range(end):
        owners = {owner(name) for name, (begin, last) in spans.items() if begin <= moment <= last}
        copies = {name for name in owners if name in makers and makers[name].op in ("tier.offload", "tier.step")}
        on_disk = {name for name in copies if makers[name].args[1] == "disk"}
        # A step holds the parameter's value beside its gradient.
        staged = [name for name in copies if makers[name].op == "tier.step"]
        device.append(sum(-(-graph.types[name].num_bytes // block) * block for name in owners - copies))
        host.append(sum(graph.types[name].num_bytes for name in (*(copies - on_disk), *staged)))
        disk.append(4096 * len(on_disk))
    return device, host, disk


LAYERS = st.lists(
    st.builds(Layer, st.sampled_from(sorted(WAYS)), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5
)


@settings(max_examples=40, deadline=None)
@over(LAYERS, st.booleans())
def test_memory_is_that_of_brute_force(layers: list[Layer], moved: bool) -> None:
    """Sgd without momentum has neither state nor temporaries, so the whole curve is the graph's."""
    graph = layer_graph(layers)
    if moved:
        graph = scheduled(graph, Schedule(gather_bytes=300))
    device, host, disk = brute_force_bytes(graph, BLOCK)
    buffers = 3 * 4096 if any(disk) else 0
    found = run(graph, name="sgd")
    assert list(found.curve_bytes[:-1]) == device
    assert list(found.footprint.host_curve_bytes[:-1]) == [buffers + copies for copies in host]
    assert list(found.footprint.disk_curve_bytes[:-1]) == disk
    assert found.peak_bytes == max(found.curve_bytes)


@settings(max_examples=40, deadline=None)
@over(LAYERS, st.sets(st.integers(0, 4)), st.sampled_from([0, 300, 10**6]), st.sampled_from([0, 300, 10**6]))
def test_memory_with_steps_in_backward_is_that_of_brute_force(
    layers: list[Layer], stepped: set[int], bucket_bytes: int, window_bytes: int
) -> None:
    tiers = {f"layers.{index}.w": Tier.HOST for index in stepped if index < len(layers)}
    schedule = Schedule(bucket_bytes, gather_bytes=300, reduce_bytes=window_bytes)
    graph = HostSteps(tiers, window_bytes).run(scheduled(layer_graph(layers), schedule, frozenset(tiers)))
    device, host, disk = brute_force_bytes(graph, BLOCK)
    buffers = 3 * 4096 if any(disk) else 0
    found = run(graph, name="sgd", tiers=tiers)
    assert list(found.curve_bytes[:-1]) == device
    assert list(found.footprint.host_curve_bytes[:-1]) == [buffers + copies for copies in host]
    lost = found.exposed_communication_seconds + found.exposed_copy_seconds + found.exposed_host_seconds
    assert found.step_seconds == pytest.approx(found.compute_seconds + lost + found.optimizer_seconds)


@settings(max_examples=40, deadline=None)
@over(LAYERS, st.sampled_from([1.0, 0.7, 0.0]))
def test_what_must_hold_of_every_replay(layers: list[Layer], overlap: float) -> None:
    graph = scheduled(layer_graph(layers), Schedule(gather_bytes=300))
    found = run(graph, overlap)
    lost = found.exposed_communication_seconds + found.exposed_copy_seconds
    assert found.step_seconds == pytest.approx(found.compute_seconds + lost + found.optimizer_seconds)
    assert found.peak_bytes >= max(s.num_bytes for s in lifetimes(graph, BLOCK).storages if s.tier is Tier.DEVICE)
    assert sum(storage.num_bytes for storage in found.peak_storages) == found.peak_bytes
    sizes = [storage.num_bytes for storage in found.peak_storages]
    assert sizes == sorted(sizes, reverse=True)
    busy: dict[str, float] = {}
    for event in found.events:
        assert event.start_seconds >= busy.get(event.stream, 0.0), "a stream runs one thing at a time"
        busy[event.stream] = event.end_seconds


@settings(max_examples=40, deadline=None)
@over(LAYERS, st.integers(0, 4))
def test_starting_gathers_earlier_is_never_slower(layers: list[Layer], lookahead: int) -> None:
    """Where gathers alone use the links: nothing else can then be held up by one that starts early."""
    graph = layer_graph([replace(layer, way="b1") for layer in layers])
    nodes = tuple(node for node in graph.nodes if node.phase is Phase.FORWARD)
    forward = replace(graph, nodes=nodes, gradients={}, outputs={})
    seconds = [run(Prefetch(10**6, lookahead_nodes=nodes).run(forward)).step_seconds for nodes in (0, lookahead, 10**6)]
    assert seconds == sorted(seconds, reverse=True)


@settings(max_examples=20, deadline=None)
@over(LAYERS)
def test_the_schedule_is_never_slower_than_none(layers: list[Layer]) -> None:
    """With prices by the piece, buckets and overlap can only help."""
    graph = layer_graph(layers)
    assert run(scheduled(graph, Schedule(gather_bytes=300))).step_seconds <= run(graph).step_seconds


def test_step_kind_follows_the_device() -> None:
    """A loop holds temporaries of the largest parameter; foreach of all; fused of none."""
    graph = layer_graph([Layer(), Layer()])
    steps = {
        kind: replay(graph, MESH, Flat(), cluster(), optimizer_spec("adamw"), {}, kind).curve_bytes[-1]
        for kind in (None, *StepKind)
    }
    assert steps[None] == steps[StepKind.LOOP]
    assert steps[StepKind.LOOP] - steps[StepKind.FUSED] == 3 * 256
    assert steps[StepKind.FOREACH] - steps[StepKind.FUSED] == 2 * 256


def test_the_optimizer_step_can_be_the_peak() -> None:
    graph = layer_graph([Layer()], width=64, rows=1)
    found = run(graph)
    assert found.peak_phase == "optimizer"
    assert found.peak_position == len(graph.nodes)
    assert [s.name for s in found.peak_storages][:2] == ["state(layers.0.w)", "optimizer step"]
    assert graph.inputs_of(InputKind.PARAM) == ("layers.0.w",)
