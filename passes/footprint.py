"""Footprint: the bytes one rank holds at every node of its program, and what they consist of at the peak.

Needs a rank graph, the optimizer's appetite and the tier of each parameter's state. Gives bytes of device, host and
disk. A node's results are allocated while its operands are alive; what dies with a node is freed behind it. Parameters,
buffers, the batch and optimizer state are there all along. The optimizer's step follows the last node: by then only
what the caller holds is alive, with the step's temporaries on top. The buffers of the disk are on the host all along.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.ir import DTYPE_BYTES, Graph, InputKind, TensorType, Tier
from shardwright.passes.copies import buffer_bytes, copied_to, on_host
from shardwright.passes.host_steps import stepped_in_backward
from shardwright.passes.lifetimes import Storage, curve_bytes, lifetimes, rounded
from shardwright.passes.optimizers import OptimizerSpec, StepKind

__all__ = ["Footprint", "footprint", "lasting_bytes", "stepped"]


@dataclass(frozen=True)
class Footprint:
    """Memory of one rank over one step."""

    curve_bytes: tuple[int, ...]
    """Device bytes while each node runs; the last entry is the optimizer's step."""
    peak_position: int
    """Index into `curve_bytes` of the first largest entry."""
    peak_storages: tuple[Storage, ...]
    """Device storages alive there, optimizer state included, largest first."""
    host_curve_bytes: tuple[int, ...]
    """Host bytes, as `curve_bytes`."""
    disk_curve_bytes: tuple[int, ...]
    """Bytes of the file, as `curve_bytes`."""

    @property
    def peak_bytes(self) -> int:
        return self.curve_bytes[self.peak_position]

    @property
    def host_peak_bytes(self) -> int:
        return max(self.host_curve_bytes)

    @property
    def disk_peak_bytes(self) -> int:
        return max(self.disk_curve_bytes)


def footprint(
    graph: Graph,
    optimizer: OptimizerSpec,
    step_kind: StepKind,
    tiers: Mapping[str, Tier],
    block_bytes: int,
    *,
    accumulates: bool = False,
) -> Footprint:
    """Memory of one rank; `tiers` names parameters whose state is not on the device.

    A parameter whose state is on the host is stepped there, alone: its value and gradient are staged beside the state.
    Where the program steps in backward, several are staged at once, from the start of each step to its end.
    Where a step `accumulates`, gradients of earlier micro-batches are there until those of this one are added to them.
    """
    end = len(graph.nodes)
    on_host = {name for name in stepped(graph) if tiers.get(name, Tier.DEVICE) is Tier.HOST}
    storages = (
        *lifetimes(graph, block_bytes).storages,
        *(_state(graph, name, optimizer, name in on_host, block_bytes) for name in stepped(graph)),
        *(_accumulated(graph, name, block_bytes) for name in stepped(graph) if accumulates),
        _step(graph, [name for name in stepped(graph) if name not in on_host], optimizer, step_kind, block_bytes),
        *_host_steps(graph, on_host, optimizer),
        _disk_buffers(graph),
    )
    curve, on_host_curve, on_disk_curve = (curve_bytes((s for s in storages if s.tier is tier), end) for tier in Tier)
    position = curve.index(max(curve))
    alive = (s for s in storages if s.tier is Tier.DEVICE and s.num_bytes and s.birth <= position <= s.death)
    return Footprint(
        curve_bytes=curve,
        peak_position=position,
        peak_storages=tuple(sorted(alive, key=lambda s: (-s.num_bytes, s.name))),
        host_curve_bytes=on_host_curve,
        disk_curve_bytes=on_disk_curve,
    )


def stepped(graph: Graph) -> tuple[str, ...]:
    """Parameters that the optimizer steps: those with a gradient. Others never get state."""
    return tuple(name for name in graph.inputs_of(InputKind.PARAM) if name in graph.gradients)


def lasting_bytes(
    graph: Graph, optimizer: OptimizerSpec, tiers: Mapping[str, Tier], block_bytes: int, *, accumulates: bool = False
) -> int:
    """Device bytes that are there all along and are not the program's: optimizer state, accumulated gradients."""
    total = 0
    for name in stepped(graph):
        if tiers.get(name, Tier.DEVICE) is Tier.DEVICE:
            total += _state(graph, name, optimizer, False, block_bytes).num_bytes
        if accumulates:
            total += _accumulated(graph, name, block_bytes).num_bytes
    return total


