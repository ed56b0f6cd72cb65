"""Text to plan: the inverse of `plan_text`. Needs the graph, against whose names the globs are expanded.

Every error shows the line with a caret. Opening a plan runs, imports and unpickles nothing.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final, Generic, TypeVar

from shardwright.ir.decisions import Decisions, Fate, Gather, Tier
from shardwright.ir.errors import TextError
from shardwright.ir.globs import NameIndex
from shardwright.ir.graph import Graph
from shardwright.ir.names import closest
from shardwright.ir.placements import Layout, Mesh, divides, format_layout, parse_layout
from shardwright.ir.plan import Plan
from shardwright.ir.plan_defaults import complete
from shardwright.ir.plan_header import (
    check_frame,
    parse_baseline,
    parse_budget,
    parse_certificate,
    parse_cluster_line,
    parse_identity,
    parse_prediction,
    parse_schedule,
    parse_target,
)
from shardwright.ir.plan_lines import Cursor, PlanSource, Word
from shardwright.ir.plan_text import ABSENT, COPY_TIERS, RESIDENT_TIERS, PlanNames

__all__ = ["parse_plan", "read_graph_hash"]

_T = TypeVar("_T")
_LISTS: Final = re.compile(r"(?:\[[^\[\]]*\]\s*)*")


def parse_plan(text: str, graph: Graph, path: str = "<plan>") -> Plan:
    """The plan that `text` describes for `graph`. `path` is only for messages. Raises TextError."""
    lines = check_frame(PlanSource(text, path))
    target, versions = parse_target(lines["target"][0])
    cluster, mesh = parse_cluster_line(lines["cluster"][0])
    identity, clip = parse_identity(lines["graph"][0], lines["inputs"][0])
    certificates = [parse_certificate(line) for line in lines.get("certify", [])]
    return Plan(
        target=target,
        identity=identity,
        cluster=cluster,
        budget=parse_budget(lines["budget"][0]),
        decisions=replace(_decisions(lines, graph, mesh), clip=clip),
        prediction=parse_prediction(lines["predict"][0]),
        certificate=certificates[0] if certificates else None,
        baselines=tuple(parse_baseline(line) for line in lines.get("baseline", [])),
        versions=versions,
    )


def read_graph_hash(text: str, path: str = "<plan>") -> str:
    """The hash of the graph that a plan text is for, without reading its decisions. Raises TextError."""
    return check_frame(PlanSource(text, path))["graph"][0].expect_text("the hash of the graph")


def _decisions(lines: Mapping[str, list[Cursor]], graph: Graph, mesh: Mesh) -> Decisions:
    names = PlanNames(graph)
    layouts: _Found[Layout | None] = _Found(names.values)
    for line in lines.get("place", []):
        layouts.read(line, lambda cursor, chosen: _read_layout(cursor, chosen, graph, mesh), _show_layout)
    reads: _Found[tuple[Layout, ...] | None] = _Found(names.nodes)
    for line in lines.get("read", []):
        reads.read(line, lambda cursor, chosen: _read_layouts(cursor, chosen, graph, mesh), _show_layouts)
    fates: _Found[tuple[Fate, str]] = _Found(names.storages)
    for fate in Fate:
        for line in lines.get(fate.value, []):
            fates.read(line, _fate_reader(fate), lambda found: " ".join(found).rstrip())
    gathers: _Found[Gather] = _Found(names.copied)
    for line in lines.get("gather", []):
        gathers.read(line, lambda cursor, _: Gather(_one_of(cursor, tuple(Gather))), lambda g: g.value)
    tiers: _Found[Tier] = _Found(names.params)
    for line in lines.get("state", []):
        tiers.read(line, lambda cursor, _: Tier(_one_of(cursor, RESIDENT_TIERS)), lambda t: t.value)
    parameters: _Found[Tier] = _Found(names.weights)
    for line in lines.get("parameter", []):
        parameters.read(line, lambda cursor, _: Tier(_one_of(cursor, RESIDENT_TIERS)), lambda t: t.value)
    schedule = parse_schedule(lines["schedule"][0])
    all_layouts, all_reads = complete(graph, mesh, layouts.decided, reads.decided)
    return Decisions(
        mesh=mesh,
        layouts=all_layouts,
        reads=all_reads,
        fates={name: fate for name, (fate, _) in fates.decided.items()},
        gathers=gathers.decided,
        # What lies on the host is not named: it is the same plan without.
        tiers=tiers.decided | {name: Tier.DISK for name, (_, tier) in fates.decided.items() if tier == Tier.DISK},
        parameters=parameters.decided,
        schedule=schedule,
    )


class _Found(Generic[_T]):
    """Decisions of one kind by name, and the lines they came from."""

    def __init__(self, index: NameIndex) -> None:
        self.decided: dict[str, _T] = {}
        self._lines: dict[str, int] = {}
        self._index = index

    def read(self, line: Cursor, parse: Callable[[Cursor, tuple[str, ...]], _T], show: Callable[[_T], str]) -> None:
        """Take one line: a name or glob, then what `parse` reads for the names."""
        word = line.next_name()
        names = self._names(line, word)
        decision = parse(line, names)
        for name in names:
            if name in self.decided and self.decided[name] != decision:
                raise line.source.error(
                    line.line,
                    word.column,
                    f"expected one decision for {name!r}, found {show(decision)!r} on line {line.line} "
                    f"and {show(self.decided[name])!r} on line {self._lines[name]}",
                )
            self.decided[name] = decision
            self._lines.setdefault(name, line.line)

    def _names(self, line: Cursor, word: Word) -> tuple[str, ...]:
        if word.kind == "string":
            names: tuple[str, ...] = (word.text,) if word.text in self._index.positions else ()
        else:
            try:
                names = self._index.matching(word.text)
            except TextError as error:
                raise line.source.error(line.line, word.column, str(error)) from None
        if not names:
            near = closest(word.text, self._index.positions)
            raise line.source.error(
                line.line,
                word.column,
                f"expected a name of the graph that this line can be about, found {word.text!r}{near}: "
                "correct it, or take the line out",
            )
        return names


def _read_layout(cursor: Cursor, names: tuple[str, ...], graph: Graph, mesh: Mesh) -> Layout | None:
    text, column = cursor.rest()
    if text == ABSENT:
        return None
    layout = _layout(cursor, text, column, mesh)
    for name in names:
        _check_layout(cursor, column, layout, name, graph, mesh)
    return layout


def _read_layouts(cursor: Cursor, names: tuple[str, ...], graph: Graph, mesh: Mesh) -> tuple[Layout, ...] | None:
    text, column = cursor.rest()
    if text == ABSENT:
        return None
    if not _LISTS.fullmatch(text):
        raise cursor.source.error(cursor.line, column, f"expected layouts such as [S(0), R] [R, R], found {text!r}")
    parts = [(match[1], column + match.start(1)) for match in re.finditer(r"\[([^\[\]]*)\]", text)]
    layouts = tuple(_layout(cursor, part, place, mesh) for part, place in parts)
    for name in names:
        operands = graph.producers[name].operands
        if len(operands) != len(layouts):
            raise cursor.source.error(
                cursor.line,
                column,
                f"expected a layout for each of the {len(operands)} operands of {name!r}, found {len(layouts)}",
            )
        for operand, layout, (_, place) in zip(operands, layouts, parts, strict=True):
            _check_layout(cursor, place, layout, operand, graph, mesh)
    return layouts


def _layout(cursor: Cursor, text: str, column: int, mesh: Mesh) -> Layout:
    try:
        layout = parse_layout(text)
    except TextError as error:
        raise cursor.source.error(cursor.line, column, str(error)) from None
    if len(layout) != len(mesh.axes):
        raise cursor.source.error(
            cursor.line, column, f"expected a placement for each axis of mesh {mesh}, found {len(layout)}"
        )
    return layout


def _check_layout(cursor: Cursor, column: int, layout: Layout, name: str, graph: Graph, mesh: Mesh) -> None:
    if not divides(graph.types[name].shape, layout, mesh):
        raise cursor.source.error(
            cursor.line,
            column,
            f"expected a layout that splits {name!r}: {graph.types[name]} evenly over mesh {mesh}, "
            f"found {format_layout(layout)}",
        )


def _show_layout(layout: Layout | None) -> str:
    return ABSENT if layout is None else format_layout(layout)


def _show_layouts(layouts: tuple[Layout, ...] | None) -> str:
    return ABSENT if layouts is None else " ".join(f"[{format_layout(layout)}]" for layout in layouts)


def _fate_reader(fate: Fate) -> Callable[[Cursor, tuple[str, ...]], tuple[Fate, str]]:
    """Reads the tier of what is offloaded; nothing follows other fates."""

    def read(cursor: Cursor, _: tuple[str, ...]) -> tuple[Fate, str]:
        tier = _one_of(cursor, COPY_TIERS) if fate is Fate.OFFLOAD else ""
        cursor.expect_end()
        return fate, tier

    return read


def _one_of(cursor: Cursor, words: tuple[str, ...]) -> str:
    word = cursor.next()
    if word.text not in words:
        cursor.fail(word, " or ".join(words))
    cursor.expect_end()
    return word.text
