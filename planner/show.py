"""A plan as tables for a terminal of 80 to 100 columns: per module class, totals of one rank, baselines.

Needs a plan and its graph only: no torch, no solver, no model code. Gives rich renderables.
"""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.ir import Fate, Graph, format_size
from shardwright.ir.plan import Plan
from shardwright.planner.module_classes import FateLayers, ModuleClass, Weight, layer_runs, module_classes
from shardwright.planner.plan_header import baseline_table, header
from shardwright.planner.rank_totals import RankTotals, rank_totals
from shardwright.planner.spending import Spending

__all__ = ["fate_lines", "show_plan"]

_FATE_WORDS = {Fate.KEEP: "kept", Fate.RECOMPUTE: "recomputed", Fate.OFFLOAD: "offloaded"}
_FATE_STYLES = {Fate.KEEP: "", Fate.RECOMPUTE: "cyan", Fate.OFFLOAD: "magenta"}


def show_plan(
    plan: Plan, graph: Graph, spending: Spending | None = None, module_glob: str | None = None
) -> RenderableType:
    """Everything about a plan; with `module_glob` the header and the rows of those modules only."""
    spent = spending.by_module if spending else None
    table = module_table(module_classes(graph, plan.decisions, spent or None, module_glob))
    caption = Text(_caption(plan, spending), style="dim")
    parts: list[RenderableType] = [header(plan), "", table, caption]
    if module_glob is None:
        parts += ["", totals_table(rank_totals(plan, graph)), "", baseline_table(plan)]
    return Group(*parts)


def _caption(plan: Plan, spending: Spending | None) -> str:
    axes = ", ".join(plan.decisions.mesh.axes)
    text = f"placements in mesh order ({axes}); one rank, all layers of a row together"
    if spending is None:
        return text
    return f"{text}; ms {spending.source}" if spending.by_module else f"{text}; {spending.source}"


def module_table(classes: Iterable[ModuleClass]) -> Table:
    """One row a class, children indented under their parents."""
    rows = tuple(classes)
    priced = any(row.spent is not None for row in rows)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("module", no_wrap=True, overflow="ellipsis")
    table.add_column("at rest")
    table.add_column("output")
    table.add_column("saved for backward")
    table.add_column("weights", justify="right", no_wrap=True)
    table.add_column("kept", justify="right", no_wrap=True)
    if priced:
        table.add_column("ms", justify="right", no_wrap=True)
        table.add_column("comm", justify="right", no_wrap=True)
    for row, depth, label in in_tree_order(rows):
        cells = [
            Text("  " * depth + label),
            Text("\n".join(line for weight in row.weights for line in _weight_lines(weight, row))),
            Text(row.activation),
            fate_lines(row),
            Text(_size(row.weight_bytes)),
            Text(_size(row.kept_bytes)),
        ]
        if row.spent is not None:
            cells += [Text(_milliseconds(row.spent.compute_seconds)), Text(_milliseconds(row.spent.move_seconds))]
        table.add_row(*cells)
    return table


def in_tree_order(rows: Iterable[ModuleClass]) -> list[tuple[ModuleClass, int, str]]:
    """Rows with depth and label: every row directly under its nearest listed ancestor, otherwise in given order."""
    given = tuple(rows)
    children: dict[int | None, list[int]] = {}
    for number, row in enumerate(given):
        children.setdefault(_parent(row, given), []).append(number)
    ordered: list[tuple[ModuleClass, int, str]] = []

    def visit(number: int, parent: ModuleClass | None, depth: int) -> None:
        row = given[number]
        label = row.path if parent is None else row.pattern[len(parent.pattern) + 1 :]
        times = f" x{row.num_modules}" if row.num_modules != (parent.num_modules if parent else 1) else ""
        ordered.append((row, depth, (label or "(top)") + times))
        for child in children.get(number, ()):
            visit(child, row, depth + 1)

    for number in children.get(None, ()):
        visit(number, None, 0)
    return ordered


def _parent(row: ModuleClass, rows: tuple[ModuleClass, ...]) -> int | None:
    """The nearest row whose modules contain all of this row's; the top is nobody's parent."""
    pattern = row.pattern
    while "." in pattern:
        pattern = pattern.rpartition(".")[0]
        length = pattern.split(".").count("*")
        outer = {layer[:length] for layer in row.layers}
        for number, other in enumerate(rows):
            if other.pattern == pattern and outer <= set(other.layers):
                return number
    return None


def _weight_lines(weight: Weight, row: ModuleClass) -> list[str]:
    """`S(0), R`; with the parameter's name where there is more than one, with layers where they differ."""
    prefix = f"{weight.name} " if len(row.weights) > 1 else ""
    if len(weight.layouts) == 1:
        return [prefix + next(iter(weight.layouts))]
    return [f"{prefix}{layout} in {layer_runs(layers)}" for layout, layers in weight.layouts.items()]


def fate_lines(row: ModuleClass) -> Text:
    """`recomputed 0..19`, `2 of 3 kept`: one line a fate, nothing where backward needs nothing."""
    text = Text()
    for found in row.fates:
        if text:
            text.append("\n")
        text.append(_fate_line(found, row), style=_FATE_STYLES[found.fate])
    return text


def _fate_line(found: FateLayers, row: ModuleClass) -> str:
    words = _FATE_WORDS[found.fate]
    if found.num_values < row.num_saved:
        words = f"{found.num_values} of {row.num_saved} {words}"
    if len(found.layers) < row.num_modules:
        words += f" {layer_runs(found.layers)}"
    return words


def totals_table(totals: RankTotals) -> Table:
    """Bytes of one rank by kind, on device and host, and on disk where something is there."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("one rank holds")
    table.add_column("device", justify="right")
    tiers = ("host", "disk") if totals.spilled_bytes else ("host",)
    for tier in tiers:
        table.add_column(tier, justify="right")
    rows = (
        ("weights", totals.weight_bytes - totals.weight_host_bytes, totals.weight_host_bytes, 0),
        ("gradients", totals.gradient_bytes, 0, 0),
        ("optimizer state", totals.state_device_bytes, totals.state_host_bytes, 0),
        ("saved activations", totals.kept_bytes, totals.offloaded_bytes, totals.spilled_bytes),
        ("buffers and batch", totals.buffer_bytes + totals.batch_bytes, 0, 0),
    )
    for name, *sizes in rows:
        table.add_row(name, *map(_size, sizes[: 1 + len(tiers)]))
    if totals.recomputed_bytes:
        table.add_row(f"[dim]recomputing avoids {format_size(totals.recomputed_bytes)}[/dim]")
    return table


def _milliseconds(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.{1 if milliseconds >= 1 else 2}f}" if seconds else "-"


def _size(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "-"
