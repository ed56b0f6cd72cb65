"""Writes the folder of `gpu_memory.py`: programs as Python, what they need of ours, what they take, and the loop.

| file | what |
| --- | --- |
| `kept.py`, ... | forward and backward of each plan |
| `kernels.py`, `copies.py`, ... | files of `runtime/`, with imports of each other in place of the package |
| `run.py`, `training.py`, `memory.py`, `attention.py` | as they stand in `benchmarks/gpu_folder/` |
| `programs.json` | names, shapes, and what the plans predict |
| `constants.pt` | tensors that the model made from constants |
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from shardwright.ir import Decisions, Graph, InputKind, TensorType, Tier
from shardwright.passes.pipeline import rank_graph
from shardwright.passes.replay import Replay
from shardwright.planner.problem import Problem
from shardwright.runtime import copies as copies_module
from shardwright.runtime import kernels as kernels_module
from shardwright.runtime.copies import copies_on
from shardwright.runtime.emit import emit
from shardwright.runtime.host_buffers import host_buffer_sizes
from shardwright.runtime.host_pool import HostPool
from shardwright.runtime.standalone import standalone
from shardwright.runtime.torch_ops import TORCH_DTYPES

__all__ = ["Planned", "write_folder"]

TEMPLATES: Final = Path(__file__).with_name("gpu_folder")
LEARNING_RATE: Final = 1e-4
CPU: Final = torch.device("cpu")


@dataclass(frozen=True)
class Planned:
    """One program of the folder."""

    name: str
    decisions: Decisions
    replay: Replay


def write_folder(
    folder: Path,
    model: str,
    problem: Problem,
    planned: Sequence[Planned],
    device: torch.device,
    host_bytes: int,
    largest_input: int | None = None,
) -> None:
    """`largest_input` bounds whole numbers of the batch that is made there; by default the vocabulary's size."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = problem.captured.graph
    for name, text in standalone([kernels_module, copies_module]).items():
        (folder / name).write_text(text)
    for template in TEMPLATES.glob("*.py"):
        shutil.copy(template, folder / template.name)
    described = {
        "model": model,
        "device": device.type,
        "host_bytes": host_bytes,
        "learning_rate": LEARNING_RATE,
        "inputs": [
            _input(given.name, given.kind, graph.types[given.name], largest_input or _smallest_table(graph))
            for given in graph.inputs
            if given.kind is not InputKind.TANGENT
        ],
        "programs": {one.name: _program(folder, graph, one, device) for one in planned},
    }
    (folder / "programs.json").write_text(json.dumps(described, indent=1))
    torch.save(dict(problem.captured.tensors), folder / "constants.pt")


def _input(name: str, kind: InputKind, type_: TensorType, below: int) -> dict[str, object]:
    dtype = str(TORCH_DTYPES[type_.dtype]).removeprefix("torch.")
    whole = below if kind is InputKind.INPUT else 1  # a counter among the buffers starts at zero
    return {"name": name, "kind": kind.value, "dtype": dtype, "shape": list(type_.shape), "below": whole}


def _smallest_table(graph: Graph) -> int:
    """Rows of the smallest embedding: numbers below it are rows of all. 2 where there is none: labels of two."""
    tables = [
        graph.types[node.operands[0]].shape[0] for node in graph.nodes if node.op.startswith("aten.embedding.default")
    ]
    return min(tables, default=2)


def _program(folder: Path, graph: Graph, planned: Planned, device: torch.device) -> dict[str, object]:
    """Writes the source; gives the description."""
    decisions, judged = planned.decisions, planned.replay
    ranked = rank_graph(graph, decisions)
    # Buffers are made where the program runs: this engine only stands for the one there.
    program = emit(ranked, decisions.mesh, 0, {}, device, copies=copies_on(CPU, HostPool(0)))
    (folder / f"{planned.name}.py").write_text(program.source(kernels="kernels"))
    moved = [node.operands[0] for node in ranked.nodes if node.op == "tier.offload"]
    on_host = [name for name in program.parameters if decisions.tiers.get(name) is Tier.HOST]
    return {
        "inputs": program.inputs,
        "returned": program.returned,
        "saved": program.saved,
        "parameters": program.parameters,
        "loss": ranked.loss,
        "updates": dict(ranked.updates),
        "tangent_dtype": str(TORCH_DTYPES[ranked.types[ranked.loss].dtype]).removeprefix("torch."),
        "device_state": [name for name in program.parameters if name not in on_host],
        "host_state": on_host,
        "host_buffers": host_buffer_sizes(ranked),
        "moved_bytes": sum(ranked.types[name].num_bytes for name in moved),
        "peak_bytes": judged.peak_bytes,
        "host_peak_bytes": judged.host_peak_bytes,
        "step_seconds": judged.step_seconds,
        "exposed_copy_seconds": judged.exposed_copy_seconds,
    }
