"""Values of the command line: texts to sizes, meshes, targets; a text that cannot be read is a usage error.

Knows neither torch nor the solver, so that a wrong flag is answered at once.
"""

import re
from pathlib import Path
from typing import Final

import typer

from shardwright.ir import Clip, Cluster, Mesh, ShardwrightError, load_cluster, parse_size

__all__ = [
    "DTYPES",
    "check_fault",
    "check_picture",
    "check_target",
    "check_world",
    "read_batch",
    "read_clip",
    "read_cluster",
    "read_dtype",
    "read_mesh",
    "read_optimizer",
    "read_size",
    "read_sizes",
]

DTYPES: Final = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
"""torch's names and ours."""
_FAULT = re.compile(r"(drop|scale|stale):(\d+|all)|all")
_AXIS = re.compile(r"\s*([a-z_]\w*)\s*=\s*([1-9]\d*)\s*")


def read_size(text: str, option: str, zero: bool = False) -> int:
    """`900MiB` to bytes; `zero` admits `0` and `0B`."""
    try:
        return parse_size(text, zero=zero)
    except ShardwrightError as error:
        raise _usage(str(error), option) from error


def read_sizes(budgets: str | None, points: int | None) -> list[int] | None:
    """`70GiB,60GiB` to bytes; nothing where the range is to be found, for which alone `points` is."""
    if budgets is None:
        return None
    if points is not None:
        raise _usage("expected --points or --budgets, found both", "--points")
    return [read_size(text.strip(), "--budgets") for text in budgets.split(",")]


def read_batch(batch: int | None, accumulate: int) -> int | None:
    """Sequences of a step to those of a micro-batch."""
    if batch is not None and batch % accumulate:
        raise _usage(f"expected a number of sequences that {accumulate} micro-batches divide, found {batch}", "--batch")
    return None if batch is None else batch // accumulate


def read_cluster(text: str) -> Cluster:
    """A preset's name, or the path of a TOML file."""
    try:
        return load_cluster(text)
    except ShardwrightError as error:
        raise _usage(str(error), "--cluster") from error


def read_mesh(text: str | None) -> Mesh | None:
    """`dp=2,tp=4` or, as plans print it, `(dp=2, tp=4)`; nothing leaves the mesh to the planner."""
    if text is None:
        return None
    pairs = [_AXIS.fullmatch(part) for part in text.strip().strip("()").split(",")]
    found = [pair.groups() for pair in pairs if pair is not None]
    names = tuple(name for name, _ in found)
    if len(found) != len(pairs) or len(set(names)) != len(names):
        raise _usage(f"expected axes and sizes like dp=2,tp=4, each axis once, found {text!r}", "--mesh")
    return Mesh(names, tuple(int(size) for _, size in found))


def read_dtype(text: str | None) -> str | None:
    """torch's name of a floating dtype to the short one; nothing keeps the model's own."""
    if text is not None and text not in DTYPES:
        raise _usage(f"expected one of {', '.join(DTYPES)}, found {text!r}", "--dtype")
    return None if text is None else DTYPES[text]


def read_optimizer(text: str) -> str:
    """A name that the planner knows the state of."""
    from shardwright.passes.optimizers import optimizer_spec

    try:
        return optimizer_spec(text).name
    except ShardwrightError as error:
        raise _usage(str(error), "--optimizer") from error


def read_clip(text: str) -> str:
    """What the script declares about gradients."""
    if text not in tuple(Clip):
        raise _usage(f"expected one of {', '.join(Clip)}, found {text!r}", "--clip")
    return text


def check_fault(text: str | None) -> None:
    """`drop:3`, `drop:all` or `all`."""
    if text is not None and not _FAULT.fullmatch(text):
        raise _usage(f"expected drop:K, scale:K, stale:K (K from 0, or all) or all, found {text!r}", "--inject")


def check_world(world: int | None, num_ranks: int) -> None:
    """A plan runs on the ranks of its mesh and on no others."""
    if world is not None and world != num_ranks:
        raise _usage(f"expected the {num_ranks} ranks of the plan's mesh, found {world}: plan for {world}", "--world")


def check_picture(path: Path | None) -> None:
    """An SVG file in a folder that is there: a sweep takes too long to find out at its end."""
    if path is not None and path.suffix != ".svg":
        raise _usage(f"expected a file name that ends in .svg, found {str(path)!r}", "--output")
    if path is not None and not path.parent.is_dir():
        raise _usage(f"expected a folder, found none at {str(path.parent)!r}", "--output")


def check_target(text: str, batch: int | None, seq: int | None) -> None:
    """Whether TARGET can name anything: importing it comes later, and may fail then."""
    left, colon, right = text.rpartition(":")
    if not colon or not left or not right:
        raise _usage(f"expected file.py:function, package.module:function or hf:CONFIG.json, found {text!r}", "TARGET")
    if left != "hf" and not right.isidentifier():
        raise _usage(f"expected the name of a function behind the colon, found {right!r}", "TARGET")
    if left == "hf" and (batch is None or seq is None):
        raise _usage("expected --batch and --seq with a target hf:CONFIG.json: it has no example inputs", "TARGET")
    if left.endswith(".py") and not Path(left).is_file():
        raise _usage(f"expected a file, found nothing at {left!r}", "TARGET")
    if left == "hf" and not Path(right).is_file():
        raise _usage(f"expected a configuration file, found nothing at {right!r}", "TARGET")


def _usage(message: str, option: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=option)