def _accumulated(graph: Graph, parameter: str, block_bytes: int) -> Storage:
    num_bytes = rounded(graph.types[graph.gradients[parameter]].num_bytes, block_bytes)
    return Storage(f"accumulated({parameter})", num_bytes, -1, len(graph.nodes) - 1, Tier.DEVICE)


def _state(graph: Graph, parameter: str, optimizer: OptimizerSpec, on_host: bool, block_bytes: int) -> Storage:
    block, kind = 1 if on_host else block_bytes, graph.types[parameter]
    element_bytes = DTYPE_BYTES[kind.dtype]
    tensor_bytes = rounded(kind.num_elements * optimizer.state_element_bytes(element_bytes), block)
    tensors = optimizer.num_tensors(element_bytes) * tensor_bytes
    scalars = optimizer.num_scalars * rounded(DTYPE_BYTES["f32"], block)
    return Storage(f"state({parameter})", tensors + scalars, -1, len(graph.nodes), _host_or_device(on_host))


def _host_or_device(on_host: bool) -> Tier:
    return Tier.HOST if on_host else Tier.DEVICE


def _step(
    graph: Graph, parameters: Iterable[str], optimizer: OptimizerSpec, step_kind: StepKind, block_bytes: int
) -> Storage:
    """Temporaries of stepping these parameters on the device: those of each dtype at once, or, as torch's loop does,
    one after the other whatever their dtype."""
    groups: dict[str, list[TensorType]] = {}
    for parameter in parameters:
        kind = graph.types[parameter]
        loops = step_kind is StepKind.LOOP and not optimizer.keeps_master(DTYPE_BYTES[kind.dtype])
        groups.setdefault("" if loops else kind.dtype, []).append(kind)
    sizes = (_temporary_bytes(group, optimizer, step_kind, block_bytes) for group in groups.values())
    return Storage("optimizer step", max(sizes, default=0), len(graph.nodes), len(graph.nodes), Tier.DEVICE)


def _temporary_bytes(group: Sequence[TensorType], optimizer: OptimizerSpec, step_kind: StepKind, block: int) -> int:
    element_bytes = min(DTYPE_BYTES[kind.dtype] for kind in group)
    sizes = [-(-rounded(kind.num_bytes, block) // element_bytes) for kind in group]
    return optimizer.temporary_bytes(sizes, element_bytes, step_kind)


def _host_steps(graph: Graph, parameters: Collection[str], optimizer: OptimizerSpec) -> Iterator[Storage]:
    """Values staged on the host unless they lie there, temporaries of the steps there, and gradients where `tier.step`
    did not copy them."""
    end, early, residents = len(graph.nodes), stepped_in_backward(graph), on_host(graph)
    births = {node.name: position for position, node in enumerate(graph.nodes)}
    for name, step in early.items():
        if name in residents:
            continue
        done = births[graph.gradients[name]]
        yield Storage(f"step({name})", graph.types[name].num_bytes, births[step.name], done, Tier.HOST)
    if early:
        first = min(births[step.name] for step in early.values())
        last = max(births[graph.gradients[name]] for name in early)
        yield Storage("host steps", _most_temporaries(graph, early, optimizer), first, last, Tier.HOST)
    late = [name for name in parameters if name not in early]
    kinds = [graph.types[name] for name in late]
    staged = max((optimizer.host_staged_bytes(k.num_elements, DTYPE_BYTES[k.dtype]) for k in kinds), default=0)
    yield Storage("optimizer step", staged, end, end, Tier.HOST)


def _most_temporaries(graph: Graph, parameters: Iterable[str], optimizer: OptimizerSpec) -> int:
    kinds = [graph.types[name] for name in parameters]
    return max((optimizer.host_temporary_bytes(k.num_elements, DTYPE_BYTES[k.dtype]) for k in kinds), default=0)


def _disk_buffers(graph: Graph) -> Storage:
    sizes = [graph.types[node.name].storage_bytes for node in copied_to(graph, Tier.DISK)]
    return Storage("disk buffers", buffer_bytes(sizes), -1, len(graph.nodes), Tier.HOST)
