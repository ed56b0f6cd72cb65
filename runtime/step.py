"""One training step through autograd: the program's forward and backward as a single function of the parameters.

Parameters go in as the DTensors that the user has, so that autograd knows them; the program reads their local tensors,
and gradients come back as DTensors. What forward saved is a plain list that backward empties, so memory follows the
plan; in exchange saved-tensor hooks do not see it, and a second backward or a parameter changed in between is our
own error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.ir import ShardwrightError
from shardwright.runtime.compat import dtensor_like
from shardwright.runtime.program import Program, Saved
from shardwright.runtime.stepped_gradient import SteppedGradient

__all__ = ["run_step"]


def run_step(
    program: Program, loss: str, state: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The program's returned values by name; only the loss carries a gradient.

    `state` has the module's parameters and buffers, `others` the batch and constants.
    """
    trainable = [state[name] for name in program.parameters]
    results = _Step.apply(_Call(program, loss, state, others), *trainable)  # type: ignore[no-untyped-call]
    return dict(zip(program.returned, results, strict=True))


@dataclass(frozen=True, eq=False)
class _Call:
    program: Program
    loss: str
    state: Mapping[str, Tensor]
    others: Mapping[str, Tensor]

    def local_inputs(self) -> list[Tensor]:
        given = {name: local(tensor) for name, tensor in self.state.items()} | dict(self.others)
        return [given[name] for name in self.program.inputs]


def local(tensor: Tensor) -> Tensor:
    """The memory of this rank, without autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _version(tensor: Tensor) -> int:
    """How often it was written to: in place on the DTensor, or on its local memory."""
    return tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)


@dataclass(eq=False)
class _Kept:
    """What forward leaves for backward."""

    program: Program
    position: int
    """Of the loss among the returned values."""
    names: tuple[str, ...]
    parameters: Sequence[Tensor]
    versions: tuple[int, ...]
    """Of the parameters: how often each had been written to."""
    saved: list[Saved] | None

    def take(self) -> list[Saved]:
        """The saved list, once. Raises ShardwrightError the second time, or when a parameter has changed since."""
        if self.saved is None:
            raise ShardwrightError(
                "expected one backward for each forward, found a second one: what forward saved is gone, because it is "
                "freed as backward goes (also with retain_graph=True); run forward again"
            )
        changed = [
            name
            for name, parameter, version in zip(self.names, self.parameters, self.versions, strict=True)
            if _version(parameter) != version
        ]
        if changed:
            raise ShardwrightError(
                f"expected parameters as they were in forward, found {changed[0]} written to before backward (and "
                f"{len(changed) - 1} more); call optimizer.step() after backward()"
            )
        saved, self.saved = self.saved, None
        return saved


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *parameters: Tensor) -> tuple[Tensor, ...]:
        program = call.program
        versions = tuple(_version(parameter) for parameter in parameters)
        # The graph has the dtypes of the plan: an autocast around the call would change them under it.
        with torch.autocast(_device_type(call), enabled=False):
            returned, saved = program.forward(call.local_inputs())
        position = program.returned.index(call.loss)
        ctx.kept = _Kept(program, position, program.parameters, parameters, versions, saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for at, value in enumerate(returned) if at != position))
        return tuple(returned)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        kept: _Kept = ctx.kept
        tangent = tangents[kept.position]
        if tangent is None:
            return (None, *(None for _ in kept.parameters))
        with torch.autocast(tangent.device.type, enabled=False):
            gradients = kept.program.backward(kept.take(), tangent)
        return (None, *_as_gradients(gradients, kept.parameters, kept.program))


def _device_type(call: _Call) -> str:
    # Parameters may lie on the host.
    return next((tensor.device.type for tensor in (*call.others.values(), *call.state.values())), "cpu")


def _as_gradients(gradients: Sequence[Tensor], parameters: Sequence[Tensor], program: Program) -> list[Tensor | None]:
    """Gradients the user may write to: each dense and in memory of its own, a DTensor where the parameter is one.

    A parameter that the program has stepped gets none; what stands in its `.grad` says so to whoever reads it.
    """
    seen: set[tuple[int, int]] = set()
    result: list[Tensor | None] = []
    for name, gradient, parameter in zip(program.parameters, gradients, parameters, strict=True):
        if name in program.stepped:
            parameter.grad = SteppedGradient.of(parameter, name)
            result.append(None)
            continue
        where = (gradient.untyped_storage().data_ptr(), int(gradient.storage_offset()))
        own = gradient.clone() if where in seen else gradient.contiguous()
        seen.add(where)
        result.append(dtensor_like(own, parameter) if isinstance(parameter, DTensor) else own)
    return result
