"""The machines: device, links by level, host, disk. Read from TOML or a preset by `cluster_text`."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Cluster", "Device", "Disk", "Host", "Link"]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one CPU rank."""

    kind: str
    """`cuda` or `cpu`."""
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: Mapping[str, float]
    """Peak matmul rate by dtype short name (`bf16`, `f32`)."""
    matmul_efficiency: float
    """Best-shape fraction of the peak that a large matmul reaches."""
    launch_seconds: float
    """Floor of one operator."""
    block_bytes: int
    """The allocator rounds each tensor up to this."""
    measured: bool
    """Whether seconds are measured on the device at hand instead of modelled."""


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network: inside a node, between nodes."""

    bytes_per_second: float
    """One direction, per rank, as a ring reaches it with large messages."""
    latency_seconds: float
    """Of one step of a ring."""
    overlap: float
    """Share of a collective's time that can hide behind compute: 1 with engines of its own, less on a CPU."""


@dataclass(frozen=True, slots=True)
class Host:
    """The node's memory as seen from one rank."""

    memory_bytes: int
    """Per rank."""
    copy_bytes_per_second: float
    copy_latency_seconds: float
    smallest_offload_bytes: int
    optimizer_elements_per_second: float
    """Adam steps of the host, elements per second and rank."""
    overlap: float
    """Share of the host's work, copies and optimizer steps, that can hide behind compute: 1 beside an accelerator; a
    CPU's ranks compute on the same cores and memory."""


@dataclass(frozen=True, slots=True)
class Disk:
    """Local storage as seen from one rank, with all ranks of the node at it."""

    capacity_bytes: int
    """Per rank."""
    write_bytes_per_second: float
    read_bytes_per_second: float
    latency_seconds: float
    """Of one write or read."""
    path: str = ""
    """The directory that files are made in, on every node; empty: the user's cache folder."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes of equal devices."""

    name: str
    num_nodes: int
    ranks_per_node: int
    device: Device
    intra: Link
    inter: Link
    """Per rank; equals `intra` where there is one node."""
    host: Host
    disk: Disk | None = None
    """None: nothing can be moved to disk."""

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node
