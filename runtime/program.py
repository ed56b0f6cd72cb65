"""The emitted program of one rank: two functions and the names that say what goes in and comes out.

Calls are boxed: the lists handed in are emptied, so that every tensor dies where the rank graph says it does. Whoever
calls must hold no saved tensor besides the list.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor, fx

from shardwright.ir import InputError
from shardwright.runtime import kernels as kernels_module
from shardwright.runtime.copies import Away, Reload
from shardwright.runtime.host_steps import HostSteps

__all__ = ["Program", "Saved"]

KERNELS: Final = kernels_module.__name__

Saved: TypeAlias = Tensor | Away | Reload
"""What forward hands to backward: a tensor, or a copy that is on its way or on another tier."""


@dataclass(frozen=True, eq=False, slots=True)
class Program:
    """Forward and backward of one rank. Tensors are local; gradients are not accumulated here."""

    name: str
    inputs: tuple[str, ...]
    """What `forward` takes, in order: parameters, buffers and the batch."""
    returned: tuple[str, ...]
    """What `forward` gives, in order, without repeats: the loss first, then outputs and new buffers."""
    saved: tuple[str, ...]
    """What goes from forward to backward, in order."""
    tangents: tuple[str, ...]
    """What `backward` takes beside the saved list."""
    parameters: tuple[str, ...]
    """Whose gradients `backward` gives, in order."""
    stepped: frozenset[str]
    """Those that backward steps itself: it gives their local memory, with the new value, in place of a gradient."""
    steps: HostSteps | None
    """Who steps them, and what is stepped on the host after backward."""
    forward_module: fx.GraphModule
    backward_module: fx.GraphModule

    def forward(self, inputs: list[Tensor]) -> tuple[list[Tensor], list[Saved]]:
        """Runs forward; empties `inputs`. Gives the values of `returned`, and those of `saved`."""
        if len(inputs) != len(self.inputs):
            raise InputError(f"expected {len(self.inputs)} inputs for forward of {self.name}, found {len(inputs)}")
        with torch.no_grad():
            found = self.forward_module.forward(inputs)
        return found[: len(self.returned)], found[len(self.returned) :]

    def backward(self, saved: list[Saved], *tangents: Tensor) -> list[Tensor]:
        """Runs backward; empties `saved`. Gives the gradients of `parameters`."""
        if len(saved) != len(self.saved) or len(tangents) != len(self.tangents):
            raise InputError(
                f"expected {len(self.saved)} saved values and {len(self.tangents)} tangents for backward of"
                f" {self.name}, found {len(saved)} and {len(tangents)}; a second backward needs another forward"
            )
        boxed = [*saved, *tangents]
        saved.clear()
        with torch.no_grad():
            return self.backward_module.forward(boxed)  # type: ignore[no-any-return]

    def source(self, kernels: str = KERNELS) -> str:
        """Both functions as Python that runs with torch and `runtime/kernels.py`, imported as `kernels`.

        `self` is only asked for `copies` and `disk`, and only where the plan moves something to host or disk.
        """
        parts = [
            _python(self.forward_module, "forward", kernels),
            _python(self.backward_module, "backward", kernels),
        ]
        imports = dict.fromkeys(line for _, lines in parts for line in lines)
        notes = [
            f'"""{self.name}: one rank\'s program.\n\nLists that are handed in are emptied.\n',
            f"forward takes {_listed(self.inputs)}\nand gives {_listed((*self.returned, *self.saved))}",
            f"backward takes {_listed((*self.saved, *self.tangents))}",
            f"and gives gradients of {_listed(self.parameters)}",
            '"""\n',
        ]
        return "\n".join([*notes, "import torch", *imports, *(text for text, _ in parts)])


def _listed(names: Sequence[str]) -> str:
    return "".join(f"\n    {name}" for name in names) or "nothing"


def _python(module: fx.GraphModule, name: str, kernels: str) -> tuple[str, list[str]]:
    """Text of the function, and the imports it needs beside torch."""
    code = module.graph.python_code("self")
    text = code.src.replace("def forward(", f"def {name}(", 1)
    used = {word: found for word, found in code.globals.items() if re.search(rf"\b{word}\b", text)}
    return f"\n{text.strip()}\n", sorted(
        filter(None, (_import_line(word, found, kernels) for word, found in used.items()))
    )


def _import_line(word: str, found: object, kernels: str) -> str:
    if found is torch:
        return ""
    if isinstance(found, float):
        return f"from math import {word}"
    origin, attribute = getattr(found, "__module__", ""), getattr(found, "__name__", word)
    origin = kernels if origin == KERNELS else origin
    return f"from {origin} import {attribute} as {word}" if origin != "builtins" else ""
