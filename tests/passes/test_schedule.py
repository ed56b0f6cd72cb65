"""Passes that move and merge collectives: the program computes the same, in every order they make."""

import hypothesis.strategies as st
import torch
from hypothesis import given as over
from hypothesis import settings
from tests.passes.layer_graphs import MESH, WAYS, Layer, given, layer_graph

from shardwright.ir import Graph, Schedule
from shardwright.passes.base import Pass
from shardwright.passes.bucket import Bucket
from shardwright.passes.bucket_gathers import BucketGathers
from shardwright.passes.copy_room import CopyRoom
from shardwright.passes.early_starts import EarlyStarts
from shardwright.passes.footprint import footprint
from shardwright.passes.inplace import InPlace
from shardwright.passes.late_waits import LateWaits
from shardwright.passes.lifetimes import first_backward
from shardwright.passes.optimizers import StepKind, optimizer_spec
from shardwright.passes.pipeline import scheduled
from shardwright.passes.prefetch import Prefetch
from shardwright.passes.schedule_check import check_schedule
from shardwright.runtime.lockstep import run_lockstep

LAYERS = st.lists(
    st.builds(Layer, st.sampled_from(sorted(WAYS)), st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=6
)
APART = st.sampled_from([frozenset[str](), frozenset({"layers.0.w"}), frozenset({"layers.1.w", "layers.2.w"})])
PASSES: st.SearchStrategy[Pass] = st.one_of(
    st.just(EarlyStarts()),
    st.builds(Bucket, st.sampled_from([0, 300, 600, 10**6]), APART),
    st.just(InPlace()),
    st.builds(LateWaits, st.sampled_from([0, 256, 600, 10**6]), APART),
    st.builds(
        Prefetch,
        st.sampled_from([0, 256, 700, 10**6]),
        st.sampled_from([0, 5, 1000]),
    ),
    st.builds(CopyRoom, st.sampled_from([0, 4000, 6000, 10**6])),
    st.builds(BucketGathers, st.sampled_from([0, 128, 10**6]), st.sampled_from([300, 10**6])),
)


def returned(graph: Graph) -> list[dict[str, torch.Tensor]]:
    found = run_lockstep(graph, MESH, given(graph))
    names = {"loss": graph.loss, **graph.gradients, **graph.outputs}
    return [{key: values[name] for key, name in names.items()} for values in found]


def assert_same(before: Graph, after: Graph) -> None:
    for expected, found in zip(returned(before), returned(after), strict=True):
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name


@settings(max_examples=60, deadline=None)
@over(LAYERS, st.lists(PASSES, min_size=1, max_size=6))
def test_any_passes_in_any_order_keep_the_numbers(layers: list[Layer], passes: list[Pass]) -> None:
    before = layer_graph(layers)
    after = before
    for step in passes:
        after = step.run(after)
    assert_same(before, after)
    assert set(after.types) == {i.name for i in after.inputs} | set(after.producers)


@settings(max_examples=30, deadline=None)
@over(LAYERS)
def test_the_default_schedule_keeps_the_numbers(layers: list[Layer]) -> None:
    before = layer_graph(layers)
    assert_same(before, scheduled(before, Schedule(gather_bytes=300)))


def most_under_way(graph: Graph, starts: dict[str, int], newest_counts: bool) -> int:
    """Largest total, at any moment, of the bytes of those starts that are not yet waited for."""
    under_way: dict[str, int] = {}
    most = 0
    for node in graph.nodes:
        if node.op.endswith(".wait"):
            under_way.pop(node.operands[0], None)
        elif under_way and not newest_counts:
            # Right behind a start the oldest ends; the newest alone may exceed the limit.
            most = max(most, sum(under_way.values()) if len(under_way) > 1 else 0)
        if node.name in starts:
            under_way[node.name] = starts[node.name]
        if newest_counts:
            most = max(most, sum(under_way.values()))
    return most


@settings(max_examples=40, deadline=None)
@over(LAYERS, st.sampled_from([0, 100, 256, 300, 512, 800]))
def test_what_is_held_for_gradients_is_bounded(layers: list[Layer], limit: int) -> None:
    """Of reductions that end in a gradient: bytes of what was sent, where the result is elsewhere."""
    graph = LateWaits(limit).run(EarlyStarts().run(layer_graph(layers)))
    waits = [graph.producers[name] for name in graph.gradients.values()]
    sent = {wait.operands[0]: graph.types[wait.operands[1]].num_bytes for wait in waits if wait.op == "mesh.wait"}
    assert most_under_way(graph, sent, newest_counts=False) <= limit


@settings(max_examples=40, deadline=None)
@over(LAYERS, st.sampled_from([0, 100, 128, 256, 384, 512, 10**6]))
def test_what_is_prefetched_is_bounded(layers: list[Layer], limit: int) -> None:
    """On every axis, no more than the limit, or than was under way without prefetch."""
    before = LateWaits().run(EarlyStarts().run(layer_graph(layers)))
    after = Prefetch(limit).run(before)
    for axis in ("a", "b"):
        starts = {
            node.name: before.types[node.name].num_bytes
            for node in before.nodes
            if node.op == "mesh.all_gather" and node.args[1] == axis
        }
        usual = most_under_way(before, starts, newest_counts=True)
        assert most_under_way(after, starts, newest_counts=True) <= max(limit, usual)


def held_bytes(graph: Graph) -> int:
    found = footprint(graph, optimizer_spec("sgd"), StepKind.FUSED, {}, block_bytes=512)
    return found.peak_bytes


@settings(max_examples=60, deadline=None)
@over(LAYERS, st.integers(0, 12_000))
def test_copies_have_the_room_there_is_and_not_more(layers: list[Layer], room: int) -> None:
    before = LateWaits().run(EarlyStarts().run(layer_graph(layers)))
    assert held_bytes(CopyRoom(room).run(before)) <= max(held_bytes(before), room)


@settings(max_examples=30, deadline=None)
@over(LAYERS)
def test_with_enough_room_no_copy_is_waited_for_in_forward(layers: list[Layer]) -> None:
    """And a copy back starts no later than half of backward before its use."""
    graph = CopyRoom(10**9).run(LateWaits().run(EarlyStarts().run(layer_graph(layers))))
    border = first_backward(graph)
    last = max(position for position in range(border) if not graph.nodes[position].op.startswith("tier."))
    assert not any(node.op == "tier.wait" for node in graph.nodes[:last])
    positions = {node.name: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op == "tier.reload":
            used = positions[graph.nodes[graph.users[node.name][0]].name]
            copies = 2 * len(layers)
            assert positions[node.name] - border <= (used - border) / 2 + copies


@settings(max_examples=40, deadline=None)
@over(LAYERS, st.lists(PASSES, max_size=4))
def test_collectives_of_an_axis_keep_their_operands_order(layers: list[Layer], passes: list[Pass]) -> None:
    """The check holds behind every pass, and gathers of one axis never overtake each other."""
    graph = layer_graph(layers)
    for step in passes:
        graph = step.run(graph)
        check_schedule(graph)
    gathers = [node.name for node in layer_graph(layers).nodes if node.op == "mesh.all_gather"]
    found = [node.name for node in graph.nodes if node.name in set(gathers)]
    for axis in ("a", "b"):
        expected = [name for name in gathers if name in set(found) and f".{axis}.start" in name]
        assert [name for name in found if name in set(expected)] == expected
