"""What a rank does in the tests of emission. Imports nothing of the tests: a rank reads this file alone."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwright.ir import Graph, Mesh
from shardwright.runtime import kernels
from shardwright.runtime.emit import emit
from shardwright.runtime.faults import Fault
from shardwright.runtime.ranks import device_mesh, group_names, world
from shardwright.runtime.tracker import StepMemory

__all__ = ["Case", "Values", "gather_many", "run_cases"]

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One emitted program, run for some steps."""

    graph: Graph
    mesh: Mesh
    steps: list[list[Values]]
    """For each step, for each rank, the local inputs."""
    fault: Fault | None = None


def run_cases(cases: list[Case]) -> list[tuple[list[Values], int]]:
    """For each case: what each step hands back by value name, and the peak of bytes over the steps."""
    groups = group_names(device_mesh(cases[0].mesh))
    return [_run(case, dict(groups)) for case in cases]


def _run(case: Case, groups: dict[str, str]) -> tuple[list[Values], int]:
    rank = world().rank
    program = emit(case.graph, case.mesh, rank, groups, torch.device("cpu"), fault=case.fault)
    found, peak_bytes = [], 0
    for step in case.steps:
        given = step[rank]
        with StepMemory(given.values(), block_bytes=1) as memory:
            returned, saved = program.forward([given[name] for name in program.inputs])
            gradients = program.backward(saved, *(given[name] for name in program.tangents))
        peak_bytes = max(peak_bytes, memory.peak_bytes)
        values = dict(zip(program.returned, returned, strict=True))
        found.append({**values, **dict(zip(case.graph.gradients.values(), gradients, strict=True))})
    return found, peak_bytes


def gather_many(mesh: Mesh, num_rounds: int, in_flight: int) -> int:
    """How many of the gathers gave something else than every rank's own number, `in_flight` of them at a time."""
    (group,) = group_names(device_mesh(mesh)).values()
    rank, num_wrong = world().rank, 0
    expected = torch.arange(float(mesh.num_ranks)).repeat_interleave(64)
    for _ in range(num_rounds):
        sent = [torch.full((64,), float(rank) + 10 * at) for at in range(in_flight)]
        started = [kernels.all_gather(x, mesh.num_ranks, group) for x in sent]
        while started:
            at = in_flight - len(started)
            found = kernels.wait(started.pop(0), sent[at])
            num_wrong += not torch.equal(found, expected + 10 * at)
    return num_wrong
