"""A module's parameters as their own shards: DTensors that hold only what the plan gives this rank.

Needs the module (whole values, or on `meta` with somebody who fills them), layouts at rest by parameter name, and the
mesh. Replaces every parameter on the module, once per object, so tied ones stay tied; buffers stay plain and whole.
The order and the keys of `state_dict` stay; a checkpoint of plain whole tensors loads, each rank cutting its part.

Values are those of rank 0: as after DDP's start, ranks that built other weights are overruled, not mixed. In a world
of one nothing is split and parameters stay plain. Those that the plan keeps on the host get memory there.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from shardwright.ir import Layout, Mesh, PlanError, Shard, Strided, divides, format_layout, replicated
from shardwright.runtime.compat import StridedShard, dtensor_elsewhere
from shardwright.runtime.shards import local_outer, shard

__all__ = ["Home", "accept_whole_values", "as_dtensor", "distribute", "local_part", "torch_placements", "whole"]


@dataclass(frozen=True, eq=False)
class Home:
    """Where the parameters of a plan live: everything that is needed to cut one."""

    mesh: Mesh
    rank: int
    device: torch.device
    devices: DeviceMesh | None
    """None in a world of one."""
    layouts: Mapping[str, Layout]
    """At rest, by parameter name; those not named are whole on every rank."""
    on_host: frozenset[str] = frozenset()
    """Parameters that lie on the host."""

    def layout(self, name: str) -> Layout:
        return self.layouts.get(name, replicated(self.mesh))

    def device_of(self, name: str) -> torch.device:
        """Where the value of that name lies at rest."""
        return torch.device("cpu") if name in self.on_host else self.device

    def __deepcopy__(self, memo: object) -> "Home":
        """A copied module lives on the same ranks."""
        return self


def torch_placements(layout: Layout, mesh: Mesh) -> tuple[TorchPlacement, ...]:
    """The layout as DTensor spells it; it counts the outer size of a strided split on what the axes before it left."""
    found: list[TorchPlacement] = []
    for axis, placement in enumerate(layout):
        if isinstance(placement, Strided):
            found.append(StridedShard(placement.dim, split_factor=local_outer(layout, axis, mesh)))
        elif isinstance(placement, Shard):
            found.append(TorchShard(placement.dim))
        else:
            reduce = getattr(placement, "reduce", None)
            found.append(TorchReplicate() if reduce is None else TorchPartial(reduce))
    return tuple(found)


def local_part(value: Tensor, name: str, home: Home, device: torch.device | None = None) -> Tensor:
    """This rank's part of a whole value, in memory of its own, where it lies at rest or on the device given."""
    part = shard(value.detach(), home.layout(name), home.mesh, home.rank)
    part = part.to(device or home.device_of(name)).contiguous()
    return part.clone() if part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() else part


def as_dtensor(local: Tensor, shape: torch.Size, layout: Layout, home: Home) -> Tensor:
    """The local tensor as its user sees it: a DTensor of the whole shape; plain in a world of one."""
    if home.devices is None:
        return local
    stride, placements = torch.empty(shape, device="meta").stride(), torch_placements(layout, home.mesh)
    if local.device.type != home.devices.device_type:
        return dtensor_elsewhere(local, home.devices, placements, shape, stride)
    return DTensor.from_local(local, home.devices, placements, run_check=False, shape=shape, stride=stride)


def whole(tensor: Tensor) -> Tensor:
    """The whole value on every rank. Collective where it is split."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute(module: nn.Module, home: Home) -> dict[nn.Parameter, nn.Parameter]:
    """Put the shards on the module. Gives each old parameter with the new one; the old ones' memory is freed.

    Raises PlanError for a layout that does not fit, or a parameter still on `meta`.
    """
    _check(module, home)
    if home.devices is None:
        for name, parameter in module.named_parameters():
            if name in home.on_host:
                parameter.data = local_part(parameter, name, home)
        return {}
    _agree(module.buffers(), home)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, old in list(module.named_parameters(remove_duplicate=False)):
        if old not in replaced:
            replaced[old] = _shard_parameter(name, old, home)
        _set(module, name, replaced[old])
    accept_whole_values(module, home)
    return replaced


def accept_whole_values(module: nn.Module, home: Home) -> None:
    """Let `load_state_dict` take checkpoints of plain whole tensors."""
    module.register_load_state_dict_pre_hook(WholeValues(home))  # type: ignore[no-untyped-call]


def _check(module: nn.Module, home: Home) -> None:
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise PlanError(
                f"expected values for {name}, found it on meta; give `state_dict=` or `init=` to materialise it"
            )
        if isinstance(parameter, DTensor):
            raise PlanError(f"expected {name} to be a plain parameter, found a DTensor; plan before anything shards it")
        if not divides(tuple(parameter.shape), home.layout(name), home.mesh):
            raise PlanError(
                f"expected a shape that {format_layout(home.layout(name))} over {home.mesh} divides, found "
                f"{list(parameter.shape)} of {name}; plan again for this model"
            )
    for name, _ in module.named_buffers():
        if home.layout(name) != replicated(home.mesh):
            raise PlanError(
                f"expected buffer {name} whole on every rank, found {format_layout(home.layout(name))}; "
                "change its `place` line to R"
            )


def _agree(tensors: Iterable[Tensor], home: Home) -> None:
    """Give every rank the values of rank 0."""
    for tensor in tensors:
        carried = tensor.detach().to(home.device).contiguous()
        dist.broadcast(carried, src=0)
        if carried.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(carried)


def _shard_parameter(name: str, old: nn.Parameter, home: Home) -> nn.Parameter:
    _agree([old], home)
    local = local_part(old, name, home)
    new = nn.Parameter(as_dtensor(local, old.shape, home.layout(name), home), requires_grad=old.requires_grad)
    old.data = old.data.new_empty(0)  # whoever still holds it, an optimizer say, does not hold the whole
    old.grad = None
    return new


def _set(module: nn.Module, name: str, new: nn.Parameter) -> None:
    """By setattr, not by the table: recurrent layers keep a second list of their weights in step."""
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, new)


@dataclass(frozen=True, eq=False)
class WholeValues:
    """Before load_state_dict copies: whole plain values become this rank's parts. Nothing is communicated."""

    home: Home

    def __call__(
        self, module: nn.Module, state: dict[str, object], prefix: str, metadata: object, *lists: object
    ) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state.get(prefix + name)
            if isinstance(value, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue  # a wrong shape is reported by load_state_dict itself
            local = local_part(value, name, self.home)
            state[prefix + name] = as_dtensor(local, value.shape, self.home.layout(name), self.home)

    def __deepcopy__(self, memo: object) -> "WholeValues":
        return self
