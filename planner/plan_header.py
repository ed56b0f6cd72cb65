"""The lines over and under every picture of a plan: what it is for, what is predicted and proven, what others cost."""

from rich.table import Table
from rich.text import Text

from shardwright.ir import Clip, format_seconds, format_size
from shardwright.ir.plan import Baseline, Plan
from shardwright.planner.console import format_percent

__all__ = ["SOLVER_DRIFT", "baseline_table", "header", "inputs_text", "label_grid", "objective_drift"]

LABEL_COLUMNS = 10
"""Width of the labels at the left, so that grids under one another line up."""
SOLVER_DRIFT = 0.05
"""Objective and replay further apart than this are pointed out."""


def label_grid() -> Table:
    """Labels at the left, what they are about at the right."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True, min_width=LABEL_COLUMNS)
    grid.add_column()
    return grid


def inputs_text(plan: Plan) -> str:
    """The global batch: `input_ids i64[8, 256]`."""
    times = f", {plan.identity.accumulate} times a step" if plan.identity.accumulate > 1 else ""
    return ", ".join(f"{spec.name} {spec.type}" for spec in plan.identity.inputs) + times


def header(plan: Plan) -> Table:
    """Target, machines, prediction against the budget, certificate."""
    grid = label_grid()
    identity, mesh = plan.identity, plan.decisions.mesh
    clip = "" if plan.decisions.clip is Clip.UNKNOWN else f", clip {plan.decisions.clip}"
    grid.add_row("target", Text(f"{plan.target}   {identity.dtype}, {identity.optimizer}{clip}"))
    if inputs := inputs_text(plan):
        grid.add_row("inputs", Text(inputs))
    grid.add_row("cluster", Text(f"{plan.cluster}   mesh {mesh}, {mesh.num_ranks} ranks"))
    if note := _uneven_batch(plan):
        grid.add_row("note", Text(note, style="yellow"))
    grid.add_row("predict", _prediction(plan))
    grid.add_row("certify", _certificate(plan))
    return grid


def _uneven_batch(plan: Plan) -> str:
    """Where no axis divides the first dim of any input, no rank can have a part of the batch."""
    axes = [size for size in plan.decisions.mesh.sizes if size > 1]
    batches = [spec for spec in plan.identity.inputs if spec.type.shape]
    if not axes or not batches or any(spec.type.shape[0] % size == 0 for spec in batches for size in axes):
        return ""
    first, least = batches[0], min(axes)
    padded = -(-first.type.shape[0] // least) * least
    return (
        f"expected a batch that {least} ranks divide, found {first.name} {first.type}: every rank computes all of it; "
        f"pad it to {padded}, or drop what is over"
    )


def _prediction(plan: Plan) -> Text:
    predicted, budget = plan.prediction, plan.budget
    text = f"step {format_seconds(predicted.step_seconds)} ±{predicted.error_fraction:.0%}"
    text += f"   device {format_size(predicted.device_bytes)} of {format_size(budget.device_bytes)}"
    if budget.host_bytes or predicted.host_bytes:
        text += f"   host {format_size(predicted.host_bytes)} of {format_size(budget.host_bytes)}"
    if budget.disk_bytes or predicted.disk_bytes:
        text += f"   disk {format_size(predicted.disk_bytes)} of {format_size(budget.disk_bytes)}"
    return Text(text)


def _certificate(plan: Plan) -> Text:
    found = plan.certificate
    if found is None:
        return Text("none: edited by hand", style="yellow")
    text = Text(f"gap {format_percent(found.gap)}   objective {format_seconds(found.objective_seconds)}, ")
    text.append(f"bound {format_seconds(found.bound_seconds)}; {found.space}, {found.engine}")
    if found.interrupted:
        text.append("; interrupted", style="yellow")
    drift = objective_drift(plan)
    if drift is not None and drift > SOLVER_DRIFT:
        text.append(f"; objective and replay differ by {format_percent(drift)}", style="yellow")
    return text


def objective_drift(plan: Plan) -> float | None:
    """How far the solver's objective is from the replayed step, relative to the step."""
    if plan.certificate is None or plan.prediction.step_seconds <= 0:
        return None
    step_seconds = plan.prediction.step_seconds
    return abs(plan.certificate.objective_seconds - step_seconds) / step_seconds


def baseline_table(plan: Plan) -> Table:
    """The plan first, then what a person would have picked, with the step relative to the plan's."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("baseline")
    for title in ("step", "device", "of plan"):
        table.add_column(title, justify="right")
    table.add_column("")
    predicted = plan.prediction
    step, size = format_seconds(predicted.step_seconds), format_size(predicted.device_bytes)
    table.add_row("this plan", step, size, "1.00x", "")
    for baseline in plan.baselines:
        table.add_row(*map(Text, _baseline_cells(baseline, predicted.step_seconds)))
    return table


def _baseline_cells(baseline: Baseline, plan_seconds: float) -> tuple[str, str, str, str, str]:
    seconds, size = baseline.step_seconds, baseline.device_bytes
    return (
        baseline.name,
        "n/a" if seconds is None else format_seconds(seconds),
        "" if size is None else format_size(size),
        "" if seconds is None or plan_seconds <= 0 else f"{seconds / plan_seconds:.2f}x",
        baseline.note.removeprefix("n/a: "),  # the step column says it already
    )
