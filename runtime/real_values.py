"""A target with values that tell: what is on `meta` is filled, and constant parameters are varied.

Norm weights start as ones and biases as zeros. A rank that mixes up parts of those would compute the same.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwright.ir import TargetError
from shardwright.runtime.hf import default_dtype
from shardwright.runtime.materialize import is_on_meta
from shardwright.runtime.own_forward import keep_own_forward
from shardwright.runtime.target import Target
from shardwright.runtime.trees import map_leaves

__all__ = ["real_example"]

NOISE = 0.1
"""Standard deviation of what is added to a constant parameter."""


def real_example(target: Target, seed: int) -> tuple[nn.Module, tuple[object, ...], Mapping[str, object]]:
    """Module, args and kwargs on the CPU, the same values for the same seed.

    Batches with values are kept, and so are parameters whose elements differ.
    """
    torch.manual_seed(seed)
    module = target.module
    if is_on_meta(module):
        module = _filled(module)
    keep_own_forward(module)
    largest = _smallest_table(module)
    generator = torch.Generator().manual_seed(seed)
    _vary(module, generator)

    def real(path: object, leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.device.type != "meta":
            return leaf
        if leaf.is_floating_point():
            return torch.randn(leaf.shape, generator=generator).to(leaf.dtype)
        return torch.randint(0, largest, leaf.shape, generator=generator).to(leaf.dtype)

    args = map_leaves(tuple(target.args), real)
    kwargs = map_leaves(dict(target.kwargs), real)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise TypeError("a tree keeps its type")
    return module, args, kwargs


def _filled(module: nn.Module) -> nn.Module:
    """A Hugging Face model is built again from its configuration, since its buffers are computed in `__init__`."""
    config = getattr(module, "config", None)
    build = type(module)
    if config is None:
        raise TargetError(
            f"expected a target with values, found a {build.__name__} on meta; build it on the CPU to verify"
        )
    dtype = next(module.parameters()).dtype
    with default_dtype(dtype):
        return build(config)


@torch.no_grad()
def _vary(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        if (
            parameter.numel() > 1
            and parameter.is_floating_point()
            and bool((parameter == parameter.flatten()[0]).all())
        ):
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=NOISE)


def _smallest_table(module: nn.Module) -> int:
    """Integers below this are legal indices into every embedding."""
    sizes = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)]
    return min(sizes, default=2)
