"""A Llama as a target, and a cluster whose disk is worth moving to, in a file: what plans for a disk are tried with."""

from dataclasses import replace
from pathlib import Path

from tests.planner.fast_host import fast_host
from tests.planner.measured_step import Size, llama
from torch import Tensor, nn

from shardwright.ir import Disk, print_cluster

__all__ = ["SIZE", "build", "fast_disk"]

SIZE = Size(num_layers=2)
TARGET = f"{__name__}:build"


def build() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """Of `SIZE`."""
    return llama(SIZE)


def fast_disk(folder: Path) -> str:
    """The path of the cluster's file; the disk tier's file is made beside it."""
    machines = fast_host()
    disk = Disk(2**34, 2e10, 2e10, 1e-6, str(folder))
    path = folder / "machines.toml"
    path.write_text(print_cluster(replace(machines, disk=disk)))
    return str(path)
