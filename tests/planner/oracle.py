"""The documented objective and memory of a plan, computed directly from decisions: no program, no solver, no flows.

For graphs without classes of layers. Seconds of redistributions are written out by hand here, per pair of placements.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.ir import (
    Decisions,
    Fate,
    Graph,
    InputKind,
    Layout,
    Node,
    Partial,
    Phase,
    Placement,
    Replicate,
    TensorType,
    Tier,
    local_shape,
    replicated,
)
from shardwright.ir.ops import aliased_operand, is_view
from shardwright.planner.formulation import Machine

__all__ = ["Judged", "judge_directly", "reachable_directly", "transfer_seconds"]

HIDDEN, GB, PEAK = 1e-3, 1e9, 1e-5
DROPPED, SPILLED = "drop", "spill"


@dataclass(frozen=True)
class Judged:
    objective_ms: float
    """Without the weight of the peak."""
    peak_gb: float

    @property
    def total_ms(self) -> float:
        return self.objective_ms + PEAK * self.peak_gb


def reachable_directly(source: Layout, target: Layout) -> bool:
    return all(p == q or not isinstance(q, Partial) for p, q in zip(source, target, strict=True))


@dataclass
class _Judge:
    graph: Graph
    decisions: Decisions
    machine: Machine
    fates: Mapping[str, Fate | str]
    """Also `drop`, which decisions do not tell from keep, and `spill`: offloaded to disk."""
    kept: frozenset[tuple[str, Layout]]
    """Redistributed copies kept for backward: value and layout."""
    followers: frozenset[str]
    """Nodes that always run in the layout of their operand, and so read no copy."""
    roots: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh, self.prices = self.decisions.mesh, self.machine.prices
        for node in self.graph.nodes:
            base = aliased_operand(node)
            for result in node.results:
                self.roots[result] = result if base is None else self.roots.get(base, base)

    def local(self, value: str, layout: Layout | None = None) -> TensorType:
        whole = self.graph.types[value]
        return TensorType(whole.dtype, local_shape(whole.shape, layout or self.decisions.layouts[value], self.mesh))

    def op_seconds(self, node: Node) -> float:
        if is_view(node.op):
            return 0.0
        operands = tuple(
            self.local(name, layout)
            for name, layout in zip(node.operands, self.decisions.reads[node.name], strict=True)
        )
        return self.prices.op_seconds(node, operands, tuple(self.local(name) for name in node.results))

    def moves(self) -> dict[tuple[str, Layout, Phase], list[int]]:
        """(value, layout it is read in, phase) to the positions of its readers, redistributed ones only."""
        found: dict[tuple[str, Layout, Phase], list[int]] = {}
        for position, node in enumerate(self.graph.nodes):
            for value, layout in zip(node.operands, self.decisions.reads[node.name], strict=True):
                if layout == self.decisions.layouts[value]:
                    continue
                found.setdefault((value, layout, node.phase), []).append(position)
                if node.phase is Phase.FORWARD and is_view(node.op):
                    later = [i for i in self.uses_of_views(node) if self.graph.nodes[i].phase is Phase.BACKWARD]
                    if later:
                        found.setdefault((value, layout, Phase.BACKWARD), []).extend(later)
        return found

    def uses_of_views(self, node: Node) -> list[int]:
        views = list(node.results)
        for view in views:
            for user in self.graph.users.get(view, ()):
                if is_view(self.graph.nodes[user].op):
                    views.extend(self.graph.nodes[user].results)
        return [user for view in views for user in self.graph.users.get(view, ())]

    def seconds(self) -> float:
        compute = {phase: 0.0 for phase in Phase}
        for node in self.graph.nodes:
            compute[node.phase] += self.op_seconds(node)
        total = sum(compute.values())
        hidden = {phase: 0.0 for phase in Phase}
        params = set(self.graph.inputs_of(InputKind.PARAM, InputKind.FROZEN))
        for value, layout, phase in self.moves():
            seconds = self.move_seconds(value, layout)
            if phase is Phase.BACKWARD and (value, layout) in self.kept:
                continue
            if value in params:
                hidden[phase] += seconds
            else:
                total += seconds
        for param, gradient in self.graph.gradients.items():
            if self.decisions.layouts[param] != self.decisions.layouts[gradient]:
                hidden[Phase.BACKWARD] += self.move_seconds(gradient, self.decisions.layouts[param])
        whole = replicated(self.mesh)
        for value in dict.fromkeys(self.graph.outputs.values()):
            if self.decisions.layouts[value] != whole:
                total += self.move_seconds(value, whole)
        again = self.recompute_seconds()
        compute[Phase.BACKWARD] += again[0]
        total += again[0] + again[1]
        overlap = self.machine.cluster.intra.overlap
        for phase, traffic in hidden.items():
            total += max(0.0, overlap * traffic - compute[phase]) + (1 - overlap + HIDDEN) * traffic
        for fate, tier in ((Fate.OFFLOAD, Tier.HOST), (SPILLED, Tier.DISK)):
            sizes = [self.local(v).num_bytes for v in self.with_fate(fate)]
            for phase, seconds in compute.items():
                copies = sum(self.prices.copy_seconds(size, tier, phase is Phase.BACKWARD) for size in sizes)
                lost = (1 - self.machine.cluster.host.overlap) * sum(map(self.prices.copy_seconds, sizes))
                total += max(0.0, copies - lost - seconds) + lost + HIDDEN * copies if copies else 0.0
        return total + self.optimizer_seconds()

    def move_seconds(self, value: str, layout: Layout) -> float:
        return transfer_seconds(
            self.graph.types[value], self.decisions.layouts[value], layout, self.decisions, self.machine
        )

    def with_fate(self, fate: Fate | str) -> list[str]:
        return [value for value, has in self.fates.items() if has == fate]

    def recompute_seconds(self) -> tuple[float, float]:
        """Of the operators, and of the redistributions that they read."""
        operators = moves = 0.0
        params = set(self.graph.inputs_of(InputKind.PARAM))
        for value in self.with_fate(Fate.RECOMPUTE):
            node = self.graph.producers[value]
            operators += self.op_seconds(node)
            reads = zip(node.operands, self.decisions.reads[node.name], strict=True)
            for operand, layout in dict.fromkeys(reads):
                if operand not in params and layout != self.decisions.layouts[operand]:
                    moves += self.move_seconds(operand, layout)
        return operators, moves

    def optimizer_seconds(self) -> float:
        total = 0.0
        for param in self.graph.inputs_of(InputKind.PARAM):
            local = self.local(param)
            state = self.machine.optimizer.state_bytes(local.num_elements, 4)
            on_host = self.decisions.tiers.get(param) is Tier.HOST
            total += self.prices.optimizer_seconds(local.num_elements, state, on_host)
            total += 2 * self.prices.copy_seconds(local.num_bytes) if on_host else 0.0
        return total

    def steps(self) -> tuple[list[int], dict[str, tuple[int, int]]]:
        """When every node and the optimizer run, and when backward first and last has each forward storage in use.

        Before a node runs, what it needs is made again, each in a step of its own, in the order of forward.
        """
        steps: list[int] = []
        used: dict[str, tuple[int, int]] = {}
        forward = [n.name for n in self.graph.nodes if n.phase is Phase.FORWARD and aliased_operand(n) is None]
        clock = 0
        for node in self.graph.nodes:
            if node.phase is Phase.BACKWARD:
                wanted = self.made_again_for(node, used)
                for name in (name for name in forward if name in wanted):
                    used[name] = (clock, clock)
                    self.use(used, self.graph.producers[name], clock, self.fates.get(name) == Fate.RECOMPUTE)
                    clock += 1
                self.use(used, node, clock, True)
            steps.append(clock)
            clock += 1
        return [*steps, clock], used

    def made_again_for(self, node: Node, made: Mapping[str, tuple[int, int]]) -> set[str]:
        wanted: set[str] = set()
        waiting = [node]
        while waiting:
            for name in self.forward_storages(waiting.pop()):
                if self.fates.get(name, Fate.KEEP) in (Fate.KEEP, DROPPED) or name in made or name in wanted:
                    continue
                wanted.add(name)
                waiting.extend([self.graph.producers[name]] if self.fates[name] == Fate.RECOMPUTE else [])
        return wanted

    def use(self, used: dict[str, tuple[int, int]], node: Node, step: int, reads: bool) -> None:
        for name in self.forward_storages(node) if reads else ():
            used[name] = (used.get(name, (step, step))[0], step)

    def forward_storages(self, node: Node) -> list[str]:
        roots = dict.fromkeys(self.roots.get(name, name) for name in node.operands)
        makers = {root: self.graph.producers.get(root) for root in roots}
        return [root for root, maker in makers.items() if maker is not None and maker.phase is Phase.FORWARD]

    def peak_bytes(self) -> int:
        nodes, end = self.graph.nodes, len(self.graph.nodes)
        steps, used = self.steps()
        held = [0] * (steps[-1] + 1)

        def hold_steps(num_bytes: int, start: int, last: int) -> None:
            for step in range(start, last + 1):
                held[step] += num_bytes

        def hold(num_bytes: int, start: int, last: int) -> None:
            """From a node to another."""
            hold_steps(num_bytes, steps[start], steps[last])

        static = sum(self.local(given.name).num_bytes for given in self.graph.inputs)
        for param in self.graph.inputs_of(InputKind.PARAM):
            if self.decisions.tiers.get(param) is not Tier.HOST:
                static += self.machine.optimizer.state_bytes(self.local(param).num_elements, 4)
        num_forward = sum(node.phase is Phase.FORWARD for node in nodes)
        for position, node in enumerate(nodes):
            if aliased_operand(node) is not None:
                continue
            size = self.local(node.name).num_bytes
            reads = [i for i, n in enumerate(nodes) if node.name in {self.roots.get(o, o) for o in n.operands}]
            if node.phase is Phase.BACKWARD:
                hold(size, position, max((position, *reads)))
                continue
            last = max((position, *(i for i in reads if nodes[i].phase is Phase.FORWARD)))
            hold(size, position, last)
            if node.name not in used:
                continue
            again = self.fates.get(node.name, Fate.KEEP) != Fate.KEEP
            hold_steps(size, used[node.name][0] if again else steps[last] + 1, used[node.name][1])
        for value, layout, phase, start, last in self.spans():
            size = self.local(value, layout).num_bytes
            hold(size, start, last)
            if (value, layout) in self.kept:
                waits = (steps[last] + 1, steps[num_forward]), (steps[num_forward] + 1, steps[start] - 1)
                hold_steps(size, *waits[phase is Phase.BACKWARD])
        for param, gradient in self.graph.gradients.items():
            made = next(i for i, n in enumerate(nodes) if gradient in n.results)
            last = max((made, *self.graph.users.get(gradient, ())))
            own_storage = self.roots[gradient] in self.graph.producers
            own_storage = own_storage and self.graph.producers[self.roots[gradient]].phase is Phase.BACKWARD
            hold(self.local(param).num_bytes, last + 1 if own_storage else made, end)
        for value in dict.fromkeys(self.graph.outputs.values()):
            root = self.roots[value]
            if root not in self.graph.producers:
                continue
            made = next(i for i, n in enumerate(nodes) if root in n.results)
            reads = [i for i, n in enumerate(nodes) if root in {self.roots.get(o, o) for o in n.operands}]
            if self.decisions.layouts[value] == replicated(self.mesh):
                in_forward = [i for i in reads if nodes[i].phase is Phase.FORWARD]
                read = max(steps[made], *(steps[i] for i in in_forward), used.get(root, (0, 0))[1])
                hold_steps(self.graph.types[root].num_bytes, read + 1, steps[end])
            else:
                hold(self.graph.types[value].num_bytes, made, end)
        return static + max(held)

    def spans(self) -> Iterable[tuple[str, Layout, Phase, int, int]]:
        """A copy lives from the first to the last reader *of its value and phase*, whoever reads this layout."""
        ends: dict[tuple[str, Phase], tuple[int, int]] = {}
        for position, node in enumerate(self.graph.nodes):
            for value in () if node.name in self.followers else node.operands:
                self.widen(ends, (value, node.phase), [position])
                if is_view(node.op):
                    uses = self.uses_of_views(node)
                    for phase in Phase:
                        self.widen(ends, (value, phase), [i for i in uses if self.graph.nodes[i].phase is phase])
        for value, layout, phase in self.moves():
            yield value, layout, phase, *ends[value, phase]

    @staticmethod
    def widen(ends: dict[tuple[str, Phase], tuple[int, int]], key: tuple[str, Phase], positions: list[int]) -> None:
        if positions:
            old = ends.get(key, (positions[0], positions[0]))
            ends[key] = (min(old[0], *positions), max(old[1], *positions))


def judge_directly(
    graph: Graph,
    decisions: Decisions,
    machine: Machine,
    fates: Mapping[str, Fate | str] | None = None,
    kept: frozenset[tuple[str, Layout]] = frozenset(),
    followers: frozenset[str] = frozenset(),
) -> Judged:
    """`fates` as decisions have them, and `drop` and `spill`."""
    judge = _Judge(graph, decisions, machine, decisions.fates if fates is None else fates, kept, followers)
    return Judged(judge.seconds() * 1e3, judge.peak_bytes() / GB)


def transfer_seconds(
    whole: TensorType, source: Layout, target: Layout, decisions: Decisions, machine: Machine
) -> float:
    """On a mesh of one axis."""
    (p,), (q,), mesh = source, target, decisions.mesh
    total = 0.0
    size = {layout: local_shape(whole.shape, (layout,), mesh) for layout in (p, q)}
    local = {layout: TensorType(whole.dtype, shape) for layout, shape in size.items()}
    stacked = TensorType(whole.dtype, (whole.shape[0], whole.shape[1] // mesh.sizes[0]))

    def work(op: str, operand: TensorType, result: TensorType) -> float:
        return machine.prices.op_seconds(Node(op, (), (), ("y",)), (operand,), (result,))

    def link(kind: str, tensor: TensorType) -> float:
        return machine.prices.collective_seconds(kind, tensor.num_bytes, mesh.sizes, 0)

    cut, whole_type = _cut_dim(q), TensorType(whole.dtype, whole.shape)
    if isinstance(p, Replicate):
        return work("mesh.own", whole_type, local[q])
    if isinstance(p, Partial):
        if isinstance(q, Replicate):
            return link("all_reduce", whole_type)
        total += work("mesh.stack", whole_type, whole_type) if cut else 0.0
        return total + link("reduce_scatter", whole_type)
    if isinstance(q, Replicate):
        total += link("all_gather", whole_type)
        return total + (work("mesh.merge", whole_type, whole_type) if _cut_dim(p) else 0.0)
    # One split for another: parts for every rank are stacked on dim 0, exchanged, and put together.
    total += work("mesh.stack", local[p], local[p]) if cut else 0.0
    total += link("all_to_all", local[p])
    return total + (work("mesh.merge", stacked, local[q]) if _cut_dim(p) else 0.0)


def _cut_dim(placement: Placement) -> int:
    return getattr(placement, "dim", 0)
