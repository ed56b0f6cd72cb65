"""Each rule of the IR is checked: sound graphs pass, one broken rule is named with its place."""

import dataclasses

import pytest

from shardwright.ir import Graph, GraphError, parse_graph, verify_graph

RANK = """
graph "rank" {{
  param %w: f32[4]
  buffer %b: f32[4]
  input %x: f32[4]
  forward {{
    %g: f32[8] = mesh.all_gather(%w, "dp")
    %wg: f32[8] = mesh.wait(%g, %w)
    %v: f32[2, 4] = aten.view.default(%wg, [2, 4])
    {forward}
  }}
  backward {{
    %d: f32[4] = aten.neg.default(%x)  @net.head  "net.py:3"
    {backward}
  }}
  return {{
    {returned}
  }}
}}
"""


def _graph(forward: str = "", backward: str = "", returned: str = "grad %w = %d") -> Graph:
    return parse_graph(RANK.format(forward=forward, backward=backward, returned=returned))


def test_sound_graphs_pass(deep: Graph) -> None:
    verify_graph(deep)
    verify_graph(_graph())


def test_a_finished_reduction_in_place_is_sound() -> None:
    verify_graph(
        _graph(
            backward='%p: f32[4] = mesh.pack(%d) %r: f32[4] = mesh.all_reduce_(%p, "dp", "sum") '
            "%s: f32[4] = mesh.wait(%r, %p) %u: f32[4] = mesh.unpack(%s, [[4]])",
            returned="grad %w = %u",
        )
    )


BROKEN = {
    "use before": ("%a: f32[4] = aten.neg.default(%d)", "", "grad %w = %d", "found 'd', which is made later, at 'a'"),
    "unknown": ("%a: f32[4] = aten.neg.default(%wgg)", "", "grad %w = %d", "found 'wgg', which nothing makes (did"),
    "early use": (
        '%h: f32[8] = mesh.all_gather(%w, "dp") %a: f32[8] = aten.neg.default(%h) %f: f32[8] = mesh.wait(%h, %w)',
        "", "grad %w = %d", "expected a wait for 'h' before its first use, found a use at 'a'",
    ),
    "no wait": ('%h: f32[8] = mesh.all_gather(%w, "dp")', "", "grad %w = %d", "found none for the one at 'h'"),
    "wait for nothing": ("%h: f32[4] = mesh.wait(%w, %w)", "", "grad %w = %d", "found another value at 'h'"),
    "wrong wait": (
        '%h: f32[4] = tier.offload(%x, "host") %k: f32[4] = mesh.wait(%h, %x)',
        "", "grad %w = %d", "expected tier.wait for a tier.offload, found mesh.wait at 'k'",
    ),
    "wait of another": (
        '%h: f32[8] = mesh.all_gather(%w, "dp") %k: f32[8] = mesh.wait(%h, %x)',
        "", "grad %w = %d", "expected the wait to name what was sent, 'w', found 'x' at 'k'",
    ),
    "started returned": (
        "", '%r: f32[4] = mesh.all_reduce(%d, "dp", "sum") %s: f32[4] = mesh.wait(%r, %d)', "grad %w = %r",
        "expected finished values to be returned, found the started transfer at 'r'",
    ),
    "overwritten": (
        "", '%r: f32[4] = mesh.all_reduce_(%d, "dp", "sum") %s: f32[4] = mesh.wait(%r, %d) '
        "%t: f32[4] = aten.neg.default(%d)",
        "grad %w = %s", "expected no use of 'd' after 'r' overwrote it, found one at 't'",
    ),
    "overwritten view": (
        "", '%y: f32[4] = aten.detach.default(%d) %r: f32[4] = mesh.all_reduce_(%d, "dp", "sum") '
        "%s: f32[4] = mesh.wait(%r, %d) %t: f32[4] = aten.neg.default(%y)",
        "grad %w = %s", "expected no use of 'y' after 'r' overwrote it",
    ),
    "overwritten returned": (
        "", '%r: f32[4] = mesh.all_reduce_(%d, "dp", "sum") %s: f32[4] = mesh.wait(%r, %d)', "grad %w = %d",
        "expected no overwritten value to be returned, found 'd'",
    ),
    "view dtype": ("%a: f64[4] = aten.detach.default(%x)", "", "grad %w = %d", "keep dtype f32, found f64[4] of 'a'"),
    "view size": ("%a: f32[5] = aten.view.default(%x, [5])", "", "grad %w = %d", "its 4 elements (f32[4])"),
    "gradient of an input": ("", "", "grad %x = %d", "expected a gradient for a param only, found one for 'x'"),
    "gradient shape": ("", "", "grad %w = %v", "of 'w' to be f32[4], found f32[2, 4] at 'v' = aten.view.default"),
    "update of a param": ("", "", "update %w = %d", "update for a buffer only"),
    "missing return": ("", "", "loss %nothing", "expected returned values to exist, found 'nothing'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(case: str) -> None:
    forward, backward, returned, message = BROKEN[case]
    with pytest.raises(GraphError) as error:
        verify_graph(_graph(forward, backward, returned))
    assert message in str(error.value)


def test_the_place_has_operator_module_and_source() -> None:
    graph = _graph()
    types = dict(graph.types) | {"d": dataclasses.replace(graph.types["d"], dtype="f33")}
    with pytest.raises(GraphError, match="'f33' of 'd' at 'd' = aten.neg.default, module net.head, net.py:3"):
        verify_graph(dataclasses.replace(graph, types=types))


def test_phases_names_and_types_are_checked() -> None:
    graph = _graph()
    turned = dataclasses.replace(graph, nodes=(graph.nodes[-1], *graph.nodes[:-1]))
    with pytest.raises(GraphError, match="found a forward node at 'g'"):
        verify_graph(turned)
    with pytest.raises(GraphError, match="named once, found 'd'"):
        verify_graph(dataclasses.replace(graph, nodes=(*graph.nodes, graph.nodes[-1])))
    with pytest.raises(GraphError, match="found one for 'ghost', which nothing makes"):
        verify_graph(dataclasses.replace(graph, types=dict(graph.types) | {"ghost": graph.types["d"]}))
    with pytest.raises(GraphError, match="expected a type for every value, found none for 'd'"):
        verify_graph(dataclasses.replace(graph, types={k: v for k, v in graph.types.items() if k != "d"}))
