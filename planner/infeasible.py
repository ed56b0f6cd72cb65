"""What to say when nothing fits: the smallest budget that works, what takes the room, and the cheapest ways out."""

from shardwright.ir import (
    DTYPE_BYTES,
    Budget,
    Clip,
    Graph,
    InfeasibleError,
    InputKind,
    TensorType,
    Tier,
    format_size,
    local_shape,
    parse_size,
)
from shardwright.planner.candidates import Candidate
from shardwright.planner.formulation import Machine

__all__ = ["infeasible", "smallest_budget"]

NUM_CONSUMERS = 3
NEARLY_ALL = 0.9


def smallest_budget(candidate: Candidate) -> int:
    """The candidate's peak, rounded up to a size that prints in three digits and is read back as what it is."""
    peak_bytes = candidate.replay.peak_bytes
    tried = peak_bytes
    while (shown := parse_size(format_size(tried))) < peak_bytes:
        tried += max(1, peak_bytes // 2000)
    return shown


def infeasible(smallest: Candidate, graph: Graph, budget: Budget, machine: Machine) -> InfeasibleError:
    """`smallest` is the plan with the lowest peak that was found."""
    needed = smallest_budget(smallest)
    lines = [
        f"expected a budget of at least {format_size(needed)} a rank, found {format_size(budget.device_bytes)}"
        f" with {format_size(budget.host_bytes)} of host memory{_disk(budget)}: the smallest that works is"
        f" {format_size(needed)}",
        *_always_held(smallest, graph, budget, machine),
        "largest consumers at its peak:",
        *(f"  {name}  {format_size(size)}" for name, size in _consumers(smallest)),
        "ways out:",
        *(f"  {way}" for way in _ways_out(smallest, graph, budget, machine)),
    ]
    return InfeasibleError("\n".join(lines), needed)


def _disk(budget: Budget) -> str:
    return f" and {format_size(budget.disk_bytes)} of disk" if budget.disk_bytes else ""


def _always_held(smallest: Candidate, graph: Graph, budget: Budget, machine: Machine) -> list[str]:
    """Where no step fits however little it keeps: the plan's own shards of parameters, gradients and state do not."""
    decisions, held = smallest.decisions, 0
    for name in graph.inputs_of(InputKind.PARAM, InputKind.FROZEN, InputKind.BUFFER):
        whole = graph.types[name]
        local = TensorType(whole.dtype, local_shape(whole.shape, decisions.layouts[name], decisions.mesh))
        if decisions.parameters.get(name) is Tier.HOST:
            continue
        held += local.num_bytes
        if name in graph.gradients:
            on_device = decisions.tiers.get(name, Tier.DEVICE) is Tier.DEVICE
            state_bytes = machine.optimizer.state_bytes(local.num_elements, DTYPE_BYTES[local.dtype])
            held += local.num_bytes + (state_bytes if on_device else 0)
    if held <= budget.device_bytes:
        return []
    return [f"parameters, gradients and optimizer state alone take {format_size(held)} of it"]


def _consumers(candidate: Candidate) -> list[tuple[str, int]]:
    return [(s.name, s.num_bytes) for s in candidate.replay.peak_storages[:NUM_CONSUMERS]]


def _ways_out(smallest: Candidate, graph: Graph, budget: Budget, machine: Machine) -> list[str]:
    """From the cheapest to the dearest."""
    params = set(graph.inputs_of(InputKind.PARAM, InputKind.FROZEN))
    held = sum(graph.types[name].num_bytes for name in params)
    trained = [graph.types[name] for name in graph.inputs_of(InputKind.PARAM)]
    states = sum(machine.optimizer.state_bytes(kind.num_elements, DTYPE_BYTES[kind.dtype]) for kind in trained)
    ranks = max(smallest.decisions.mesh.num_ranks, 1)
    missing = smallest.replay.peak_bytes - budget.device_bytes
    ways = [f"give {format_size(smallest_budget(smallest))} a rank: planning at that budget succeeds"]
    if budget.host_bytes == 0:
        ways.append(f"let {format_size(states // ranks)} or more of host memory hold optimizer state: --host SIZE")
    elif smallest.replay.host_peak_bytes > NEARLY_ALL * budget.host_bytes or budget.host_bytes < states // ranks:
        ways.append(
            f"raise --host above {format_size(budget.host_bytes)}:"
            f" optimizer state takes {format_size(states // ranks)} a rank"
        )
    if budget.host_bytes and machine.clip is not Clip.NONE:
        ways.append(
            f"let parameters lie on the host as well, {format_size(held // ranks)} a rank: --clip none, for a script"
            " that leaves gradients to the optimizer"
        )
    if not budget.disk_bytes and machine.cluster.disk is not None:
        ways.append("let saved activations go to disk: --disk SIZE, with some host memory to pass through")
    if smallest.replay.disk_peak_bytes > NEARLY_ALL * budget.disk_bytes:
        ways.append(f"raise --disk above {format_size(budget.disk_bytes)}: the smallest plan fills it")
    moving = smallest.replay.peak_bytes - (2 * held + states) // ranks
    if moving > missing > 0:
        ways.append(f"plan a smaller batch: activations take about {format_size(moving)} of the peak")
    ways.append(
        f"use more ranks than {ranks}: parameters, gradients and state take about"
        f" {format_size((2 * held + states) // ranks)} a rank"
    )
    return ways
