"""What a plan's text leaves out: the layouts that follow from the graph and the other lines, without any rule.

- a parameter, buffer or input without a line is whole on every rank;
- a node without a line reads every operand as it was produced;
- a result without a line has the layout in which its node reads its first operand of the same shape, or is whole.
"""

from collections.abc import Mapping

from shardwright.ir.graph import Graph, Node
from shardwright.ir.placements import Layout, Mesh, replicated

__all__ = ["complete", "default_layout", "default_reads"]


def default_reads(node: Node, layouts: Mapping[str, Layout], mesh: Mesh) -> tuple[Layout, ...]:
    whole = replicated(mesh)
    return tuple([layouts.get(operand, whole) for operand in node.operands])


def default_layout(graph: Graph, node: Node, result: str, reads: tuple[Layout, ...] | None, mesh: Mesh) -> Layout:
    shape = graph.types[result].shape
    for operand, layout in zip(node.operands, reads or (), strict=False):
        if graph.types[operand].shape == shape:
            return layout
    return replicated(mesh)


def complete(
    graph: Graph,
    mesh: Mesh,
    layouts: Mapping[str, Layout | None],
    reads: Mapping[str, tuple[Layout, ...] | None],
) -> tuple[dict[str, Layout], dict[str, tuple[Layout, ...]]]:
    """Layouts and reads of the whole graph from those with a line; None there means that there is to be none."""
    all_layouts: dict[str, Layout] = {}
    all_reads: dict[str, tuple[Layout, ...]] = {}

    def put_layout(name: str, layout: Layout | None) -> None:
        if layout is not None:
            all_layouts[name] = layout

    for given in graph.inputs:
        put_layout(given.name, layouts.get(given.name, replicated(mesh)))
    for node in graph.nodes:
        read = reads[node.name] if node.name in reads else default_reads(node, all_layouts, mesh)
        if node.results and read is not None:
            all_reads[node.name] = read
        for result in node.results:
            default = default_layout(graph, node, result, read, mesh)
            put_layout(result, layouts.get(result, default))
    return all_layouts, all_reads
