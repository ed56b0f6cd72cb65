"""Repeated layers are found by structure, under whatever name has an integer in it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from shardwright.ir import Graph, Input, InputKind, Node, Phase, Ref, TensorType
from shardwright.passes.repeats import find_repeats, members


@dataclass
class Stack:
    """Layers of `relu(h * w) + h`, forward and backward; sums of gradients have no module, as captured ones."""

    path: str = "model.layers.{}"
    inner: str = "mlp"
    graph: Graph = field(init=False)

    def build(self, layers: Sequence[int], scales: dict[int, float] | None = None) -> Graph:
        kind = TensorType("f32", (4, 4))
        inputs, gradients = [Input("x", InputKind.INPUT)], {}
        forward: list[Node] = []
        backward: list[Node] = []
        values = ["x"]

        def call(to: list[Node], op: str, result: str, *args: Ref | float, module: str) -> str:
            phase = Phase.FORWARD if to is forward else Phase.BACKWARD
            to.append(Node(op, args, (), (result,), phase, module))
            values.append(result)
            return result

        h = call(forward, "aten.sin.default", "embed", Ref("x"), module="model")
        saved = []
        for i in layers:
            module = f"{self.path.format(i)}.{self.inner}"
            inputs.append(Input(f"{module}.w", InputKind.PARAM))
            values.append(f"{module}.w")
            scaled = call(forward, "aten.mul.Tensor", f"{module}/mul", Ref(h), Ref(f"{module}.w"), module=module)
            scale = (scales or {}).get(i, 2.0)
            act = call(forward, "aten.mul.Scalar", f"{module}/scale", Ref(scaled), scale, module=module)
            saved.append((module, h))
            h = call(forward, "aten.add.Tensor", f"{module}/add", Ref(act), Ref(h), module=self.path.format(i))
        g = h = call(forward, "aten.cos.default", "norm", Ref(h), module="model.norm")
        for module, before in reversed(saved):
            part = call(backward, "aten.mul.Tensor", f"grad({module}/mul)", Ref(g), Ref(f"{module}.w"), module=module)
            gradients[f"{module}.w"] = call(
                backward, "aten.mul.Tensor", f"grad({module}.w)", Ref(g), Ref(before), module=module
            )
            g = call(backward, "aten.add.Tensor", f"grad({module}/sum)", Ref(g), Ref(part), module="")
        return Graph("stack", tuple(inputs), (*forward, *backward), dict.fromkeys(values, kind), h, gradients)


def test_equal_layers_are_one_class() -> None:
    graph = Stack().build(range(5))
    (found,) = find_repeats(graph)
    assert found.path == "model.layers.*"
    assert found.layers == (0, 1, 2, 3, 4)
    module = "model.layers.3.mlp"
    assert found.values[3] == (
        f"{module}.w", f"{module}/mul", f"{module}/scale", f"{module}/add",
        f"grad({module}/mul)", f"grad({module}.w)", f"grad({module}/sum)",
    )  # fmt: skip


def test_members_say_where_a_value_stands() -> None:
    graph = Stack().build(range(5))
    where = members(find_repeats(graph))
    place = where["grad(model.layers.2.mlp.w)"]
    assert (place.class_number, place.position, place.layer) == (0, 5, 2)
    assert where["model.layers.4.mlp/mul"].position == where["model.layers.0.mlp/mul"].position
    assert set(graph.types) - set(where) == {"x", "embed", "norm"}


@pytest.mark.parametrize("path", ["h.{}", "encoder.block.{}", "{}", "any.thing.{}"])
def test_the_name_does_not_matter(path: str) -> None:
    (found,) = find_repeats(Stack(path).build(range(3)))
    assert found.layers == (0, 1, 2)
    assert found.path == path.format("*")


def test_layers_of_two_sorts_are_two_classes() -> None:
    """A constant differs in every other layer; a lone third sort is in no class."""
    graph = Stack().build(range(7), {1: 3.0, 3: 3.0, 6: 5.0})
    assert [found.layers for found in find_repeats(graph)] == [(0, 2, 4, 5), (1, 3)]
    assert "model.layers.6.mlp/mul" not in members(find_repeats(graph))


def test_types_count() -> None:
    """Layer 2 has another dtype: nothing else differs, and it is outside."""
    graph = Stack().build(range(4))
    types = {n: replace(t, dtype="f64") if n.startswith("model.layers.2.") else t for n, t in graph.types.items()}
    assert [found.layers for found in find_repeats(replace(graph, types=types))] == [(0, 1)]


def test_which_operand_is_which_counts() -> None:
    """Layer 1 adds h to itself, where the others add what they made."""
    graph = Stack().build(range(4))
    nodes = tuple(
        n.with_operands((n.operands[1], n.operands[1])) if n.name == "model.layers.1.mlp/add" else n
        for n in graph.nodes
    )
    assert [found.layers for found in find_repeats(replace(graph, nodes=nodes))] == [(0, 2, 3)]


def test_values_from_outside_are_told_apart() -> None:
    """Layer 2 reads two values from outside where the others read one twice."""
    graph = Stack().build(range(4))
    nodes = tuple(
        n.with_operands((n.operands[0], "embed")) if n.name == "model.layers.2.mlp/add" else n for n in graph.nodes
    )
    assert [found.layers for found in find_repeats(replace(graph, nodes=nodes))] == [(0, 1, 3)]


def test_a_gradient_that_is_not_there_counts() -> None:
    graph = Stack().build(range(4))
    gradients = {name: value for name, value in graph.gradients.items() if ".0." not in name}
    assert [found.layers for found in find_repeats(replace(graph, gradients=gradients))] == [(1, 2, 3)]


def test_the_outermost_integer_that_repeats_is_the_layer() -> None:
    """`stage.0.block.*` has one stage, so blocks are the layers; with two stages, stages are."""
    (found,) = find_repeats(Stack("stage.0.block.{}").build(range(3)))
    assert (found.path, found.layers) == ("stage.0.block.*", (0, 1, 2))
    (found,) = find_repeats(Stack("stage.{}", inner="block.0").build(range(2)))
    assert (found.path, found.layers) == ("stage.*", (0, 1))


def test_a_single_layer_is_no_class() -> None:
    assert find_repeats(Stack().build([3])) == ()


def test_seven_thousand_nodes_take_less_than_a_second() -> None:
    graph = Stack().build(range(1200))
    assert len(graph.nodes) > 7000
    begin = time.process_time()
    (found,) = find_repeats(graph)
    assert time.process_time() - begin < 1
    assert len(found.layers) == 1200
