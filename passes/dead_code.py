"""Remove what nobody reads."""

from dataclasses import replace

from shardwright.ir import Graph

__all__ = ["without_dead_code"]


def without_dead_code(graph: Graph) -> Graph:
    """The graph without nodes none of whose results is read or returned; every operator of the IR is pure."""
    needed = set(graph.returned)
    kept = []
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.results):
            continue
        kept.append(node)
        needed.update(node.operands)
    kept.reverse()
    named = {i.name for i in graph.inputs} | {result for node in kept for result in node.results}
    return replace(
        graph, nodes=tuple(kept), types={name: type_ for name, type_ in graph.types.items() if name in named}
    )
