"""The rewriter: captured graph and decisions to the rank graph.

Every operator runs on local tensors. Where a node reads a value in another layout than it was made in, the value is
redistributed right there, once per layout and phase; backward derives again what forward does not keep for it:
redistributed copies, views of them, recomputed and reloaded storages. Starts and waits stand side by side; moving
them apart is the business of `schedule`.

Names: a value of the captured graph keeps its name in the layout it is made in; `x~S(0).R` is x in another layout,
`x~again` what backward made again, `x~here` a parameter that lies on the host.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from shardwright.ir import (
    Decisions,
    Fate,
    Gather,
    Graph,
    Layout,
    Node,
    Phase,
    PlanError,
    Ref,
    TensorType,
    Tier,
    format_layout,
    local_shape,
    replicated,
)
from shardwright.ir.graph import Arg
from shardwright.ir.ops import aliased_operand
from shardwright.passes.dead_code import without_dead_code
from shardwright.passes.localize import localize
from shardwright.passes.redistribute import emit_step, steps

__all__ = ["lower"]


def lower(graph: Graph, decisions: Decisions) -> Graph:
    """The program of one rank, the same text for all ranks.

    Raises PlanError where a decision is missing or cannot be carried out.
    """
    return _Lowering(graph, decisions).run()


@dataclass
class _Lowering:
    graph: Graph
    decisions: Decisions
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    phase: Phase = Phase.FORWARD
    _versions: dict[tuple[Phase, str, Layout], str] = field(default_factory=dict)
    """(phase, value, layout) to its name in the rank graph."""
    _again: dict[str, str] = field(default_factory=dict)
    """Forward value to what backward reads in its stead."""
    _copy: dict[str, str] = field(default_factory=dict)
    """Offloaded value to its copy on host or disk."""
    _origin: Node | None = None
    """The captured node on whose behalf nodes are written: they inherit module and source."""

    def run(self) -> Graph:
        for given in self.graph.inputs:
            self.types[given.name] = self._local_type(given.name)
        forward = [node for node in self.graph.nodes if node.phase is Phase.FORWARD]
        for node in forward:
            self._write(node, node.results)
        returned = {name: self._returned(name, replicated(self.decisions.mesh)) for name in self._forward_returned()}
        self._offload()
        self.phase = Phase.BACKWARD
        for node in self.graph.nodes[len(forward) :]:
            self._write(node, node.results)
        gradients = {param: self._returned(value, self._layout(param)) for param, value in self.graph.gradients.items()}
        lowered = Graph(
            name=self.graph.name,
            inputs=self.graph.inputs,
            nodes=tuple(self.nodes),
            types=self.types,
            loss=returned.get(self.graph.loss, ""),
            gradients=gradients,
            updates={name: returned[value] for name, value in self.graph.updates.items()},
            outputs={path: returned[value] for path, value in self.graph.outputs.items()},
        )
        return without_dead_code(lowered)

    def _forward_returned(self) -> tuple[str, ...]:
        loss = (self.graph.loss,) if self.graph.loss else ()
        return (*loss, *self.graph.outputs.values(), *self.graph.updates.values())

    def _returned(self, value: str, layout: Layout) -> str:
        self._origin = self.graph.producers.get(value)
        return self._read(value, layout)

    def _layout(self, value: str) -> Layout:
        layout = self.decisions.layouts.get(value)
        if layout is None:
            raise PlanError(f"expected a `place` line for {value}, found none; plan again, or add the line")
        return layout

    def _local_type(self, value: str) -> TensorType:
        whole = self.graph.types[value]
        return TensorType(whole.dtype, local_shape(whole.shape, self._layout(value), self.decisions.mesh))

    def _write(self, node: Node, results: tuple[str, ...]) -> None:
        """One operator on local tensors; its results get the names `results`."""
        self._origin = node
        reads = self.decisions.reads.get(node.name)
        if reads is None or len(reads) != len(node.operands):
            found = "none" if reads is None else f"{len(reads)}"
            raise PlanError(
                f"expected a layout for each of the {len(node.operands)} operands of {node.name}, found {found}"
            )
        operands = tuple(self._read(name, layout) for name, layout in zip(node.operands, reads, strict=True))
        self._origin = node
        local, types = localize(
            node.with_operands(operands),
            tuple(self.types[name] for name in operands),
            tuple(self.graph.types[name] for name in node.results),
            tuple(self._layout(name) for name in node.results),
            self.decisions.mesh,
        )
        self.nodes.append(replace(local, results=results, phase=self.phase))
        self.types.update(zip(results, types, strict=True))

    def _read(self, value: str, layout: Layout) -> str:
        """The value on the device in a layout, redistributed or fetched from the host where needed, once per phase."""
        if layout == self._layout(value) and not self._lies_on_host(value):
            return self._made(value)
        key = (self.phase, value, layout)
        if key not in self._versions:
            kept = self._kept_copy(value, layout)
            self._versions[key] = kept if kept is not None else self._copied(value, layout)
        return self._versions[key]

    def _copied(self, value: str, layout: Layout) -> str:
        source = self._layout(value)
        return self._fetch(value) if layout == source else self._redistribute(value, source, layout)

    def _lies_on_host(self, value: str) -> bool:
        return self.decisions.parameters.get(value) is Tier.HOST

    def _kept_copy(self, value: str, layout: Layout) -> str | None:
        """Forward's copy in that layout, where the plan keeps it for backward."""
        if self.phase is Phase.FORWARD or self.decisions.gathers.get(value) is not Gather.KEEP:
            return None
        return self._versions.get((Phase.FORWARD, value, layout))

    def _redistribute(self, value: str, source: Layout, target: Layout) -> str:
        current, layout = self._read(value, source), source
        local = self.types[current]
        suffix = format_layout(target).replace(", ", ".").replace(" ", "")
        stem = f"{value}~{suffix}" + ("~again" if self.phase is Phase.BACKWARD and self._is_forward(value) else "")
        found = steps(source, target)
        for number, step in enumerate(found):
            prefix = stem if number == len(found) - 1 else f"{stem}~{number}"
            emit = partial(self._emit, prefix)
            current, local = emit_step(step, current, local, layout, self.decisions.mesh, emit)
            layout = (*layout[: step.axis], step.target, *layout[step.axis + 1 :])
        return current

    def _emit(self, prefix: str, op: str, args: tuple[Arg, ...], result: TensorType) -> str:
        name = f"{prefix}/{op.removeprefix('mesh.').removeprefix('aten.').removesuffix('.default')}"
        module, source = (self._origin.module, self._origin.source) if self._origin else ("", "")
        self.nodes.append(Node(op, args, (), (name,), self.phase, module, source))
        self.types[name] = result
        return name

    def _is_forward(self, value: str) -> bool:
        node = self.graph.producers.get(value)
        return node is None or node.phase is Phase.FORWARD

    def _made(self, value: str) -> str:
        """The value in the layout it is made in, as this phase can reach it."""
        node = self.graph.producers.get(value)
        if node is None or self.phase is Phase.FORWARD or node.phase is Phase.BACKWARD:
            return value
        if value not in self._again:
            self._derive_chain(value)
        return self._again[value]

    def _derive_chain(self, value: str) -> None:
        """What a value is recomputed from first: a chain over many layers would exhaust Python's stack."""
        waiting = [value]
        while waiting:
            node = self.graph.producers[waiting[-1]]
            missing = self._missing(node) if self._fate(waiting[-1]) is Fate.RECOMPUTE else None
            if missing is not None:
                waiting.append(missing)
                continue
            top = waiting.pop()
            if top not in self._again:
                self._derive(top, node)

    def _missing(self, node: Node) -> str | None:
        """The first operand that must be made before the node can run again in backward."""
        for name, layout in zip(node.operands, self.decisions.reads.get(node.name, ()), strict=False):
            made = name not in self.graph.producers or name in self._again
            if not made and (layout == self._layout(name) or not self._is_copied(name, layout)):
                return name
        return None

    def _is_copied(self, value: str, layout: Layout) -> bool:
        return (self.phase, value, layout) in self._versions or self._kept_copy(value, layout) is not None

    def _derive(self, value: str, node: Node) -> None:
        """Let backward have a forward value: kept, reloaded, or its operator run again."""
        fate = self._fate(value)
        if fate is Fate.KEEP:
            self._again[value] = value
        elif fate is Fate.OFFLOAD:
            self._again[value] = self._reload(value)
        else:
            # Siblings with another fate are not replaced: their own storage is there, or comes back as `~again`.
            again = [n for n in node.results if n not in self._again and self._fate(n) is Fate.RECOMPUTE]
            origin, results = self._origin, {n: f"{n}~again" if n in again else f"{n}~unused" for n in node.results}
            self._write(node, tuple(results.values()))
            self._origin = origin
            self._again.update({n: results[n] for n in again})

    def _fate(self, value: str) -> Fate:
        """Of a value made in forward. A view follows what it is a view of; a view of a copy, redistributed or
        fetched from the host, or of something made again, is made again."""
        node = self.graph.producers.get(value)
        if node is None:
            return Fate.KEEP
        base = aliased_operand(node)
        if base is None:
            return self.decisions.fates.get(value, Fate.KEEP)
        moved = self.decisions.reads[node.name][0] != self._layout(base) or self._lies_on_host(base)
        if moved and self.decisions.gathers.get(base) is Gather.KEEP:
            return Fate.KEEP
        return Fate.RECOMPUTE if moved or self._fate(base) is not Fate.KEEP else Fate.KEEP

    def _offload(self) -> None:
        """Write the copies to host or disk behind the last use of each offloaded storage in forward."""
        moved = [v for v, fate in self.decisions.fates.items() if fate is Fate.OFFLOAD]
        if not moved:
            return
        last = self._last_uses()
        after: dict[int, list[Node]] = {}
        for value in sorted(moved, key=lambda v: (last.get(v, -1), v)):
            node = self.graph.producers.get(value)
            if node is None or node.phase is not Phase.FORWARD or aliased_operand(node) is not None:
                raise PlanError(f"expected the name of a storage that forward makes, found `offload {value}`")
            tier = self.decisions.tiers.get(value, Tier.HOST)
            start, done = f"{value}~offload", f"{value}~{tier}"
            self.types[start] = self.types[done] = self.types[value]
            self._copy[value] = done
            after.setdefault(last[value], []).extend((
                Node("tier.offload", (Ref(value), tier.value), (), (start,), Phase.FORWARD, node.module, node.source),
                Node("tier.wait", (Ref(start), Ref(value)), (), (done,), Phase.FORWARD, node.module, node.source),
            ))  # fmt: skip
        self.nodes = [n for i, node in enumerate(self.nodes) for n in (node, *after.get(i, ()))]

    def _last_uses(self) -> dict[str, int]:
        """Value to the position of the last forward node that reads it or a view of it, or makes it."""
        root: dict[str, str] = {}
        last: dict[str, int] = {}
        for position, node in enumerate(self.nodes):
            base = aliased_operand(node)
            for result in node.results:
                root[result] = result if base is None else root.get(base, base)
            for name in (*node.operands, *node.results):
                last[root.get(name, name)] = position
        return last

    def _reload(self, value: str) -> str:
        return self._copy_in(self._copy[value], f"{value}~reload", f"{value}~again", self.graph.producers[value])

    def _fetch(self, parameter: str) -> str:
        """A parameter that lies on the host."""
        again = "~again" if self.phase is Phase.BACKWARD else ""
        return self._copy_in(parameter, f"{parameter}~reload{again}", f"{parameter}~here{again}", self._origin)

    def _copy_in(self, source: str, start: str, done: str, on_behalf_of: Node | None) -> str:
        """Start and wait of a copy to the device; gives the name of what has arrived."""
        module, line = (on_behalf_of.module, on_behalf_of.source) if on_behalf_of else ("", "")
        self.types[start] = self.types[done] = self.types[source]
        self.nodes.append(Node("tier.reload", (Ref(source),), (), (start,), self.phase, module, line))
        self.nodes.append(Node("tier.wait", (Ref(start), Ref(source)), (), (done,), self.phase, module, line))
        return done
