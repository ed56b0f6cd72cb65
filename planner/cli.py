"""The command line: plan, sweep, show, check, verify, doctor.

Exit codes: 0 ok; 1 differs, infeasible or refused; 2 usage. Results go to stdout, everything else to stderr. Torch and
the solver are imported inside the commands that need them, so that help, show and usage errors answer at once.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from shardwright.ir import ShardwrightError
from shardwright.planner.cli_options import (
    AsJson,
    BatchSize,
    ClipName,
    ClusterName,
    DiskSize,
    DtypeName,
    Gap,
    HostSize,
    LossPath,
    MeshAxes,
    MicroBatches,
    OptimizerName,
    PlanFile,
    RulesFile,
    Seed,
    SeqLength,
    TargetText,
    TimeLimit,
)
from shardwright.planner.console import console, error_console
from shardwright.planner.defaults import GAP, TIME_LIMIT_SECONDS
from shardwright.planner.json_export import Json

__all__ = ["app", "main"]

app = typer.Typer(
    help="Plan how a PyTorch model is split, recomputed and offloaded under a memory budget; check and show plans.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)


@app.command()
def plan(
    target: TargetText,
    cluster: ClusterName,
    budget: Annotated[str, typer.Option(metavar="SIZE", help="device memory of a rank: 900MiB, 70GiB")],
    host: HostSize = "0B",
    disk: DiskSize = "0B",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="F", help="plan file to write")] = Path("net.plan"),
    optimizer: OptimizerName = "adamw",
    clip: ClipName = "unknown",
    dtype: DtypeName = None,
    loss: LossPath = None,
    rules: RulesFile = None,
    mesh: MeshAxes = None,
    batch: BatchSize = None,
    seq: SeqLength = None,
    accumulate: MicroBatches = 1,
    seed: Seed = 0,
    time_limit: TimeLimit = TIME_LIMIT_SECONDS,
    gap: Gap = GAP,
    as_json: AsJson = False,
) -> None:
    """Capture TARGET, solve, write the plan and its graph.

    Ctrl-C keeps the best plan so far.
    """
    from shardwright.planner import cli_values
    from shardwright.planner.cli_question import read_question

    device_bytes = cli_values.read_size(budget, "--budget")
    question = read_question(
        target,
        cluster=cluster,
        host=host,
        disk=disk,
        optimizer=optimizer,
        clip=clip,
        dtype=dtype,
        loss=loss,
        rules=rules,
        mesh=mesh,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        seed=seed,
        time_limit=time_limit,
        gap=gap,
    )

    from shardwright.planner import api
    from shardwright.planner.json_export import plan_json
    from shardwright.planner.progress import show_progress
    from shardwright.planner.summary import plan_summary

    loaded = question.load()
    with show_progress(error_console()) as progress:
        result = api.plan(
            loaded.module,
            loaded.args,
            loaded.kwargs,
            budget=device_bytes,
            progress=progress,
            **question.options,
        )
    result.save(output)
    if as_json:
        return _print_json(plan_json(result.plan) | {"file": str(output)})
    _print(plan_summary(result.plan, result.graph))
    error_console().print(f"written to {output}", markup=False, soft_wrap=True)


@app.command()
def sweep(
    target: TargetText,
    cluster: ClusterName,
    host: HostSize = "0B",
    disk: DiskSize = "0B",
    points: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="how many, from the fastest plan's peak to the least that works: 8"),
    ] = None,
    budgets: Annotated[str | None, typer.Option(metavar="SIZES", help="these instead: 70GiB,60GiB,50GiB")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="F.svg", help="picture to write")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="write every plan, as DIR/BUDGET.plan")
    ] = None,
    optimizer: OptimizerName = "adamw",
    clip: ClipName = "unknown",
    dtype: DtypeName = None,
    loss: LossPath = None,
    rules: RulesFile = None,
    mesh: MeshAxes = None,
    batch: BatchSize = None,
    seq: SeqLength = None,
    accumulate: MicroBatches = 1,
    seed: Seed = 0,
    time_limit: TimeLimit = TIME_LIMIT_SECONDS,
    gap: Gap = GAP,
    as_json: AsJson = False,
) -> None:
    """Plan TARGET under many budgets: what a smaller memory costs in time.

    Prints a line per budget, the largest first, each smaller than the one before by the same factor, and the baselines
    beside them. --time-limit holds for each budget, and for each baseline whose memory is searched as well; Ctrl-C ends
    the search at hand and goes on with the next.
    """
    from shardwright.planner import cli_values
    from shardwright.planner.cli_question import read_question

    sizes = cli_values.read_sizes(budgets, points)
    cli_values.check_picture(output)
    question = read_question(
        target,
        cluster=cluster,
        host=host,
        disk=disk,
        optimizer=optimizer,
        clip=clip,
        dtype=dtype,
        loss=loss,
        rules=rules,
        mesh=mesh,
        batch=batch,
        seq=seq,
        accumulate=accumulate,
        seed=seed,
        time_limit=time_limit,
        gap=gap,
    )

    from shardwright.planner import sweep as sweeping
    from shardwright.planner.curve_files import save_curve
    from shardwright.planner.curve_json import curve_json
    from shardwright.planner.curve_table import curve_table
    from shardwright.planner.progress import show_progress

    loaded = question.load()
    with show_progress(error_console()) as progress:
        curve = sweeping.sweep(
            loaded.module,
            loaded.args,
            loaded.kwargs,
            budgets=sizes,
            num_points=points or sweeping.NUM_POINTS,
            progress=progress,
            **question.options,
        )
    written = save_curve(curve, save, output)
    if as_json:
        return _print_json(curve_json(curve, written))
    _print(curve_table(curve))
    for path in written.all:
        error_console().print(f"written to {path}", markup=False, soft_wrap=True)


@app.command()
def show(
    plan_file: PlanFile,
    module: Annotated[str | None, typer.Option(metavar="GLOB", help="only modules whose path matches")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a plan per module; needs no model code.

    Placements, what is kept, recomputed or offloaded, bytes and milliseconds; totals of one rank; baselines.
    """
    from shardwright.ir import load_plan
    from shardwright.planner.json_export import show_json
    from shardwright.planner.show import show_plan
    from shardwright.planner.spending import plan_spending

    found, graph = load_plan(plan_file)
    spending = plan_spending(found, graph)
    if as_json:
        return _print_json(show_json(found, graph, spending, module))
    _print(show_plan(found, graph, spending, module))


