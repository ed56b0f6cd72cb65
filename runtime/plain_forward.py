"""Forward of a planned module outside training: the model's own code on gathered parameters.

All parameters are gathered for the call and freed after it, so it needs the memory of the whole model. Where gradients
are on (fine-tuning under `eval()`), they flow back into the shards. A rank's own part of the batch is gathered too, so
that losses are those of the global batch; outputs that have the batch's leading dim come back as this rank's part.
"""

import inspect
from collections.abc import Callable

from torch import Tensor, nn
from torch.func import functional_call

from shardwright.ir import InputError, Layout, Replicate, Shard
from shardwright.runtime.captured import bound_inputs, call_arguments
from shardwright.runtime.inputs import LocalPart, gathered
from shardwright.runtime.parameters import whole
from shardwright.runtime.session import Session
from shardwright.runtime.shards import shard
from shardwright.runtime.trees import Key, KeyPath, format_path, map_leaves

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
    if session is None:
        return forward(module, *args, **kwargs)
    home = session.installed.home
    if home.devices is None and not home.on_host:
        return forward(module, *args, **kwargs)
    parts = _Parts(session)
    args, kwargs = call_arguments(*parts.gather(args, kwargs))
    wholes = {f"model.{name}": whole(parameter.to(home.device)) for name, parameter in module.named_parameters()}
    output = functional_call(_Call(module, forward), wholes, args, kwargs)
    return parts.own_part(output)


class _Parts:
    """Own parts of the batch on the way in, own parts of the outputs on the way out."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._home = session.installed.home
        self._planned = {
            format_path(leaf.path): session.installed.inputs[leaf.name] for leaf in session.installed.captured.inputs
        }
        self._split: Layout | None = None
        """How dim 0 of the batch is split, once something was gathered."""
        self._batch_size = 0

    def gather(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[inspect.Signature, dict[str, object]]:
        signature = self._session.installed.captured.signature
        bound = bound_inputs(signature, args, kwargs)
        return signature, {name: map_leaves(value, self._whole, (Key("item", name),)) for name, value in bound.items()}

    def _whole(self, path: KeyPath, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if not isinstance(leaf, LocalPart) and self._session.input_mode == "global":
            return leaf
        planned = self._planned.get(format_path(path))
        if planned is None:
            raise InputError(
                f"expected only parts of {', '.join(self._planned)}, found {format_path(path)}; "
                "hand in the whole tensor"
            )
        found = gathered(leaf.as_subclass(Tensor), planned.layout, self._home)
        split = tuple(p if p == Shard(0) else Replicate() for p in planned.layout)
        if Shard(0) in split:
            self._split, self._batch_size = split, found.shape[0]
        return found

    def own_part(self, output: object) -> object:
        return output if self._split is None else map_leaves(output, self._cut)

    def _cut(self, _: KeyPath, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or self._split is None or leaf.dim() == 0 or leaf.shape[0] != self._batch_size:
            return leaf
        return shard(leaf, self._split, self._home.mesh, self._home.rank)
