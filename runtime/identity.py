"""What a plan is for, read off a capture, and the comparison at run time: any difference is refused, by name."""

from collections.abc import Iterator

from shardwright.ir import Graph, Identity, InputKind, InputSpec, Plan, StalePlanError, graph_hash, print_graph
from shardwright.runtime.captured import Captured

__all__ = ["identify", "require_identity"]


def identify(captured: Captured, *, optimizer: str, seed: int, accumulate: int) -> Identity:
    """The identity of a plan for what was captured."""
    return Identity(
        graph_hash=graph_hash(captured.graph),
        mode="train",
        loss=captured.loss,
        optimizer=optimizer,
        dtype=str(captured.dtype).removeprefix("torch."),
        seed=seed,
        accumulate=accumulate,
        inputs=tuple(InputSpec(leaf.name, leaf.type) for leaf in captured.inputs),
    )


def require_identity(plan: Plan, graph: Graph, captured: Captured, num_ranks: int) -> None:
    """Raises StalePlanError naming every field that differs between the plan and the model at hand."""
    planned = plan.identity
    found = identify(captured, optimizer=planned.optimizer, seed=planned.seed, accumulate=planned.accumulate)
    differences = [*_fields(planned, found), *_world(plan, num_ranks)]
    if planned.graph_hash != found.graph_hash:
        differences.extend(_graphs(graph, captured.graph))
    if not differences:
        return
    lines = "\n".join(f"  {line}" for line in differences)
    raise StalePlanError(
        f"expected the model this plan was made for; these differ:\n{lines}\nplan again for what is here"
    )


def _fields(planned: Identity, found: Identity) -> Iterator[str]:
    for name in ("mode", "loss", "dtype"):
        if getattr(planned, name) != getattr(found, name):
            yield f"{name}: planned {getattr(planned, name)}, found {getattr(found, name)}"
    old = {spec.name: spec.type for spec in planned.inputs}
    new = {spec.name: spec.type for spec in found.inputs}
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            yield f"input {name}: planned {old.get(name, 'none')}, found {new.get(name, 'none')}"


def _world(plan: Plan, num_ranks: int) -> Iterator[str]:
    mesh = plan.decisions.mesh
    if mesh.num_ranks != num_ranks:
        yield f"world size: planned {mesh.num_ranks} ranks, mesh {mesh}; found {num_ranks}"


def _graphs(planned: Graph, found: Graph) -> Iterator[str]:
    """Parameters first, since they tell most; else the first line of the graph that differs."""
    kinds = (InputKind.PARAM, InputKind.FROZEN, InputKind.BUFFER)
    old = {name: planned.types[name] for name in planned.inputs_of(*kinds)}
    new = {name: found.types[name] for name in found.inputs_of(*kinds)}
    changed = [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]
    for name in changed[:5]:
        yield f"parameter {name}: planned {old.get(name, 'none')}, found {new.get(name, 'none')}"
    if len(changed) > 5:
        yield f"... and {len(changed) - 5} more parameters and buffers"
    if changed:
        return
    for number, (one, other) in enumerate(zip(print_graph(planned).splitlines(), print_graph(found).splitlines()), 1):  # noqa: B905
        if one != other:
            yield f"graph line {number}: planned `{one.strip()}`, found `{other.strip()}`"
            return
