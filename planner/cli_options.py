"""Arguments and options that several commands take: one name, one meaning, one help text each.

Knows neither torch nor the solver, so that help and usage errors answer at once.
"""

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "BatchSize",
    "ClipName",
    "ClusterName",
    "DiskSize",
    "DtypeName",
    "Gap",
    "HostSize",
    "LossPath",
    "MeshAxes",
    "OptimizerName",
    "PlanFile",
    "RulesFile",
    "Seed",
    "SeqLength",
    "TargetText",
    "TimeLimit",
]

TargetText = Annotated[
    str, typer.Argument(metavar="TARGET", help="file.py:function, package.module:function or hf:CONFIG.json")
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", exists=True, dir_okay=False, help="a plan file")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON to stdout")]

ClusterName = Annotated[str, typer.Option(metavar="C", help="preset (h100x8, cpu:4) or a TOML file")]
HostSize = Annotated[str, typer.Option(metavar="SIZE", help="host memory of a rank")]
DiskSize = Annotated[str, typer.Option(metavar="SIZE", help="disk space of a rank; needs some of --host")]
OptimizerName = Annotated[
    str, typer.Option(metavar="NAME", help="whose state to plan for: adamw, adamw-fused, adamw-master, sgd, ...")
]
ClipName = Annotated[
    str, typer.Option(metavar="none|unknown", help="none: the script leaves gradients alone; host steps in backward")
]
DtypeName = Annotated[
    str | None, typer.Option(metavar="NAME", help="of the parameters: float32, bfloat16, float16, float64")
]
LossPath = Annotated[str | None, typer.Option(metavar="PATH", help="output that is differentiated: .loss, 0")]
RulesFile = Annotated[
    Path | None, typer.Option(metavar="F", exists=True, dir_okay=False, help="what the plan must respect")
]
MeshAxes = Annotated[str | None, typer.Option(metavar="AXES", help="fix the mesh: dp=2,tp=4")]
BatchSize = Annotated[int | None, typer.Option(min=1, metavar="N", help="global sequences a step; for hf:")]
SeqLength = Annotated[int | None, typer.Option(min=1, metavar="N", help="tokens a sequence; for hf:")]
MicroBatches = Annotated[
    int, typer.Option("--accumulate", min=1, metavar="N", help="micro-batches a step; --batch is all of them together")
]
Seed = Annotated[int, typer.Option(metavar="N", help="of random operators")]
TimeLimit = Annotated[float, typer.Option(min=0.0, metavar="S", help="seconds to solve")]
Gap = Annotated[float, typer.Option(min=0.0, max=1.0, metavar="G", help="relative gap to stop at")]
