"""A mark on modules of decorated classes: their own forward runs, and plans nothing.

Capture and `verify` run a model's own code in train mode; there a decorated class must not start planning itself.
"""

from typing import Final

from torch import nn

__all__ = ["has_own_forward", "keep_own_forward"]

_MARK: Final = "_shardwright_own_forward"


def keep_own_forward(module: nn.Module) -> None:
    """Mark it and all modules inside, for good; copies are marked too."""
    for part in module.modules():
        part.__dict__[_MARK] = True


def has_own_forward(module: nn.Module) -> bool:
    return _MARK in module.__dict__
