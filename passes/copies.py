"""Copies between tiers in a rank graph: which tier each goes to or comes from, what lies on the host for good, and what
the disk takes.

A copy on the host is counted to the byte. One on disk takes whole blocks of its file, since direct I/O moves nothing
less, and passes through buffers in host memory that are there all along: a fixed number, each as large as the largest
copy but no larger than a chunk. `runtime/disk_copies` makes exactly these.
"""

from collections.abc import Iterable
from typing import Final

from shardwright.ir import Graph, GraphError, Node, Tier
from shardwright.ir.cluster import Host
from shardwright.passes.prices import Prices

__all__ = [
    "CHUNK_BYTES", "DISK_BLOCK_BYTES", "NUM_BUFFERS", "buffer_bytes", "copied_to", "lost_seconds", "on_host",
    "slot_bytes", "tier_of",
]  # fmt: skip

DISK_BLOCK_BYTES: Final = 4096
"""Direct I/O wants offsets, lengths and memory in multiples of the device's block, 512 or 4096 bytes."""
CHUNK_BYTES: Final = 4 * 2**20
"""What one read or write moves at most: large enough for the full speed of a drive."""
NUM_BUFFERS: Final = 2
"""While one is written, the next is filled."""


def tier_of(graph: Graph, node: Node) -> Tier:
    """The other end of a start or wait of `tier.*`: of an offload where it goes, of a reload where it comes from."""
    start = node
    while start.op != "tier.offload":
        if start.op not in ("tier.wait", "tier.reload"):
            raise GraphError(f"expected {node.op} {node.name} to follow a tier.offload, found {start.op} {start.name}")
        if start.operands[0] not in graph.producers:
            return Tier.HOST  # a parameter
        start = graph.producers[start.operands[0]]
    tier = start.args[1] if len(start.args) > 1 else None
    if tier not in (Tier.HOST, Tier.DISK):
        raise GraphError(f"expected tier host or disk in {start.op} of {start.name}, found {tier!r}")
    return Tier(str(tier))


def on_host(graph: Graph) -> frozenset[str]:
    """Parameters that lie on the host: the program copies them in where it reads them."""
    return frozenset(
        node.operands[0] for node in graph.nodes if node.op == "tier.reload" and node.operands[0] not in graph.producers
    )


def copied_to(graph: Graph, tier: Tier) -> tuple[Node, ...]:
    """The offloads to a tier, in order."""
    return tuple(node for node in graph.nodes if node.op == "tier.offload" and tier_of(graph, node) is tier)


def lost_seconds(prices: Prices, host: Host, num_bytes: int) -> float:
    """Of compute, to a copy to or from any tier, however well it hides: the bytes pass through the host's memory."""
    return (1.0 - host.overlap) * prices.copy_seconds(num_bytes)


def slot_bytes(num_bytes: int) -> int:
    """What a copy of `num_bytes` takes on disk.

    >>> slot_bytes(0), slot_bytes(1), slot_bytes(8192)
    (0, 4096, 8192)
    """
    return -(-num_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


def buffer_bytes(sizes: Iterable[int]) -> int:
    """Host memory through which copies of these sizes go to disk and back, with room to align it.

    >>> buffer_bytes([]), buffer_bytes([100, 5000]), buffer_bytes([10**9])
    (0, 20480, 8392704)
    """
    largest = max(map(slot_bytes, sizes), default=0)
    return NUM_BUFFERS * min(CHUNK_BYTES, largest) + DISK_BLOCK_BYTES if largest else 0
