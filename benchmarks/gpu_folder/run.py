"""Train by the programs in this folder and compare with what their plans say. Needs torch >= 2.11 and nothing else.

    python run.py [--steps 20] [--rounds 3] [--seed 0] [--values FILE] [--gradients FILE] [--only NAME,...]

Parameters and batch are made from shapes and the seed, or read from `--values` (a dict by name, as `torch.save` writes
it). Each program first runs alone for its peak of memory; then they are timed in turns, `--steps` at a time. Prints
JSON. `--gradients` writes loss and gradients of the first step of each program.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import attention
import memory
import torch
from training import Training

HERE = Path(__file__).parent
WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--values", type=Path, help="parameters, buffers and batch by name")
    parser.add_argument("--gradients", type=Path, help="where to write loss and gradients of each program")
    parser.add_argument("--only", default="", help="names of programs, comma separated")
    given = parser.parse_args()
    described = json.loads((HERE / "programs.json").read_text())
    device = torch.device(described["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("expected a CUDA device, for which this folder was written, found none: write one for --device cpu")
    if device.type == "cuda":
        attention.register()
    values = torch.load(given.values, weights_only=True) if given.values else {}
    wanted = given.only.split(",") if given.only else list(described["programs"])

    def training(name: str) -> Training:
        return Training(described, name, device, given.seed, values)

    workspace_bytes = memory.workspace_bytes(device)
    found = {name: measured(training(name), described["programs"][name], workspace_bytes) for name in wanted}
    if given.gradients:
        torch.save({name: training(name).gradients() for name in wanted}, given.gradients)
    seconds = timed(training, wanted, given.steps, given.rounds, device)
    for name in wanted:
        found[name]["step_seconds"] = statistics.median(seconds[name])
        found[name]["round_seconds"] = seconds[name]
    print(json.dumps(result(described, device, workspace_bytes, found), indent=1))


def measured(training: Training, described: dict[str, object], workspace_bytes: int) -> dict[str, object]:
    """Loss and peak of a step, with optimizer state in place."""
    for _ in range(WARM_UP):
        loss = training.step()
    peak = memory.peak_of(training)
    training.close()
    measured_bytes = None if peak.max_memory_allocated is None else peak.max_memory_allocated - workspace_bytes
    compared = peak.tracked_bytes if measured_bytes is None else measured_bytes
    return {
        "loss": float(loss),
        "max_memory_allocated": "not measured" if measured_bytes is None else measured_bytes,
        "tracked_bytes": "not measured" if peak.tracked_bytes is None else peak.tracked_bytes,
        "predicted_peak_bytes": described["peak_bytes"],
        "measured_over_predicted": compared / described["peak_bytes"],
        "host_pool_bytes": training.copies.pool.peak_bytes,
        "predicted_step_seconds": described["step_seconds"],
        "moved_bytes": described["moved_bytes"],
    }


def timed(training, names: list[str], steps: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of a step, one figure a round; every other round goes the other way round."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            one = training(name)
            for _ in range(WARM_UP):
                one.step()
            memory.synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                one.step()
            memory.synchronize(device)
            seconds[name].append((time.perf_counter() - start) / steps)
            one.close()
    return seconds


def result(described, device: torch.device, workspace_bytes: int, found) -> dict[str, object]:
    on_cuda = device.type == "cuda"
    ratios = {}
    if "kept" in found:
        kept = found["kept"]["round_seconds"]
        ratios = {
            name: statistics.median(ours / base for ours, base in zip(values["round_seconds"], kept, strict=True))
            for name, values in found.items()
            if name != "kept"
        }
    return {
        "model": described["model"],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "cublas_workspace_bytes": workspace_bytes if on_cuda else "not measured",
        "programs": found,
        "step_over_kept": ratios,
    }


if __name__ == "__main__":
    main()
