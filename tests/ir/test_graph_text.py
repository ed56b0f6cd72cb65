"""Graph text: what is printed parses back to the same graph, equal layers print once, errors show the place."""

import contextlib
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.ir import (
    Graph,
    GraphError,
    Node,
    Phase,
    Ref,
    TensorType,
    TextError,
    Token,
    graph_hash,
    parse_graph,
    print_graph,
)

LIMITS = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@LIMITS
@given(data=st.data())
def test_any_graph_survives_print_and_parse(graphs: st.SearchStrategy[Graph], data: st.DataObject) -> None:
    """Compared by `repr`, which tells 1 from 1.0 and True, and 0.0 from -0.0, and holds nan equal to itself."""
    graph = data.draw(graphs)
    text = print_graph(graph)
    again = parse_graph(text)
    assert repr(again) == repr(graph)
    assert print_graph(again) == text
    assert text.isascii()


@LIMITS
@given(at=st.integers(0, 1400), cut=st.integers(0, 4), put=st.text('%{}()[]"\\\\.,:=@#i1- \n\0', max_size=3))
def test_a_spoiled_text_is_read_or_refused_but_never_fails_otherwise(deep: Graph, at: int, cut: int, put: str) -> None:
    text = print_graph(deep)
    with contextlib.suppress(TextError):
        parse_graph(text[:at] + put + text[at + cut :])


def test_lists_nested_without_end_are_refused() -> None:
    with pytest.raises(TextError, match="nested less deeply"):
        parse_graph(f'graph "G" {{ forward {{ %y: f32[2] = aten.a({"[" * 9999}{"]" * 9999}) }} }}')


def _constant(arg: object) -> Graph:
    node = Node("aten.full.default", ((2,), arg), (("dtype", Token("dtype.f32")),), ("y",))  # type: ignore[arg-type]
    return Graph("G", (), (node,), {"y": TensorType("f32", (2,))})


@pytest.mark.parametrize(
    "value", [1e-06, 1.0, 1, True, -0.0, float("inf"), float("-inf"), 1e300, None, 'a\n"b', "%x", -7]
)
def test_a_constant_keeps_its_kind_and_value(value: object) -> None:
    found = parse_graph(print_graph(_constant(value))).nodes[0].args[1]
    assert (type(found), repr(found)) == (type(value), repr(value))


def test_a_line_reads_as_designed(deep: Graph) -> None:
    call = "%net.layers.0.up/mm: f32[4, 4] = aten.mm.default(%x, %net.layers.0.up.weight)"
    assert f'    {call}  @net.layers.0.up  "net.py:7"' in print_graph(deep).split("\n")


def test_equal_layers_print_once_forward_and_backward(deep: Graph) -> None:
    text = print_graph(deep)
    for line in (
        "  repeat i = 0..5 {",
        "    param   %net.layers.{i}.up.weight: f32[4, 4]",
        "    repeat i = 1..5 {",
        "      %net.layers.{i}/add: f32[4, 4] = aten.add.Tensor(%net.layers.{i-1}/add, %net.layers.{i}.down/mm)",
        "    repeat i = 4..0 {",
        "      %grad(net.layers.{i}): f32[4, 4] = aten.neg.default(%grad(net.layers.{i+1}))",
        "      grad %net.layers.{i}.up.weight = %grad(net.layers.{i}.up.weight)",
    ):
        assert line in text
    assert parse_graph(text) == deep


def test_layers_that_differ_by_kind_fold_by_pairs() -> None:
    """Local and global attention in turn: the step is two layers."""
    nodes, last = [], "x"
    for k in range(8):
        for op in ("aten.relu.default", "aten.local.default" if k % 2 else "aten.global.default"):
            nodes.append(Node(op, (Ref(last),), (), (f"h.{k}/{op[5:8]}",), Phase.FORWARD, f"h.{k}"))
            last = nodes[-1].name
    square = TensorType("f32", (2, 2))
    graph = Graph("G", (), tuple(nodes), {node.name: square for node in nodes})
    text = print_graph(graph)
    assert "step 2 {" in text
    assert parse_graph(text) == graph


