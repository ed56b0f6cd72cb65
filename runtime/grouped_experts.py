"""Mixtures of experts of transformers outside bfloat16: grouped matrix products as torch's own operator.

Traced in another dtype than bfloat16, transformers calls operators of its own, loops over experts that no sharding
rule knows, because Inductor lacks the product. The kernel itself takes every dtype on a CPU and computes the same, and
DTensor knows it. Graph in, graph out.
"""

from dataclasses import replace

from shardwright.ir import Graph, Node, Ref, TensorType, contiguous_strides

__all__ = ["with_grouped_products"]

_FORWARD = "transformers.grouped_mm_fallback.default"
_BACKWARD = "transformers.grouped_mm_fallback_backward.default"
_PRODUCT = "aten._grouped_mm.default"


def with_grouped_products(graph: Graph) -> Graph:
    """Replace both operators; values keep their names."""
    types = dict(graph.types)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op == _FORWARD:
            nodes.append(replace(node, op=_PRODUCT))
        elif node.op == _BACKWARD:
            nodes.extend(_backward(node, types))
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=types)


def _backward(node: Node, types: dict[str, TensorType]) -> list[Node]:
    """Of y = x @ w per group: grad_x = grad_y @ w^T and grad_w = x^T @ grad_y, per group."""
    x, weight, ends, grad = node.operands
    grad_x, grad_weight = node.results

    def transposed(name: str) -> Node:
        type_ = types[name]
        *rest, rows, columns = type_.shape
        *steps, down, along = type_.strides or contiguous_strides(type_.shape)
        result = f"{node.name}.transposed {name}"
        types[result] = TensorType.of(type_.dtype, (*rest, columns, rows), (*steps, along, down))
        return replace(node, op="aten.transpose.int", args=(Ref(name), -2, -1), kwargs=(), results=(result,))

    def product(left: str, right: str, result: str) -> Node:
        return replace(node, op=_PRODUCT, args=(Ref(left), Ref(right), Ref(ends)), kwargs=(), results=(result,))

    weight_t, x_t = transposed(weight), transposed(x)
    return [weight_t, product(grad, weight_t.name, grad_x), x_t, product(x_t.name, grad, grad_weight)]
