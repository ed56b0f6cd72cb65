"""The function that is traced: flat tensors in, the scalar loss and all other outputs out."""

import inspect
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwright.ir import CaptureError
from shardwright.runtime.blame import blame, place_of_forward
from shardwright.runtime.captured import call_arguments
from shardwright.runtime.compat import FakeTensorMode
from shardwright.runtime.fake_module import fake_tensor
from shardwright.runtime.loss import LossFunction, call_loss, choose_loss
from shardwright.runtime.naming import ROOT
from shardwright.runtime.torch_ops import tensor_type
from shardwright.runtime.trees import Key, KeyPath, Leaf, format_path, lookup, map_leaves

__all__ = ["Batch", "OutputShape", "TracedStep", "fake_batch", "run_once"]


@dataclass(frozen=True)
class Batch:
    """The example inputs, on fake tensors."""

    arguments: tuple[tuple[object, ...], dict[str, object]]
    """What forward is called with, a `Leaf` for every tensor."""
    tensors: tuple[torch.Tensor, ...]
    """By number of the leaf."""
    paths: tuple[KeyPath, ...]
    names: tuple[str, ...]
    """Value names."""
    constants: Mapping[str, object]

    def call_arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of forward with these tensors."""
        args, kwargs = self.arguments
        return tuple(_filled(item, tensors) for item in args), {k: _filled(v, tensors) for k, v in kwargs.items()}


def _filled(tree: object, tensors: tuple[torch.Tensor, ...]) -> object:
    return map_leaves(tree, lambda _, leaf: tensors[leaf.number] if isinstance(leaf, Leaf) else leaf)


def fake_batch(
    signature: inspect.Signature, bound: Mapping[str, object], taken: Collection[str], mode: FakeTensorMode
) -> Batch:
    """Inputs with names that are not `taken`."""
    tensors: list[torch.Tensor] = []
    paths: list[KeyPath] = []
    constants: dict[str, object] = {}

    def take(path: KeyPath, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            constants[format_path(path)] = leaf
            return leaf
        tensors.append(fake_tensor(leaf, mode))
        paths.append(path)
        return Leaf(len(tensors) - 1)

    template = {name: map_leaves(value, take, (Key("item", name),)) for name, value in bound.items()}
    names: list[str] = []
    for path in paths:
        name = re.sub(r"[^\w.]", "_", format_path(path).removeprefix("."))
        while name in taken or name in names:
            name += ":input"
        names.append(name)
    return Batch(call_arguments(signature, template), tuple(tensors), tuple(paths), tuple(names), constants)


@dataclass(frozen=True)
class OutputShape:
    """What forward returns, and which of it is the loss."""

    template: object
    """The output with a `Leaf` for every tensor."""
    paths: tuple[KeyPath, ...]
    """Of every tensor, by number of the leaf."""
    loss: KeyPath | None
    """None where `loss_fn` makes it."""

    @property
    def others(self) -> tuple[KeyPath, ...]:
        """Of all tensors but the loss."""
        return tuple(path for path in self.paths if path != self.loss)


def run_once(
    module: nn.Module, batch: Batch, mode: FakeTensorMode, loss: str | None, loss_fn: LossFunction | None
) -> OutputShape:
    """Run forward and the loss on fake tensors. Raises CaptureError."""
    args, kwargs = batch.call_arguments(batch.tensors)
    try:
        with mode, torch.enable_grad():
            output = module(*args, **kwargs)
            made = None if loss_fn is None else call_loss(loss_fn, output, args, kwargs)
    except Exception as error:
        raise blame(error, module) from None
    path = choose_loss(output, loss, place_of_forward(module)) if loss_fn is None else None
    _check_loss(made if path is None else lookup(output, path))
    paths: list[KeyPath] = []

    def take(path: KeyPath, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            paths.append(path)
            return Leaf(len(paths) - 1)
        if leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf
        raise CaptureError(
            f"expected tensors, numbers and text among the outputs, found {type(leaf).__name__} at "
            f"{format_path(path) or 'the top'}. Return it another way, or turn it off (use_cache=False)"
        )

    return OutputShape(map_leaves(output, take), tuple(paths), path)


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.is_floating_point():
        found = tensor_type(loss) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"expected loss_fn to return a scalar, found {found}. Reduce it with .mean() or .sum()")
    if not loss.requires_grad:
        raise CaptureError(
            "expected a loss that depends on a trainable parameter, found one that does not. "
            "Check requires_grad of the parameters, and .detach() or no_grad in forward"
        )


class TracedStep(nn.Module):
    """Flat so that tracing sees tensors only. Every output is cloned: no two outputs, and no output and input, are
    then views of one storage, which AOTAutograd would handle outside the graph. Capture takes the clones away."""

    def __init__(self, module: nn.Module, batch: Batch, shape: OutputShape, loss_fn: LossFunction | None) -> None:
        super().__init__()
        setattr(self, ROOT, module)
        self.batch = batch
        self.loss_path = shape.loss
        self.other_paths = shape.others
        self.loss_fn = loss_fn

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.batch.call_arguments(tensors)
        output = getattr(self, ROOT)(*args, **kwargs)
        if self.loss_fn is not None:
            loss = call_loss(self.loss_fn, output, args, kwargs)
        else:
            loss = lookup(output, self.loss_path or ())  # type: ignore[assignment]
        others = [lookup(output, path).detach().clone() for path in self.other_paths]  # type: ignore[attr-defined]
        return (loss.clone(), *others)
