"""Graphs and plans on disk. A plan finds its graph beside itself: `net.plan` and `net.graph`.

Reading is bounded (`MAX_FILE_BYTES`); writing is atomic: a reader sees the old file or the new one, whole.
"""

import os
from pathlib import Path
from typing import Final

from shardwright.ir.errors import PlanError, StalePlanError, TextError
from shardwright.ir.graph import Graph
from shardwright.ir.parse import parse_graph
from shardwright.ir.plan import Plan
from shardwright.ir.plan_parse import parse_plan, read_graph_hash
from shardwright.ir.plan_text import print_plan
from shardwright.ir.print import graph_hash, print_graph
from shardwright.ir.verify import verify_graph

__all__ = [
    "MAX_FILE_BYTES",
    "graph_path",
    "load_graph",
    "load_plan",
    "read_text",
    "save_graph",
    "save_plan",
    "write_text",
]

MAX_FILE_BYTES: Final = 256 * 10**6
"""Larger files are refused; the text of a 70-billion-parameter model has under one percent of it."""


def graph_path(plan_path: str | Path) -> Path:
    """Where the graph of a plan file is."""
    return Path(plan_path).with_suffix(".graph")


def load_plan(path: str | Path) -> tuple[Plan, Graph]:
    """A plan and the graph it is for. Raises PlanError when a file is missing, StalePlanError when the graph beside is
    another one, TextError when a text cannot be read."""
    plan_path, beside = Path(path), graph_path(path)
    if plan_path == beside:
        raise PlanError(f"expected a plan file such as net.plan, found the graph file {str(path)!r}")
    text = read_text(plan_path, "a plan")
    expected = read_graph_hash(text, str(plan_path))
    if not beside.is_file():
        raise PlanError(
            f"expected the graph of {str(plan_path)!r} beside it, found no {str(beside)!r}: "
            "copy both files together, or make the plan again"
        )
    graph = load_graph(beside)
    found = graph_hash(graph)
    if found != expected:
        raise StalePlanError(
            f"expected {str(beside)!r} as the graph that {str(plan_path)!r} was made for, {expected}, found {found}; "
            "make the plan again, or put the right graph file beside it"
        )
    return parse_plan(text, graph, str(plan_path)), graph


def save_plan(path: str | Path, plan: Plan, graph: Graph) -> None:
    """Write both files. Raises PlanError when the plan is for another graph."""
    plan_path, beside = Path(path), graph_path(path)
    if plan_path == beside:
        raise PlanError(f"expected a plan file such as net.plan, found the name of a graph file, {str(path)!r}")
    graph_text = print_graph(graph)
    if graph_hash(graph) != plan.identity.graph_hash:
        raise PlanError(f"expected a plan for graph {graph_hash(graph)}, found one for {plan.identity.graph_hash}")
    plan_text = print_plan(plan, graph)
    write_text(beside, graph_text)
    write_text(plan_path, plan_text)


def load_graph(path: str | Path) -> Graph:
    """A verified graph. Raises PlanError, TextError or GraphError."""
    graph = parse_graph(read_text(Path(path), "a graph"), str(path))
    verify_graph(graph)
    return graph


def save_graph(path: str | Path, graph: Graph) -> None:
    write_text(Path(path), print_graph(graph))


def read_text(path: Path, what: str) -> str:
    """The whole file. Raises PlanError when it is missing, not a plain file or too large, TextError for other bytes."""
    if not path.is_file():
        raise PlanError(f"expected {what} file, found none at {str(path)!r}")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise PlanError(f"expected {what} file that can be read, found {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise PlanError(f"expected {what} file of at most {MAX_FILE_BYTES} bytes, found more in {str(path)!r}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"expected text in UTF-8 in {str(path)!r}, found {error.reason} at byte {error.start}"
        ) from None


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step, so that no reader and no crash sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.plan.tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise PlanError(f"expected to write {str(path)!r}, found {error}") from None
    finally:
        partial.unlink(missing_ok=True)
