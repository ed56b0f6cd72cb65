"""`hf:CONFIG.json` targets: a Hugging Face model from its configuration alone, with inputs of the right kind.

The model is built on `meta`, so that no weight takes memory. Which class: what `architectures` names; else a causal
language model of the configuration's `model_type`.
"""

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwright.ir import TargetError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["default_dtype", "hf_target"]


def hf_target(
    path: str, batch: int, seq: int, dtype: torch.dtype | None = None, device: str = "meta"
) -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
    """Module, args and kwargs; `batch` is global. `dtype` None means what the configuration says.

    Raises TargetError.
    """
    config = _config(path)
    kind = _kind(config, path)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    if getattr(config, "use_cache", None):
        config.use_cache = False
    try:
        with torch.device(device), default_dtype(dtype):
            model = kind(config).train()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TargetError(f"expected a configuration that {kind.__name__} accepts, found {path}: {error}") from error
    return model, (), _inputs(model, batch, seq, dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters are made in it, while what a model keeps in float32 on purpose stays so (rotary frequencies)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _config(path: str) -> "PretrainedConfig":
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise TargetError(
            "expected transformers to be installed, found none. Install it with: pip install 'shardwright[hf]'"
        ) from error
    try:
        fields = json.loads(Path(path).read_text())
    except OSError as error:
        raise TargetError(f"expected a readable file after hf:, found {path}: {error.strerror}") from error
    except ValueError as error:
        raise TargetError(f"expected JSON in {path}, found {error}") from error
    model_type = fields.pop("model_type", None) if isinstance(fields, dict) else None
    if model_type is None:
        raise TargetError(f"expected a Hugging Face configuration with a model_type, found none in {path}")
    try:
        return AutoConfig.for_model(model_type, **fields)
    except ValueError as error:
        raise TargetError(f"expected a model_type that transformers knows, found {model_type!r} in {path}") from error


def _kind(config: "PretrainedConfig", path: str) -> "type[PreTrainedModel]":
    import transformers

    for name in getattr(config, "architectures", None) or ():
        named: type[PreTrainedModel] | None = getattr(transformers, name, None)
        if named is not None and _takes_labels(named):
            return named
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in mapping:
        kind: type[PreTrainedModel] = mapping[type(config)]
        return kind
    raise TargetError(
        f"expected an architecture with a loss in {path} ('architectures': ['LlamaForCausalLM']), found "
        f"{config.architectures} of model_type {config.model_type}. Name the class to train, or write a function target"
    )


def _takes_labels(kind: "type[PreTrainedModel]") -> bool:
    return "labels" in inspect.signature(kind.forward).parameters


def _inputs(model: "PreTrainedModel", batch: int, seq: int, dtype: torch.dtype) -> dict[str, object]:
    """Example tensors on `meta`: capture reads shapes and dtypes only."""
    with torch.device("meta"):
        if model.main_input_name == "pixel_values":
            size = getattr(model.config, "image_size", 224)
            sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
            images = torch.empty(batch, getattr(model.config, "num_channels", 3), *sides, dtype=dtype)
            return {"pixel_values": images, "labels": torch.empty(batch, dtype=torch.long)}
        tokens = torch.empty(batch, seq, dtype=torch.long)
        if model.main_input_name == "input_ids":
            per_sequence = "ForSequenceClassification" in type(model).__name__
            labels = torch.empty(batch, dtype=torch.long) if per_sequence else torch.empty_like(tokens)
            return {"input_ids": tokens, "labels": labels}
    raise TargetError(
        f"expected a model of text or images, found {type(model).__name__}, whose input is {model.main_input_name}. "
        "Write a function that returns (module, args, kwargs), and pass it as file.py:function"
    )
