"""What stands in `.grad` of a parameter that backward has stepped already: it has no memory and refuses to be read.

A gradient that is gone must not be clipped, scaled or summed in silence. Asking for shape, dtype or device is answered;
setting it to zero, as `zero_grad(set_to_none=False)` does, is remembered.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.ir import ShardwrightError
from shardwright.runtime.compat import foreach_zero_

__all__ = ["SteppedGradient"]


class SteppedGradient(Tensor):
    """In place of the gradient of the parameter `name`."""

    parameter_name: str
    is_zeroed: bool
    """Whether the script has set it to zero: it counts as none."""

    @staticmethod
    def of(parameter: Tensor, name: str) -> "SteppedGradient":
        made: SteppedGradient = Tensor._make_wrapper_subclass(
            SteppedGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.parameter_name, made.is_zeroed = name, False
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func in (Tensor.zero_, foreach_zero_):
            return _zero(args[0])
        if getattr(func, "__name__", "") == "__get__" or func in (Tensor.requires_grad_, Tensor.size, Tensor.dim):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise _gone(args, getattr(func, "__name__", str(func)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own subclasses have this signature
        cls, func: object, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        raise _gone(args, str(func))

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"<the gradient of {self.parameter_name}, stepped in backward>"


def _zero(tensors: Tensor | Iterable[Tensor]) -> Tensor | None:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for tensor in found:
        if isinstance(tensor, SteppedGradient):
            tensor.is_zeroed = True
    others = [tensor for tensor in found if not isinstance(tensor, SteppedGradient)]
    for tensor in others:
        tensor.zero_()
    return tensors if isinstance(tensors, Tensor) else None


def _gone(args: tuple[Any, ...], what: str) -> ShardwrightError:
    flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else [arg])]
    name = next((item.parameter_name for item in flat if isinstance(item, SteppedGradient)), "a parameter")
    return ShardwrightError(
        f"expected nobody but the optimizer to use gradients, as the plan declares (clip none), found {what} on that "
        f"of {name}, which backward has used and freed; to clip, scale or read gradients plan without --clip none"
    )


def require_no_gradient(parameter: Tensor, name: str, has_begun: bool) -> None:
    """Before backward steps it: raises ShardwrightError where a gradient is there that would have to be added."""
    found = parameter.grad
    is_fresh = found is None or isinstance(found, SteppedGradient) and found.is_zeroed
    if is_fresh and not has_begun:
        return
    raise ShardwrightError(
        "expected one backward between zero_grad() and step(), since backward steps parameters, as the plan declares "
        f"(clip none), found a gradient of {name} that is there already; to accumulate plan without --clip none"
    )


def require_as_begun(
    parameter: Tensor, name: str, used: Mapping[str, object] | None, now: Mapping[str, object]
) -> None:
    """At `optimizer.step()`: raises ShardwrightError where that would not be what backward did, with options `used`."""
    if used is None:
        raise ShardwrightError(
            f"expected one step() for each backward, found a second one: backward has stepped {name} once, as the plan "
            "declares (clip none), and its gradient is gone; call backward again, or plan without --clip none"
        )
    if not isinstance(parameter.grad, SteppedGradient) or parameter.grad.is_zeroed:
        raise ShardwrightError(
            f"expected gradients left alone between backward and step(), found that of {name} cleared: backward has "
            "stepped it, as the plan declares (clip none); call zero_grad() behind step(), or plan without --clip none"
        )
    changed = [key for key, value in used.items() if not _same(value, now.get(key))]
    if changed:
        raise ShardwrightError(
            f"expected the options that backward stepped {name} with, found {changed[0]} changed from "
            f"{used[changed[0]]} to {now.get(changed[0])}; set it before backward, or plan without --clip none"
        )


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return one == other
