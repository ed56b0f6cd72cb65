"""Whether every operator of a plan may run as the plan says: what makes a line edited by hand legal."""

from shardwright.ir import Graph, Layout, Plan, PlanError, divides, format_layout
from shardwright.passes.strategies import Rules

__all__ = ["require_legal"]


def require_legal(plan: Plan, graph: Graph, rules: Rules) -> None:
    """Raises PlanError naming the first operator that the rules do not allow so, and what they allow."""
    decisions = plan.decisions
    mesh = decisions.mesh
    for name, layout in decisions.layouts.items():
        if len(layout) != len(mesh.sizes) or not divides(graph.types[name].shape, layout, mesh):
            raise PlanError(
                f"expected a layout of {name} {graph.types[name]} that cuts it evenly over mesh {mesh},"
                f" found {format_layout(layout)}"
            )
    for node in graph.nodes:
        reads = decisions.reads[node.name]
        results = tuple(decisions.layouts[result] for result in node.results)
        for axis, size in enumerate(mesh.sizes):
            allowed = rules.strategies(graph, node, size)
            found = (tuple(r[axis] for r in reads), tuple(r[axis] for r in results))
            if found not in {(s.reads, s.results) for s in allowed}:
                raise PlanError(
                    f"expected {node.name} ({node.op}) to run on axis {mesh.axes[axis]} in a way its rules allow, found"
                    f" {_call(found[0], found[1])}; allowed: {'; '.join(_call(s.reads, s.results) for s in allowed)}"
                )


def _call(reads: Layout, results: Layout) -> str:
    return f"{', '.join(map(str, reads)) or 'nothing'} -> {', '.join(map(str, results))}"
