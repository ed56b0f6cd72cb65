"""What moves storages between tiers on a rank: an engine for the host, one for the disk where a plan uses it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from shardwright.ir import Graph, Tier
from shardwright.passes.copies import copied_to
from shardwright.runtime.copies import Copies, copies_on
from shardwright.runtime.disk_copies import DiskCopies
from shardwright.runtime.disk_directory import disk_directory
from shardwright.runtime.disk_file import DiskFile
from shardwright.runtime.host_pool import HostPool

__all__ = ["NO_ROOM", "Room", "engines", "uses_disk"]


@dataclass(frozen=True, slots=True)
class Room:
    """What a rank may use beside its device."""

    host_bytes: int = 0
    disk_bytes: int = 0
    cluster: str = ""
    """Preset or file; its [disk] says where the file is made."""
    disk_path: str | Path | None = None
    """Where it is made instead."""


NO_ROOM = Room()


def engines(graph: Graph, device: torch.device, room: Room) -> tuple[Copies, DiskCopies | None]:
    """Engines for a rank graph, within their budgets. Raises DiskError where there is no directory."""
    pool = HostPool(room.host_bytes, pinned=device.type == "cuda")
    disk = None
    if uses_disk(graph):
        file = DiskFile(disk_directory(room.cluster, room.disk_path), room.disk_bytes)
        disk = DiskCopies(device, pool, file)
    return copies_on(device, pool), disk


def uses_disk(graph: Graph) -> bool:
    return bool(copied_to(graph, Tier.DISK))
