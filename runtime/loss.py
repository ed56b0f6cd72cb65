"""Which output of a model is differentiated."""

from collections.abc import Callable
from inspect import Parameter, signature

import torch

from shardwright.ir import CaptureError
from shardwright.runtime.torch_ops import tensor_type
from shardwright.runtime.trees import KeyPath, format_path, leaves

__all__ = ["LossFunction", "call_loss", "choose_loss"]

LossFunction = Callable[..., torch.Tensor]

WAYS_OUT = (
    "Either return a scalar loss from forward (as .loss, under the key 'loss', or as the only scalar; Hugging Face "
    "models do when they are given labels), name it with loss=, or give loss_fn=, which is called with the output"
)


def choose_loss(output: object, wanted: str | None, where: str) -> KeyPath:
    """Path of the output named `wanted`; otherwise of `.loss`, the key "loss" or the only scalar.

    `where` is the forward that returned it, for messages. Raises CaptureError saying what outputs there are.
    """
    found = [(path, leaf) for path, leaf in leaves(output) if isinstance(leaf, torch.Tensor)]
    scalars = [path for path, leaf in found if leaf.dim() == 0 and leaf.is_floating_point()]
    if wanted is not None:
        named = [path for path, _ in found if format_path(path).lstrip(".") == wanted.lstrip(".")]
        if not named:
            raise CaptureError(f"expected an output {wanted!r} of {where}, found {_listed(output)}. {WAYS_OUT}")
        if named[0] not in scalars:
            raise CaptureError(
                f"expected output {wanted!r} of {where} to be a scalar, found {_listed(output)}. {WAYS_OUT}"
            )
        return named[0]
    usual = [path for path in scalars if format_path(path) == ".loss"]
    chosen = usual or scalars
    if len(chosen) != 1:
        number = "several scalars" if chosen else "no scalar"
        raise CaptureError(f"expected one scalar loss from {where}, found {number} among {_listed(output)}. {WAYS_OUT}")
    return chosen[0]


def call_loss(
    loss_fn: LossFunction, output: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> torch.Tensor:
    """`loss_fn(output)`, or with the model's own arguments after it where it has more parameters than one."""
    parameters = signature(loss_fn).parameters.values()
    required = [p for p in parameters if p.default is Parameter.empty and p.kind is not Parameter.VAR_KEYWORD]
    if len(required) == 1 and required[0].kind is not Parameter.VAR_POSITIONAL:
        return loss_fn(output)
    return loss_fn(output, *args, **kwargs)


def _listed(output: object) -> str:
    found = [f"{format_path(path) or 'the output'}: {_kind(leaf)}" for path, leaf in leaves(output)]
    return ", ".join(found) or "no outputs"


def _kind(leaf: object) -> str:
    return str(tensor_type(leaf)) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
