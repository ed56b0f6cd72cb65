"""A plan in about 25 lines: what rank 0 prints before the first step.

Needs a plan and its graph only. Says mesh, budget, what is split, recomputed, offloaded, the gap, the baselines.
"""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.ir import Fate, Graph, InputKind, Replicate, Tier, format_layout, format_size
from shardwright.ir.plan import Plan
from shardwright.planner.console import console
from shardwright.planner.module_classes import ModuleClass, fold_path, layer_runs, module_classes
from shardwright.planner.plan_header import baseline_table, header, label_grid
from shardwright.planner.rank_totals import RankTotals, rank_totals

__all__ = ["plan_summary", "print_summary"]

SHOWN_NAMES = 3
"""Names listed before `and n more`."""
SHOWN_LAYOUTS = 4
"""Layouts of weights listed, those that hold most bytes first."""


def plan_summary(plan: Plan, graph: Graph) -> RenderableType:
    """Header, decisions by kind, baselines."""
    return Group(header(plan), _decisions(plan, graph), "", baseline_table(plan))


def print_summary(plan: Plan, graph: Graph) -> None:
    """The same to stdout; made for `parallelize(on_plan=print_summary)`."""
    console().print(plan_summary(plan, graph))


def _decisions(plan: Plan, graph: Graph) -> Table:
    grid = label_grid()
    totals = rank_totals(plan, graph)
    classes = module_classes(graph, plan.decisions)
    for layout, names in _largest_layouts(plan, graph):
        grid.add_row("split" if layout else "whole", Text(f"{layout + '   ' if layout else ''}{_listed(names)}"))
    for word, fate, num_bytes in (
        ("recompute", Fate.RECOMPUTE, totals.recomputed_bytes),
        ("offload", Fate.OFFLOAD, totals.offloaded_bytes + totals.spilled_bytes),
    ):
        having = tuple(_names_with(classes, fate))
        text = f"{format_size(num_bytes)}   {_listed(having)}" if having else "nothing"
        if fate is Fate.OFFLOAD and totals.spilled_bytes:
            text += f"; {format_size(totals.spilled_bytes)} of it on disk"
        grid.add_row(word, Text(text))
    grid.add_row("rank holds", Text(_rest(totals)))
    for what, tiers, num_bytes in (
        ("optimizer state", plan.decisions.tiers, totals.state_host_bytes),
        ("weights", plan.decisions.parameters, totals.weight_host_bytes),
    ):
        hosted = dict.fromkeys(fold_path(name)[0] for name, tier in tiers.items() if tier is Tier.HOST)
        if hosted:
            grid.add_row("on host", Text(f"{what} {format_size(num_bytes)}   {_listed(hosted)}"))
    return grid


def _largest_layouts(plan: Plan, graph: Graph) -> list[tuple[str, list[str]]]:
    """Layout text and folded weight names, by global bytes; "" for weights whole on every rank."""
    size: dict[str, int] = {}
    names: dict[str, dict[str, None]] = {}
    for name in graph.inputs_of(InputKind.PARAM, InputKind.FROZEN):
        layout = plan.decisions.layouts.get(name, ())
        whole = all(isinstance(placement, Replicate) for placement in layout)
        text = "" if whole else format_layout(layout)
        size[text] = size.get(text, 0) + graph.types[name].num_bytes
        names.setdefault(text, {})[fold_path(name)[0]] = None
    ordered = sorted(size, key=lambda text: (-size[text], text))[:SHOWN_LAYOUTS]
    return [(text, list(names[text])) for text in ordered]


def _names_with(classes: Iterable[ModuleClass], fate: Fate) -> Iterable[str]:
    for row in classes:
        for found in row.fates:
            if found.fate is fate:
                partial = len(found.layers) < row.num_modules
                yield (row.path or "(top)") + (f" ({layer_runs(found.layers)})" if partial else "")


def _listed(names: Iterable[str]) -> str:
    every = tuple(names)
    shown = ", ".join(every[:SHOWN_NAMES])
    return shown if len(every) <= SHOWN_NAMES else f"{shown} and {len(every) - SHOWN_NAMES} more"


def _rest(totals: RankTotals) -> str:
    parts = (
        ("weights", totals.weight_bytes - totals.weight_host_bytes),
        ("gradients", totals.gradient_bytes),
        ("optimizer", totals.state_device_bytes),
        ("saved", totals.kept_bytes),
    )
    return ", ".join(f"{name} {format_size(num_bytes)}" for name, num_bytes in parts if num_bytes)
