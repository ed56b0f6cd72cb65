"""What a plan decides: a layout for every value, a fate for every saved storage, a tier for what moves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from shardwright.ir.placements import Layout, Mesh

__all__ = ["Clip", "Decisions", "Fate", "Gather", "Schedule", "Tier"]


class Fate(StrEnum):
    """What becomes of a storage made in forward that backward reads. A storage without a fate is kept."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    """Freed after its last use in forward; its operator runs again in backward, before the first use there."""
    OFFLOAD = "offload"
    """Copied to host or disk after its last use in forward, copied back before its first use in backward."""


class Gather(StrEnum):
    """What becomes of a redistributed copy, such as a split parameter gathered, between forward and backward."""

    AGAIN = "again"
    """Freed after forward, made again in backward (of parameters: FSDP's reshard_after_forward)."""
    KEEP = "keep"


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Clip(StrEnum):
    """What the training script does with gradients between backward and the optimizer's step."""

    UNKNOWN = "unknown"
    """Anything: the optimizer steps after backward."""
    NONE = "none"
    """Nothing, it neither clips nor reads nor accumulates them: parameters whose state is on the host are stepped while
    backward goes on, and their gradients die there."""


MIB = 2**20


@dataclass(frozen=True, slots=True)
class Schedule:
    """How far starts and waits are moved apart: bytes that may be under way at once. More hides more and holds more."""

    bucket_bytes: int = 25 * MIB
    """Gradients reduced in one collective."""
    gather_bucket_bytes: int = MIB
    """Small parameters gathered in one collective."""
    gather_bytes: int = 64 * MIB
    """Parameter gathers started ahead of their use, on one axis."""
    reduce_bytes: int = 64 * MIB
    """Whole gradients that live only because their reduction is under way; as many again for their copy to the host and
    for their step there."""
    room_bytes: int = 0
    """What the program may hold, optimizer state aside, to give copies between tiers time; 0: each is waited for."""


@dataclass(frozen=True)
class Decisions:
    """Everything the rewriter needs beside the graph. Names are those of the captured graph."""

    mesh: Mesh
    layouts: Mapping[str, Layout]
    """Every value: as its operator makes it; for parameters, buffers and inputs: at rest.
    A parameter's gradient and optimizer state have the layout of the parameter at rest."""
    reads: Mapping[str, tuple[Layout, ...]]
    """`Node.name` to the layouts in which the node reads its operands, in the order of `Node.operands`."""
    fates: Mapping[str, Fate] = field(default_factory=dict)
    """By the value that made the storage (never a view)."""
    gathers: Mapping[str, Gather] = field(default_factory=dict)
    """By the value that is copied; copies of those not named are made again."""
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    """Where a parameter's optimizer state lives, device or host; those not named: on the device.
    Where the copy of an offloaded storage lies, host or disk; those not named: on the host."""
    parameters: Mapping[str, Tier] = field(default_factory=dict)
    """Where a parameter itself lies between its uses, device or host; those not named: on the device. One that is
    trained lies on the host only together with its state, where backward steps it."""
    schedule: Schedule = Schedule()
    clip: Clip = Clip.UNKNOWN
    """As declared; nothing that is decided, but the program depends on it."""
