"""Who this process is among the ranks, the mesh of a plan as torch knows it, and ranks started on this machine.

Needs a launcher's environment (torchrun, or SLURM's `srun`) or an initialised `torch.distributed`; without both the
world is this one process, and no process group is made: collectives of one rank do not occur in a rank graph.
"""

import atexit
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwright.ir import Mesh, PlanError, ShardwrightError
from shardwright.runtime.rank_pool import RankError, RankPool, run_ranks

__all__ = ["RankError", "RankPool", "Ranks", "device_mesh", "group_names", "run_ranks", "world"]

_GRACE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all of them."""

    rank: int
    size: int
    local_rank: int
    """Number on its node; picks the device."""
    device: torch.device


def world() -> Ranks:
    """This process's place; joins the process group that the launcher describes when nobody has yet."""
    if not dist.is_initialized():
        _join()
    if not dist.is_initialized():
        return Ranks(0, 1, 0, _device(0))
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", dist.get_rank())))
    return Ranks(dist.get_rank(), dist.get_world_size(), local_rank, _device(local_rank))


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _join() -> None:
    """Initialise torch.distributed from torchrun's or srun's variables; do nothing where there are none."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size, local_rank = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        address = "env://"
    elif "SLURM_STEP_NUM_TASKS" in os.environ:  # a batch script itself has SLURM_NTASKS too, but is no rank
        rank, size, local_rank = (
            int(os.environ[key]) for key in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        )
        address = _slurm_address()
    else:
        return
    if size == 1:
        return
    device = _device(local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    atexit.register(_leave)


def _leave() -> None:
    """End the group that was joined here. Left to the interpreter's end, a thread of gloo's that still holds a tensor
    asks for a lock that is gone, and the process aborts. After an error the other ranks may be gone: no goodbye."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
        # torch._dynamo, once imported, keeps the group and its threads alive: let them drop what they hold.
        time.sleep(_GRACE_SECONDS)


def _slurm_address() -> str:
    """Where the ranks of a job step meet: MASTER_ADDR where set, otherwise the node that launched the step."""
    host = os.environ.get("MASTER_ADDR") or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if not host:
        raise ShardwrightError(
            "expected MASTER_ADDR or SLURM_LAUNCH_NODE_IPADDR in the environment of a SLURM job step, found neither; "
            "export MASTER_ADDR with the name of the first node"
        )
    job = int(os.environ.get("SLURM_JOB_ID", "0"))
    port = os.environ.get("MASTER_PORT", str(20000 + job % 10000))
    return f"tcp://{host}:{port}"


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """The plan's mesh over all ranks, axes by name. Collective: every rank calls it, in the same order."""
    ranks = world()
    if ranks.size != mesh.num_ranks:
        raise PlanError(
            f"expected {mesh.num_ranks} ranks, as the plan's mesh {mesh} says, found {ranks.size}; start "
            f"`torchrun --nproc-per-node {mesh.num_ranks}`, or plan again for {ranks.size}"
        )
    return init_device_mesh(ranks.device.type, mesh.sizes, mesh_dim_names=mesh.axes)


def group_names(devices: DeviceMesh) -> Mapping[str, str]:
    """Axis to the name of this rank's process group along it, as functional collectives want it."""
    axes = devices.mesh_dim_names or ()
    return {axis: str(devices.get_group(axis).group_name) for axis in axes}
