"""Hugging Face models as they train: no key-value cache, and experts in a form that runs on fake tensors.

Works on copies; does nothing, and imports nothing, where no Hugging Face model is inside.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["fakeable_experts", "hf_models", "without_cache"]


def hf_models(module: nn.Module) -> "dict[str, PreTrainedModel]":
    """Hugging Face models inside, by path."""
    if "transformers" not in sys.modules:
        return {}
    from transformers import PreTrainedModel

    return {name: part for name, part in module.named_modules() if isinstance(part, PreTrainedModel)}


def without_cache(module: nn.Module) -> None:
    """A training step reads no cache; kept, it would be an output, and grow when a layer is recomputed."""
    for model in hf_models(module).values():
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "use_cache", None):
                config.use_cache = False


@contextmanager
def fakeable_experts(module: nn.Module) -> Iterator[None]:
    """Grouped matrix products refuse fake tensors of other types than bfloat16; batched ones do not, and their shapes
    are the same. Only for the run that looks at shapes."""
    grouped = [
        model
        for model in hf_models(module).values()
        if getattr(model.config, "_experts_implementation", None) == "grouped_mm"
    ]
    for model in grouped:
        model.set_experts_implementation("batched_mm")
    yield
    for model in grouped:
        model.set_experts_implementation("grouped_mm")
