"""Forward of a planned module outside training: the model's own code on gathered parameters.

All parameters are gathered for the call and freed after it, so it needs the memory of the whole model. Where gradients
are on (fine-tuning under `eval()`), they flow back into the shards. A rank's own part of the batch is gathered too, so
that losses are those of the global batch; outputs that have the batch's leading dim come back as this rank's part.
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call

from shardwright.ir import Shard
from shardwright.runtime.inputs import LocalPart, PlannedInput, gathered
from shardwright.runtime.parameters import Home, whole
from shardwright.runtime.session import Session
from shardwright.runtime.shards import shard
from shardwright.runtime.trees import KeyPath, format_path, map_leaves

__all__ = ["plain_forward"]

Forward = Callable[..., object]


class _Call(nn.Module):
    """The model under its own forward: functional_call calls a module."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *args: object, **kwargs: object) -> object:
        return self._forward(self.model, *args, **kwargs)


def plain_forward(
    module: nn.Module, forward: Forward, session: Session | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """`forward(module, *args, **kwargs)` with whole parameters. Collective where they are split."""
    if session is None or session.installed.home.devices is None:
        return forward(module, *args, **kwargs)
    cut = _Uncut(session)
    args, kwargs = map_leaves((args, kwargs), cut)  # type: ignore[misc]
    wholes = {f"model.{name}": whole(parameter) for name, parameter in module.named_parameters()}
    call = _Call(module, forward)
    call.train(module.training)
    output = functional_call(call, wholes, args, kwargs)
    return cut.own_part(output)
