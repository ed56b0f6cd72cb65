"""Which host buffers a step of a rank graph needs, so that they are made before the first step. In bytes."""

from shardwright.ir import DTYPE_BYTES, Graph, TensorType
from shardwright.runtime.copies import extent

__all__ = ["host_buffer_sizes"]


def host_buffer_sizes(graph: Graph) -> tuple[int, ...]:
    """Bytes of the buffers a step of the rank graph needs: of each size the most that are in use at once."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for position, node in enumerate(graph.nodes):
        if node.op == "tier.offload":
            size = _type_bytes(graph.types[node.operands[0]])
            spans.setdefault(size, []).append((position, max(position, _last_read(graph, node.name))))
    return tuple(size for size, found in sorted(spans.items()) for _ in range(_most_at_once(found)))


def _last_read(graph: Graph, host: str) -> int:
    """Position of the last node that reads a host copy, under any of its names."""
    last = -1
    for position in graph.users.get(host, ()):
        node = graph.nodes[position]
        again = _last_read(graph, node.name) if node.op == "tier.wait" and node.operands[0] == host else -1
        last = max(last, position, again)
    return last


def _most_at_once(spans: list[tuple[int, int]]) -> int:
    return max(sum(start <= at <= end for start, end in spans) for at, _ in spans)


def _type_bytes(kind: TensorType) -> int:
    if kind.strides is None:
        return kind.num_bytes
    return extent(kind.shape, kind.strides) * DTYPE_BYTES[kind.dtype]
