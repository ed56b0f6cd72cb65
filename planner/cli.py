"""The command line: plan, show, check, verify, doctor.

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
from shardwright.planner.console import console, error_console
from shardwright.planner.json_export import Json

__all__ = ["app", "main"]

app = typer.Typer(
    help="Plan how a PyTorch model is split, recomputed and offloaded under a memory budget; check and show plans.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)

TargetText = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:function, package.module:function or hf:CONFIG.json")
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", exists=True, dir_okay=False, help="a plan file")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON to stdout")]


@app.command()
def plan(
    target: TargetText,
    cluster: Annotated[str, typer.Option(metavar="C", help="preset (h100x8, cpu:4) or a TOML file")],
    budget: Annotated[str, typer.Option(metavar="SIZE", help="device memory of a rank: 900MiB, 70GiB")],
    host: Annotated[str, typer.Option(metavar="SIZE", help="host memory of a rank")] = "0B",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="F", help="plan file to write")] = Path("net.plan"),
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="whose state to plan for")] = "adamw",
    dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="of the parameters: float32, bfloat16, float16, float64")
    ] = None,
    loss: Annotated[str | None, typer.Option(metavar="PATH", help="output that is differentiated: .loss, 0")] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="F", exists=True, dir_okay=False, help="what the plan must respect")
    ] = None,
    mesh: Annotated[str | None, typer.Option(metavar="AXES", help="fix the mesh: dp=2,tp=4")] = None,
    batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="global sequences a step; for hf:")] = None,
    seq: Annotated[int | None, typer.Option(min=1, metavar="N", help="tokens a sequence; for hf:")] = None,
    accumulate: Annotated[int, typer.Option(min=1, metavar="N", help="micro-batches a step")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="of random operators")] = 0,
    time_limit: Annotated[float, typer.Option(min=0.0, metavar="S", help="seconds to solve")] = 120.0,
    gap: Annotated[float, typer.Option(min=0.0, max=1.0, metavar="G", help="relative gap to stop at")] = 0.01,
    as_json: AsJson = False,
) -> None:
    """Capture TARGET, solve, write the plan and its graph.

    Ctrl-C keeps the best plan so far.
    """
    from shardwright.planner import cli_values

    cli_values.check_target(target, batch, seq)
    machines = cli_values.read_cluster(cluster)
    device_bytes, host_bytes = cli_values.read_size(budget, "--budget"), cli_values.read_size(host, "--host", zero=True)
    fixed_mesh, chosen_dtype = cli_values.read_mesh(mesh), cli_values.read_dtype(dtype)
    spec_name = cli_values.read_optimizer(optimizer)

    from shardwright.planner import api
    from shardwright.planner.json_export import plan_json
    from shardwright.planner.progress import show_progress
    from shardwright.planner.summary import plan_summary
    from shardwright.runtime.target import load_target
    from shardwright.runtime.torch_ops import TORCH_DTYPES

    loaded = load_target(target, batch, seq, None if chosen_dtype is None else TORCH_DTYPES[chosen_dtype])
    with show_progress(error_console()) as progress:
        result = api.plan(
            loaded.module,
            loaded.args,
            loaded.kwargs,
            cluster=machines,
            budget=device_bytes,
            host=host_bytes,
            optimizer=spec_name,
            loss=loss,
            seed=seed,
            accumulate=accumulate,
            mesh=fixed_mesh,
            rules=rules,
            time_limit=time_limit,
            gap=gap,
            target=target,
            progress=progress,
        )
    result.save(output)
    if as_json:
        return _print_json(plan_json(result.plan) | {"file": str(output)})
    _print(plan_summary(result.plan, result.graph))
    error_console().print(f"written to {output}", markup=False, soft_wrap=True)


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
