"""Passes that move and merge collectives: the program computes the same, in every order they make."""

import hypothesis.strategies as st
import torch
from hypothesis import given as over
from hypothesis import settings
from tests.passes.layer_graphs import MESH, WAYS, Layer, given, layer_graph

from shardwright.ir import Graph
from shardwright.passes.base import Pass
from shardwright.passes.bucket import Bucket
from shardwright.passes.bucket_gathers import BucketGathers
from shardwright.passes.early_starts import EarlyStarts
from shardwright.passes.inplace import InPlace
from shardwright.passes.late_waits import LateWaits
from shardwright.passes.prefetch import Prefetch
from shardwright.passes.schedule import schedule
from shardwright.runtime.lockstep import run_lockstep

LAYERS = st.lists(st.builds(Layer, st.sampled_from(sorted(WAYS)), st.booleans(), st.booleans()), min_size=1, max_size=6)
PASSES: st.SearchStrategy[Pass] = st.one_of(
    st.just(EarlyStarts()),
    st.builds(Bucket, st.sampled_from([0, 300, 600, 10**6])),
    st.just(InPlace()),
    st.builds(LateWaits, st.sampled_from([0, 256, 600, 10**6]), st.sampled_from([0, 100, 10**6])),
    st.builds(
        Prefetch,
        st.sampled_from([0, 256, 700, 10**6]),
        st.sampled_from([0, 100, 10**6]),
        st.sampled_from([0, 5, 1000]),
    ),
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
    after = schedule(before, tuple(passes))
    assert_same(before, after)
    assert set(after.types) == {i.name for i in after.inputs} | set(after.producers)


@settings(max_examples=30, deadline=None)
@over(LAYERS)
def test_the_default_schedule_keeps_the_numbers(layers: list[Layer]) -> None:
    before = layer_graph(layers)
    assert_same(before, schedule(before))
