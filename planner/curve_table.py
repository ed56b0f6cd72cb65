"""A curve as tables for a terminal of 80 to 100 columns: a line per budget, then the baselines.

Needs a curve. Gives rich renderables.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.ir import format_seconds, format_size
from shardwright.planner.console import format_percent
from shardwright.planner.curve import Curve, Point, Rival
from shardwright.planner.plan_header import inputs_text, label_grid

__all__ = ["curve_table", "rival_notes"]


def curve_table(curve: Curve) -> RenderableType:
    """Everything about a curve."""
    caption = Text(
        "figures of one rank and one step, predicted. peak: what the plan needs of its budget. recomputed: bytes not"
        " held, and the time to make them again. gathered again: whole weights that backward collects anew",
        style="dim",
    )
    if any(point.is_cut for point in curve.points):
        caption.append(". *: cut short by the clock or by Ctrl-C: more time may find a better plan")
    return Group(_header(curve), "", _points(curve), caption, "", _rivals(curve))


def _header(curve: Curve) -> Table:
    grid = label_grid()
    first = curve.points[0].plan
    grid.add_row("target", Text(f"{first.target}   {first.identity.dtype}, {first.identity.optimizer}"))
    if inputs := inputs_text(first):
        grid.add_row("inputs", Text(inputs))
    host = f"   host {format_size(first.budget.host_bytes)}" if first.budget.host_bytes else ""
    disk = f"   disk {format_size(first.budget.disk_bytes)}" if first.budget.disk_bytes else ""
    grid.add_row("cluster", Text(f"{first.cluster}   {first.decisions.mesh.num_ranks} ranks{host}{disk}"))
    grid.add_row("curve", Text(_span(curve)))
    begins = [f"{begin.what} from {format_size(begin.point.budget.device_bytes)} down" for begin in curve.begins]
    grid.add_row("begins", Text("; ".join(begins) or "nothing: every budget holds the fastest plan"))
    return grid


def _span(curve: Curve) -> str:
    """`182MiB instead of 299MiB costs 12% more time`, from end to end."""
    first, last = curve.points[0], curve.points[-1]
    ends = f"{format_size(first.peak_bytes)} at {format_seconds(first.step_seconds)}"
    if last.peak_bytes == first.peak_bytes:
        return f"one plan for all budgets: {ends}"
    least = f"{format_size(last.peak_bytes)} at {format_seconds(last.step_seconds)}"
    saved = 1 - last.peak_bytes / first.peak_bytes
    more = last.step_seconds / first.step_seconds - 1
    return f"{ends} to {least}: {saved:.0%} less memory for {more:.0%} more time"


def _points(curve: Curve) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    away = {
        "on host": [point.costs.host_bytes for point in curve.points],
        "on disk": [point.costs.spilled_bytes for point in curve.points],
    }
    away = {title: sizes for title, sizes in away.items() if any(sizes)}
    table.add_column("budget", justify="right", no_wrap=True)
    titles = ["peak", "step", "of\nfastest", "weights", "recomputed", "", *away]
    for title in (*titles, "gathered\nagain", "gap"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("mesh", no_wrap=True, overflow="ellipsis")
    for number, point in enumerate(curve.points):
        table.add_row(*map(Text, _point_cells(curve, point, [sizes[number] for sizes in away.values()])))
    return table


def _point_cells(curve: Curve, point: Point, away_bytes: list[int]) -> list[str]:
    costs = point.costs
    return [
        format_size(point.budget.device_bytes),
        format_size(point.peak_bytes),
        format_seconds(point.step_seconds),
        f"{point.step_seconds / curve.fastest_seconds:.2f}x",
        _size(costs.weight_bytes),
        _size(costs.recomputed_bytes),
        format_seconds(costs.recompute_seconds) if costs.recompute_seconds else "",
        *map(_size, away_bytes),
        _size(costs.regathered_bytes),
        ("" if point.gap is None else format_percent(point.gap)) + ("*" if point.is_cut else ""),
        str(point.plan.decisions.mesh),
    ]


def _rivals(curve: Curve) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("baseline")
    for title in ("peak", "step", "plan in\nits peak"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("")
    for rival in curve.rivals:
        table.add_row(*map(Text, _rival_cells(rival)))
    return table


def _rival_cells(rival: Rival) -> list[str]:
    if rival.step_seconds is None or rival.peak_bytes is None:
        return [rival.name, "", "n/a", "", rival.note]
    planned = "" if rival.planned_seconds is None else format_seconds(rival.planned_seconds)
    return [rival.name, format_size(rival.peak_bytes), format_seconds(rival.step_seconds), planned, rival_notes(rival)]


def rival_notes(rival: Rival) -> str:
    """Whether the curve dominates it, and what else is to say of it."""
    return "; ".join(filter(None, (_verdict(rival), rival.note)))


def _verdict(rival: Rival) -> str:
    """Whether the curve dominates it, in words."""
    if rival.step_seconds is None or rival.planned_seconds is None:
        return ""
    if not rival.is_beaten:
        return "dominated: as fast as the plan" if rival.is_dominated else "not dominated"
    more = rival.step_seconds / rival.planned_seconds - 1
    return f"dominated: {format_percent(more)} slower" if more >= 0.0005 else "dominated: hardly slower"


def _size(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else "-"
