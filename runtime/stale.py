"""A parameter that planning has replaced: it holds no memory, answers as its successor does, and refuses to compute.

Optimizers and lists made before planning hold such parameters. Reading or setting `.grad`, and asking for shape, dtype
or device, goes to the successor, so `zero_grad()` and `clip_grad_norm_` do what they say; everything else would be
silently wrong and is an error.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor, nn

from shardwright.ir import ShardwrightError

__all__ = ["StaleParameter", "make_stale"]


def _accessors(name: str, *kinds: str) -> list[object]:
    return [getattr(getattr(Tensor, name), f"__{kind}__") for kind in kinds]


_READ: Final = ("shape", "dtype", "device", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda", "is_cpu")
_FORWARDED: Final = frozenset([
    *_accessors("grad", "get", "set", "delete"),
    *(accessor for name in _READ for accessor in _accessors(name, "get")),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_,
])  # fmt: skip


class StaleParameter(nn.Parameter):
    """Made by `make_stale` only."""

    _successor: Callable[[], nn.Parameter]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func in _FORWARDED:
            return func(args[0]._successor(), *args[1:], **(kwargs or {}))
        raise ShardwrightError(
            f"expected a parameter of the planned model, found one from before planning in "
            f"{getattr(func, '__name__', func)}; take it from model.parameters() again"
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return "<a parameter from before planning>"

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: object) -> nn.Parameter:
        raise ShardwrightError("expected a parameter of the planned model, found one from before planning in deepcopy")


def make_stale(parameter: nn.Parameter, module: nn.Module, name: str) -> None:
    """Turn a replaced parameter into one that knows its successor: the module's parameter of that name."""
    owner = weakref.ref(module)

    def successor() -> nn.Parameter:
        found = owner()
        if found is None:
            raise ShardwrightError(f"expected the planned model of {name} to be alive, found that it is gone")
        return found.get_parameter(name)

    parameter._successor = successor  # type: ignore[attr-defined]
    parameter.__class__ = StaleParameter