def test_numbers_of_experts_stay_when_layers_move() -> None:
    nodes = [
        Node("aten.relu.default", (Ref(f"x.{k}"),), (), (f"h.{k}.experts.{e}/relu",))
        for k in range(5)
        for e in range(4)
    ]
    graph = Graph("G", (), tuple(nodes), {node.name: TensorType("f32", (2,)) for node in nodes})
    text = print_graph(graph)
    assert "%h.{i}.experts.3/relu: f32[2] = aten.relu.default(%x.{i})" in text
    assert parse_graph(text) == graph


def _big(folds: bool) -> Graph:
    square = TensorType("bf16", (8192, 4096))
    nodes, last = [], "x"
    for k in range(80):
        path = f"model.layers.{k}" if folds else f"model.layer{k}x{k * k % 97}"
        for j in range(88):
            node = Node(
                "aten.add.Tensor", (Ref(last), 1.5, (2, 3)), (), (f"{path}.mlp/add:{j + 2}",), module=f"{path}.mlp"
            )
            nodes.append(node)
            last = node.name
    return Graph("Big", (), tuple(nodes), {node.name: square for node in nodes}, loss=last)


@pytest.mark.parametrize(("folds", "most_lines"), [(True, 300), (False, 7100)])
def test_seven_thousand_nodes_print_in_3_and_parse_in_10_seconds(folds: bool, most_lines: int) -> None:
    """Processor seconds, as other work may share the machine."""
    graph = _big(folds)
    started = time.process_time()
    text = print_graph(graph)
    printed = time.process_time()
    again = parse_graph(text)
    parsed = time.process_time()
    assert again == graph
    assert text.count("\n") < most_lines
    assert printed - started < 3 and parsed - printed < 10


def test_the_hash_is_of_the_text_and_the_same_in_every_process(deep: Graph) -> None:
    code = "import sys; from shardwright import ir; print(ir.graph_hash(ir.parse_graph(sys.stdin.read())))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], input=print_graph(deep), env={"PYTHONHASHSEED": seed}, text=True,
            capture_output=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {graph_hash(deep)}
    assert graph_hash(deep).startswith("sha256:")


ERRORS = {
    "param %x: f99[2]": ("expected a dtype of f64", "f99[2]"),
    "param %x f32[2]": ("expected ':', found", "f32[2]"),
    "forward { %y: f32[2] = aten.mm.default(%x, , 3) }": ("found ','", ", 3) }"),
    "forward { %y.{i}: f32[2] = aten.mm.default(%x) }": ("expected {i} only inside of a repeat", "%y.{i}"),
    "forward { %y: f32[2] = aten.a(%x)  %y: f32[2] = aten.a(%x) }": ("found a second 'y'", "%y: f32[2] = aten.a(%x) }"),
    "repeat i = 0..3 { param %x.{i-1}: f32[2] }": ("expected layer numbers of 0 or more, found {i-1} = -1", "%x.{i-1}"),
    "repeat i = 0..99999999 { param %x.{i}: f32[2] }": ("expected repeats of at most", "0..99999999"),
    "repeat i = 0..3 step 0 { param %x.{i}: f32[2] }": ("expected a step of 1 or more", "0 { param"),
    'param %"\\q": f32[2]': ("expected text quoted as in JSON", '%"'),
    "return { loss %x loss %y }": ("expected one loss line", "%y }"),
}


@pytest.mark.parametrize("body", ERRORS)
def test_an_error_shows_the_line_and_a_caret_under_the_place(body: str) -> None:
    message, at = ERRORS[body]
    with pytest.raises(TextError) as error:
        parse_graph(f'graph "G" {{\n  {body}\n}}\n', "net.graph")
    first, place, line, caret = str(error.value).split("\n")
    assert message in first
    assert place.startswith("  at net.graph:2:")
    assert line == f"    {body}"
    assert line[caret.index("^") :].startswith(at)


def test_a_text_that_ends_early_says_so() -> None:
    with pytest.raises(TextError, match=r"found none: the file is cut off; .*\n  at <graph>:2:"):
        parse_graph('graph "G" {\n  param %x: f32[2]\n')


def test_a_graph_without_a_type_cannot_be_printed() -> None:
    graph = Graph("G", (), (Node("aten.a", (), (), ("y",)),), {})
    with pytest.raises(GraphError, match="expected a type for every value, found none for 'y'"):
        print_graph(graph)