@app.command()
def check(plan_file: PlanFile, as_json: AsJson = False) -> None:
    """Replay a plan edited by hand; accept or refuse it.

    An accepted plan gets a new predict line. Refused is what is not legal, or does not fit its budget.
    """
    from shardwright.ir import load_plan, save_plan
    from shardwright.planner.api import check_plan
    from shardwright.planner.json_export import plan_json
    from shardwright.planner.plan_header import header

    found, graph = load_plan(plan_file)
    checked = check_plan(found, graph)
    if checked != found:
        save_plan(plan_file, checked, graph)
    if as_json:
        return _print_json(plan_json(checked) | {"changed": checked != found})
    _print(header(checked))
    error_console().print("accepted; rewritten" if checked != found else "accepted; nothing to change")


@app.command()
def verify(
    plan_file: PlanFile,
    world: Annotated[int | None, typer.Option(min=1, metavar="N", help="ranks to start: as the plan says")] = None,
    inject: Annotated[
        str | None, typer.Option(metavar="FAULT", help="break collectives: drop:K, scale:K, stale:K, drop:all, all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a planned step on gloo ranks against the plain model.

    Imports the plan's target, which runs its code. Exits 0 when the step is equal, 1 when it differs. With --inject
    collectives are broken on purpose, one fault at a time, and every fault should make the step differ: exits 1 when
    each was noticed, 3 when one was MISSED or the unbroken step differs already.
    """
    from shardwright.ir import load_plan
    from shardwright.planner import cli_values
    from shardwright.planner.verify_report import comparison_table, exit_code, fault_table, report_json

    cli_values.check_fault(inject)
    found, graph = load_plan(plan_file)
    cli_values.check_world(world, found.decisions.mesh.num_ranks)
    note = f"running the code of {found.target} on {found.decisions.mesh.num_ranks} ranks"
    error_console().print(note, markup=False, soft_wrap=True)

    from shardwright.runtime.verify import parse_faults
    from shardwright.runtime.verify import verify as verify_plan

    report = verify_plan(found, graph, faults=parse_faults(inject, found, graph) if inject else ())
    if as_json:
        _print_json(report_json(report))
    else:
        _print(comparison_table(report.clean, str(plan_file)))
        for fault, comparison in report.injected if len(report.injected) == 1 else ():
            _print(comparison_table(comparison, f"with {fault.kind}:{fault.collective}"))
        if report.injected:
            _print(fault_table(report))
    raise typer.Exit(exit_code(report))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Report versions, devices, and what to mend."""
    from dataclasses import asdict

    from shardwright.planner.doctor import examine, report_table

    report = examine()
    if as_json:
        _print_json(asdict(report) | {"healthy": report.healthy})
    else:
        _print(report_table(report))
    raise typer.Exit(0 if report.healthy else 1)


def _print(renderable: RenderableType) -> None:
    console().print(renderable)


def _print_json(value: Mapping[str, Json]) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    """Entry point of `shardwright`: errors that are the user's to mend are printed without a traceback."""
    try:
        app(prog_name="shardwright")
    except ShardwrightError as error:
        if "--json" in sys.argv[1:]:
            _print_json({"error": type(error).__name__, "message": str(error)})
        error_console().print(f"error: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
