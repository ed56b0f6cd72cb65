"""What copies to host and disk a step of a rank graph holds, so that there is room before the first step. In bytes."""

from shardwright.ir import Graph, Tier
from shardwright.passes.copies import copied_to, on_host, slot_bytes
from shardwright.passes.host_steps import stepped_in_backward

__all__ = ["disk_copy_sizes", "host_buffer_sizes"]

Span = tuple[int, int]
"""Positions of the first node with a copy and of the last."""


def host_buffer_sizes(graph: Graph) -> tuple[int, ...]:
    """Bytes of the buffers a step of the rank graph needs: of each size the most that are in use at once."""
    spans: dict[int, list[Span]] = {}
    for size, span in _copies(graph, Tier.HOST):
        spans.setdefault(size, []).append(span)
    positions = {node.name: position for position, node in enumerate(graph.nodes)}
    residents = on_host(graph)
    for parameter, step in stepped_in_backward(graph).items():
        ends = (positions[step.name], positions[graph.gradients[parameter]])
        gradient, value = step.operands
        for staged in (gradient,) if parameter in residents else (gradient, value):
            spans.setdefault(graph.types[staged].storage_bytes, []).append(ends)
    return tuple(size for size, found in sorted(spans.items()) for _ in range(_most_at_once(found)))


def disk_copy_sizes(graph: Graph) -> tuple[int, ...]:
    """Bytes of the copies that are on disk at once, at the moment when they take most."""
    copies = _copies(graph, Tier.DISK)
    moments = [tuple(size for size, (start, end) in copies if start <= at <= end) for _, (at, _) in copies]
    return max(moments, key=lambda sizes: sum(map(slot_bytes, sizes)), default=())


def _copies(graph: Graph, tier: Tier) -> list[tuple[int, Span]]:
    """Bytes and span of each copy to a tier."""
    positions = {node.name: position for position, node in enumerate(graph.nodes) if node.op == "tier.offload"}
    found = []
    for node in copied_to(graph, tier):
        start = positions[node.name]
        span = (start, max(start, _last_read(graph, node.name)))
        found.append((graph.types[node.operands[0]].storage_bytes, span))
    return found


def _last_read(graph: Graph, host: str) -> int:
    """Position of the last node that reads a copy, under any of its names."""
    last = -1
    for position in graph.users.get(host, ()):
        node = graph.nodes[position]
        again = _last_read(graph, node.name) if node.op == "tier.wait" and node.operands[0] == host else -1
        last = max(last, position, again)
    return last


def _most_at_once(spans: list[Span]) -> int:
    return max(sum(start <= at <= end for start, end in spans) for at, _ in spans)
