"""Steps on the host within backward: where they start, what they hold and how long they take, by hand."""

import pytest
from tests.passes.layer_graphs import MESH
from tests.passes.test_replay import Flat, cluster, run

from shardwright.ir import Graph, GraphError, Tier, print_graph
from shardwright.ir.parse import parse_graph
from shardwright.passes.host_steps import HostSteps, stepped_in_backward
from shardwright.passes.timeline import timeline

CHAIN = """
graph "chain" {
  param   %a: f32[8, 8]
  param   %b: f32[8, 8]
  param   %c: f32[8, 8]
  input   %x: f32[8, 8]
  tangent %one: f32[]
  forward {
    %ya: f32[8, 8] = aten.mm.default(%x, %a)
    %yb: f32[8, 8] = aten.mm.default(%ya, %b)
    %yc: f32[8, 8] = aten.mm.default(%yb, %c)
    %loss: f32[] = aten.sum.default(%yc)
  }
  backward {
    %gc: f32[8, 8] = aten.mm.default(%yb, %x)
    %hb: f32[8, 8] = aten.mm.default(%x, %c)
    %gb: f32[8, 8] = aten.mm.default(%ya, %hb)
    %ha: f32[8, 8] = aten.mm.default(%hb, %b)
    %ga: f32[8, 8] = aten.mm.default(%x, %ha)
  }
  return {
    loss %loss
    grad %a = %ga
    grad %b = %gb
    grad %c = %gc
  }
}
"""
HOST = dict.fromkeys("abc", Tier.HOST)
SIZE = 256
"""Bytes of one parameter."""


def stepped(window_bytes: int = 10 * SIZE, tiers: dict[str, Tier] = HOST) -> Graph:
    return HostSteps(tiers, window_bytes).run(parse_graph(CHAIN))


def order(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.phase == "backward"]


def test_a_step_starts_when_the_gradient_is_final_and_the_parameter_has_been_read() -> None:
    """c's gradient comes first, but hb reads c after it. Copies are waited for a gradient later, steps at the end."""
    assert order(stepped()) == [
        "gc", "hb", "c~step", "gb", "ha", "b~step", "ga", "c~sent", "a~step",
        "b~sent", "a~sent", "c~stepped", "b~stepped", "a~stepped",
    ]  # fmt: skip
    assert stepped().gradients == {"a": "a~stepped", "b": "b~stepped", "c": "c~stepped"}
    assert set(stepped_in_backward(stepped())) == set("abc")


def test_no_more_bytes_are_under_way_than_allowed() -> None:
    """With room for one gradient, the one before is stepped before the next is sent."""
    assert order(stepped(SIZE)) == [
        "gc", "hb", "c~step", "gb", "ha", "c~sent", "c~stepped", "b~step", "ga", "b~sent", "b~stepped", "a~step",
        "a~sent", "a~stepped",
    ]  # fmt: skip
    assert order(stepped(0)) == order(stepped(SIZE)), "the newest may exceed it"


def test_parameters_with_state_on_the_device_are_left_alone() -> None:
    graph = stepped(tiers={"b": Tier.HOST})
    assert graph.gradients == {"a": "ga", "b": "b~stepped", "c": "gc"}
    assert stepped(tiers={}) == parse_graph(CHAIN)


def test_the_text_of_such_a_graph_is_read_back() -> None:
    assert parse_graph(print_graph(stepped())) == stepped()


def test_gradients_die_where_they_have_been_sent() -> None:
    """Three gradients are held until the step; stepped in backward with room for one, none is."""
    late, early = (run(graph, name="sgd", tiers=HOST) for graph in (parse_graph(CHAIN), stepped(SIZE)))
    assert late.curve_bytes[-1] - early.curve_bytes[-1] == 3 * SIZE
    assert early.peak_bytes <= late.peak_bytes


def test_the_host_holds_a_gradient_and_a_value_for_each_step_under_way() -> None:
    state = 3 * (2 * SIZE + 4)
    wide, narrow = (run(stepped(w), tiers=HOST, name="adamw-fused") for w in (10 * SIZE, SIZE))
    assert wide.host_peak_bytes == state + 3 * 2 * SIZE
    assert narrow.host_peak_bytes == state + 2 * SIZE


def test_steps_hide_behind_backward_and_the_rest_is_exposed_by_hand() -> None:
    """Copies take 8, matmuls 10, a step 5.16. Forward 31; gc, hb until 51: c is sent until 59, and on the host until
    59 + 8 + 5.16 + 8 = 80.16; b is sent 71-79, on the host 80.16-101.32; ga ends at 81, a is sent until 89 and on the
    host 101.32-122.48. Compute waits for b's and a's copies 81-89, then for the last step."""
    found = run(stepped(), tiers=HOST, name="adamw-fused")
    step = 10 * (2 * SIZE + 4) / 1000
    host = 8 + step + 8
    spans = {(e.stream, e.name): (e.start_seconds, e.end_seconds) for e in found.events if e.name.endswith("~step")}
    assert spans["copy-out", "c~step"] == (51, 59)
    assert spans["host", "c~step"] == pytest.approx((59, 59 + host))
    assert spans["host", "a~step"] == pytest.approx((59 + 2 * host, 59 + 3 * host))
    assert found.exposed_copy_seconds == 89 - 81
    assert found.step_seconds == pytest.approx(59 + 3 * host)
    assert found.exposed_host_seconds == pytest.approx(59 + 3 * host - 89)
    assert found.optimizer_seconds == 0
    late = run(parse_graph(CHAIN), tiers=HOST, name="adamw-fused")
    assert late.step_seconds == pytest.approx(81 + 3 * (8 + host))


LYING = CHAIN.replace(
    "    %ya: f32[8, 8] = aten.mm.default(%x, %a)",
    """    %a~reload: f32[8, 8] = tier.reload(%a)
    %a~here: f32[8, 8] = tier.wait(%a~reload, %a)
    %ya: f32[8, 8] = aten.mm.default(%x, %a~here)""",
)
"""The same with parameter a on the host."""


def test_a_parameter_that_lies_on_the_host_is_stepped_where_it_is_by_hand() -> None:
    """Its copy to the device holds forward up by 8; its value is copied neither out nor back. Nobody stages it."""
    graph = HostSteps(HOST, 10 * SIZE).run(parse_graph(LYING))
    found, there = (run(g, tiers=HOST, name="adamw-fused") for g in (graph, stepped()))
    assert found.step_seconds == pytest.approx(there.step_seconds + 8 - 2 * 8)
    assert found.host_peak_bytes == there.host_peak_bytes  # in the place of what was staged
    assert found.curve_bytes[-1] == there.curve_bytes[-1] - SIZE
    spans = {(e.stream, e.name): (e.start_seconds, e.end_seconds) for e in found.events}
    assert spans["copy-in", "a~reload"] == (0, 8)


def test_where_ranks_take_all_cores_no_step_hides() -> None:
    """It is as long as with all of it after backward."""
    graphs, busy = (parse_graph(CHAIN), stepped()), cluster(host_overlap=0.0)
    late, early = (run(graph, tiers=HOST, name="adamw-fused", machines=busy) for graph in graphs)
    assert early.step_seconds == pytest.approx(late.step_seconds)


def test_a_graph_that_steps_needs_an_optimizer_to_be_timed() -> None:
    with pytest.raises(GraphError, match="expected an optimizer for tier.step"):
        timeline(stepped(), MESH, Flat(), cluster())
