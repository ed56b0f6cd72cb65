"""Schedule check: a rank graph's collectives can neither hang nor be read too early, and ranks agree on them.

Needs a rank graph. Gives its stream of collectives, a hash of it, or a GraphError that names the node.
Collectives match when every rank starts the same ones in the same order on every group. One graph serves all ranks, so
within a plan that holds by itself; ranks compare hashes before the first step, in case their plans differ.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from shardwright.ir import Graph, GraphError, Node
from shardwright.ir.ops import is_async_start, is_collective
from shardwright.passes.lifetimes import storage_roots

__all__ = ["Collective", "check_schedule", "check_streams", "collective_schedule", "schedule_hash"]

_WAITS: Mapping[str, str] = {"mesh.wait": "mesh.", "tier.wait": "tier."}


@dataclass(frozen=True, slots=True)
class Collective:
    """One start, as all ranks of the group must see it."""

    kind: str
    """Operator without `mesh.`."""
    axis: str
    reduce: str
    """sum, avg, max or min; empty where nothing is reduced."""
    dtype: str
    num_elements: int
    """Of what is sent."""
    name: str

    def __str__(self) -> str:
        reduce = f", {self.reduce}" if self.reduce else ""
        return f"{self.kind}({self.name}: {self.dtype} x {self.num_elements}, {self.axis}{reduce})"


def collective_schedule(graph: Graph) -> tuple[Collective, ...]:
    """Every collective in the order in which it starts."""
    return tuple(_collective(graph, node) for node in graph.nodes if is_collective(node.op))


def _collective(graph: Graph, node: Node) -> Collective:
    sent = graph.types[node.operands[0]]
    axis, reduce = str(node.args[1]), str(node.args[2]) if len(node.args) > 2 else ""
    return Collective(node.op.removeprefix("mesh."), axis, reduce, sent.dtype, sent.num_elements, node.name)


def schedule_hash(graph: Graph) -> str:
    """`sha256:` and the digest of the schedule: equal where collectives match."""
    lines = "\n".join(repr(astuple(entry)) for entry in collective_schedule(graph))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def check_streams(schedules: Sequence[tuple[Collective, ...]]) -> None:
    """Compare the schedules of all ranks. Raises GraphError at the first collective that differs."""
    for rank, schedule in enumerate(schedules):
        for number in range(max(len(schedule), len(schedules[0]))):
            expected, found = (str(s[number]) if number < len(s) else "no more" for s in (schedules[0], schedule))
            if expected != found:
                raise GraphError(
                    f"expected collective {number} of rank {rank} to be {expected}, as on rank 0, found {found};"
                    " give all ranks the same plan and model"
                )


def check_schedule(graph: Graph) -> None:
    """Every start has one wait, behind it and in its phase (a copy to the host may end in backward); what is under way
    is neither read nor overwritten.

    Raises GraphError otherwise: the rewriter or an edit of the graph is at fault.
    """
    check = _Check(storage_roots(graph))
    for node in graph.nodes:
        check.step(node)
    if check.under_way:
        start = next(iter(check.under_way.values()))
        raise _error(start, "a wait for it", "none")


@dataclass
class _Check:
    roots: Mapping[str, str]

    def __post_init__(self) -> None:
        self.under_way: dict[str, Node] = {}
        """Storage that a start fills, to the start."""
        self.sent: dict[str, Node] = {}
        """Storage that a start under way reads, to the start; of several the last."""

    def step(self, node: Node) -> None:
        if node.op in _WAITS:
            self._wait(node)
            return
        for operand in node.operands:
            filling = self.under_way.get(self.roots[operand])
            if filling is not None:
                raise _error(node, f"to read {operand} behind the wait for it", f"{filling.name} still under way")
        if is_async_start(node.op):
            self._start(node)

    def _start(self, node: Node) -> None:
        sent = self.roots[node.operands[0]]
        if node.op == "mesh.all_reduce_" and sent in self.sent:
            raise _error(node, f"to overwrite {sent} when all others have sent it", f"{self.sent[sent].name} under way")
        self.under_way[self.roots[node.name]] = node
        self.sent[sent] = node

    def _wait(self, node: Node) -> None:
        handle, sent = node.operands
        root = self.roots[handle]
        start = self.under_way.pop(root, None)
        if start is None or start.name != handle or not start.op.startswith(_WAITS[node.op]):
            raise _error(node, "to wait for a start that stands before it and has no other wait", handle)
        if start.operands[0] != sent:
            raise _error(node, f"to name {start.operands[0]}, which {handle} sends", sent)
        if start.phase is not node.phase and start.op != "tier.offload":
            raise _error(node, f"to be in {start.phase}, as its start", node.phase.value)
        if self.sent.get(self.roots[sent]) is start:
            del self.sent[self.roots[sent]]


def _error(node: Node, expected: str, found: str) -> GraphError:
    where = f"{node.op} {node.name}" + (f" of {node.module}" if node.module else "")
    return GraphError(f"expected {where} {expected}, found {found}; lower and schedule the plan again")
