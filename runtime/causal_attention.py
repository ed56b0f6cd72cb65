"""Hugging Face decoders called without a mask: plain causal grouped attention instead of an explicit mask.

While traced, transformers builds a [B, 1, S, S] mask to tell packed sequences apart, a `where` per layer, and repeats
the key and value heads; run eagerly it does none of that. A plan for the traced form would describe a model that
nobody trains. So the copy that is captured gets an attention implementation of our own, by transformers' public
extension points. In the fake run before tracing, its mask function sees how each mask is made up and records where the
mask says nothing but "causal" (or nothing at all); while tracing, it answers None there, and the attention kernel is
told by its flag, as in an eager run. Everywhere else (padding, packed positions handed in, a window shorter than the
sequence, blocks) the explicit mask stays. A test compares loss and gradients of both ways.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Final, TypeAlias

import torch
from torch import nn

from shardwright.runtime.hf_copies import hf_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["recorded_masks"]

RECORDING: Final = "shardwright_recording"
"""Our attention implementation in transformers' tables, for the run before tracing."""
RECORDED: Final = "shardwright_recorded"
"""The same while tracing."""
_ANSWERS: Final = "shardwright_masks"
"""Attribute of a copied configuration: question to whether None says the same as the mask."""

MaskFunction: TypeAlias = Callable[..., torch.Tensor]
Question: TypeAlias = tuple[object, ...]

_OWN_WAYS: Final = re.compile(r"_attn_implementation\s*(==|!=|in|not in)[^\n]*sdpa|allow_is_causal_skip")
"""Model code that treats torch's attention by name, or forbids leaving the mask out: left as it is."""


@contextmanager
def recorded_masks(module: nn.Module, positions_given: bool) -> Iterator[None]:
    """Inside, a run of a copied module records its masks; afterwards the module answers as recorded."""
    models = _models(module)
    if models:
        _register()
    for model in models.values():
        setattr(model.config, _ANSWERS, {"positions given": positions_given})
        model.set_attn_implementation(RECORDING)
    yield
    for model in models.values():
        model.set_attn_implementation(RECORDED)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    for name, mask in ((RECORDING, _recording_mask), (RECORDED, _recorded_mask)):
        AttentionInterface.register(name, sdpa_attention_forward)
        AttentionMaskInterface.register(name, mask)


def _models(module: nn.Module) -> "dict[str, PreTrainedModel]":
    """Hugging Face models inside, by path, if all of them may be rewritten; a nested one shares its root's fate."""
    found = hf_models(module)
    return found if all(map(_may_rewrite, found.values())) else {}


def _may_rewrite(model: "PreTrainedModel") -> bool:
    """Read off the code of all its classes, the user's own subclasses too."""
    from transformers import PreTrainedModel

    if model.config._attn_implementation != "sdpa":
        return False
    classes = takewhile(lambda cls: cls is not PreTrainedModel, type(model).__mro__)
    codes = [_source_of(name) for name in dict.fromkeys(cls.__module__ for cls in classes)]
    if None in codes:
        return False
    code = "\n".join(filter(None, codes))
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" in code and not _OWN_WAYS.search(code)


def _source_of(module: str) -> str | None:
    """None where there is none to read, as for a class typed into an interpreter."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return None


def _recording_mask(**asked: object) -> torch.Tensor | None:
    answers: dict[object, bool] = getattr(asked["config"], _ANSWERS)
    question = _question(asked)
    answers[question] = answers.get(question, True) and _says_nothing(asked, answers["positions given"])
    return _explicit(asked)


def _recorded_mask(**asked: object) -> torch.Tensor | None:
    answers: Mapping[object, bool] = getattr(asked["config"], _ANSWERS)
    return None if answers.get(_question(asked), False) else _explicit(asked)


def _explicit(asked: Mapping[str, object]) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    mask: torch.Tensor | None = sdpa_mask(**asked)
    return mask


def _question(asked: Mapping[str, object]) -> Question:
    """What tells masks of one model apart and is known both in the run and while tracing."""
    sizes = (asked["q_length"], asked["kv_length"], asked.get("local_size"))
    skips = (asked.get("allow_is_causal_skip", True), asked.get("allow_is_bidirectional_skip", False))
    return (*sizes, *skips, asked.get("use_vmap", False), asked.get("attention_mask") is None)


def _says_nothing(asked: Mapping[str, object], positions_given: bool) -> bool:
    """Whether attention without a mask, causal by the kernel's flag where the module is causal, is the same."""
    if asked.get("attention_mask") is not None or asked["q_offset"] != 0 or asked["kv_offset"] != 0:
        return False
    length = asked["kv_length"]
    pattern = _pattern(asked["mask_function"], length if isinstance(length, int) else 0, positions_given)
    if pattern == "causal":
        return asked["q_length"] == length
    return pattern == "all" and asked.get("allow_is_bidirectional_skip") is True


def _pattern(function: object, length: int, positions_given: bool) -> str | None:
    """`causal`, `all` (nothing is masked), or None for anything else."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return "causal"
    if function is masking_utils.bidirectional_mask_function:
        return "all"
    if not inspect.isfunction(function) or function.__module__ != masking_utils.__name__:
        return None
    held = inspect.getclosurevars(function).nonlocals
    match function.__qualname__.partition(".")[0]:
        case "and_masks":
            parts = [_pattern(part, length, positions_given) for part in held["mask_functions"]]
            return None if None in parts else "causal" if "causal" in parts else "all"
        case "sliding_window_overlay":
            return "all" if held["sliding_window"] >= length else None
        case "sliding_window_bidirectional_overlay":
            return "all" if held["sliding_window"] >= length - 1 else None
        case "packed_sequence_mask_function":
            return None if positions_given else "all"
        case "remap_positions_for_packed_sequence":
            plain = not positions_given and _same_in_every_sequence(held["position_ids"])
            return _pattern(held["mask_function"], length, positions_given) if plain else None
    return None


def _same_in_every_sequence(position_ids: torch.Tensor) -> bool:
    """Positions that the model made by counting stand once and are expanded over the batch; those computed from the
    input (by its padding, say) have a row per sequence, and may have gaps."""
    return position_ids.shape[0] > 1 and position_ids.stride(0) == 0
