"""Everything of torch that is private, and nothing else: one place to look at when torch moves.

Tested with torch 2.13. A test checks that no other file imports private parts.
"""

import logging
from contextlib import AbstractContextManager

import torch._dynamo.config
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder as ShardingPlaceholder
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_dispatch_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BoxedCodeGen",
    "BufferAOTInput",
    "DTensorSpec",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShardingPlaceholder",
    "StridedShard",
    "TangentAOTInput",
    "TensorMeta",
    "TorchDispatchMode",
    "TorchDynamoException",
    "TupleStrategy",
    "aot_export_joint_with_descriptors",
    "disable_dispatch_modes",
    "dtensor_elsewhere",
    "dtensor_like",
    "dynamo_graph_capture_for_export",
    "foreach_zero_",
    "get_decompositions",
    "one_axis_mesh",
    "sharding_propagator",
    "tracing_rules",
    "tree_leaves",
]


foreach_zero_ = torch._foreach_zero_
"""What `zero_grad(set_to_none=False)` of a fused optimizer calls."""


def sharding_propagator() -> ShardingPropagator:
    """DTensor's table of sharding rules."""
    return DTensor._op_dispatcher.sharding_propagator


def one_axis_mesh(size: int) -> DeviceMesh:
    """A mesh that only describes: no process group is made, and none of the process is touched."""
    with disable_dispatch_modes():
        return DeviceMesh("cpu", list(range(size)), _init_backend=False, _rank=0)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor of the same shape, mesh and placements; what `from_local` gives, without its cost."""
    return DTensor(local, like._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def dtensor_elsewhere(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor whose local memory is not on the mesh's kind of device: `from_local` would move it there."""
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def tracing_rules() -> AbstractContextManager[None]:
    """While inside, dynamo takes every size as a constant, also where an earlier capture had another, and skips calls
    of loggers, which otherwise end tracing."""
    # Those that libraries add to the class too (warning_once).
    calls = {call for name, call in vars(logging.Logger).items() if callable(call) and not name.startswith("_")}
    patch: AbstractContextManager[None] = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        ignore_logging_functions=calls,
    )
    return patch
