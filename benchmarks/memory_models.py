"""The models that memory is studied on: bfloat16 on the meta device, sizes of real ones, built in seconds."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

__all__ = ["MODELS", "StudyModel"]

Batch: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True)
class StudyModel:
    """One model, and how much of a batch eight GPUs and one take."""

    title: str
    module: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    """Of that many sequences or images."""
    of_eight: int
    """Global batch on eight GPUs."""
    of_one: int
    budgets: tuple[int, ...]
    """Of a rank of eight GPUs, from what all but holds everything to little."""
    micro_batches: int = 1
    """That the batch of eight GPUs is cut into."""

    def build(self, size: int) -> tuple[nn.Module, Batch]:
        """On `meta`, in bfloat16."""
        with torch.device("meta"):
            return self.module().to(torch.bfloat16).train(), _in_bfloat16(self.batch(size))


def _in_bfloat16(batch: Batch) -> Batch:
    return {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in batch.items()}


def _tokens(length: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        tokens = torch.zeros(size, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return batch


def _images(size: int) -> Batch:
    return {"pixel_values": torch.zeros(size, 3, 224, 224), "labels": torch.zeros(size, dtype=torch.long)}


def _llama() -> nn.Module:
    config = LlamaConfig(vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=8,
                         num_attention_heads=16, num_key_value_heads=8, use_cache=False)  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


LLAMA_8B: Final = Path(__file__).parents[1] / "examples" / "configs" / "llama-8b.json"


def _llama_8b() -> nn.Module:
    model: nn.Module = LlamaForCausalLM(LlamaConfig.from_json_file(str(LLAMA_8B)))
    return model


def _mixture() -> nn.Module:
    config = MixtralConfig(vocab_size=32000, hidden_size=2048, intermediate_size=7168, num_hidden_layers=8,
                           num_attention_heads=16, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2,
                           use_cache=False, output_router_logits=True)  # fmt: skip
    model: nn.Module = MixtralForCausalLM(config)
    return model


def _vit() -> nn.Module:
    config = ViTConfig(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16,
                       image_size=224, patch_size=14, num_labels=1000, hidden_dropout_prob=0.0,
                       attention_probs_dropout_prob=0.0)  # fmt: skip
    model: nn.Module = ViTForImageClassification(config)
    return model


def _t5() -> nn.Module:
    config = T5Config(vocab_size=32128, d_model=1024, d_kv=64, d_ff=4096, num_layers=12, num_decoder_layers=12,
                      num_heads=16, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)  # fmt: skip
    model: nn.Module = T5ForConditionalGeneration(config)
    return model


GIB: Final = 2**30


def _gib(*sizes: float) -> tuple[int, ...]:
    return tuple(round(size * GIB) for size in sizes)


MODELS: Final = {
    "llama-8": StudyModel(
        "Llama-like, 8 layers of width 2048, sequences of 4096", _llama, _tokens(4096), 128, 8, _gib(50, 40, 35, 30, 25)
    ),
    "llama-8b": StudyModel(
        "Llama of 8 billion parameters, 32 layers, sequences of 8192", _llama_8b, _tokens(8192), 64, 1,
        _gib(70, 60, 50, 40, 30), micro_batches=8,
    ),
    "mixture": StudyModel(
        "Mixture of 8 experts, 2 a token, 8 layers of width 2048, sequences of 4096", _mixture, _tokens(4096), 64, 4,
        _gib(70, 55, 40, 30, 20),
    ),
    "vit": StudyModel("ViT-H/14, 32 layers, images of 224 x 224", _vit, _images, 1024, 128, _gib(40, 30, 20, 12, 8)),
    "t5": StudyModel(
        "T5-like, 12 + 12 layers of width 1024, sequences of 512", _t5, _tokens(512), 512, 32, _gib(60, 45, 30, 20, 12)
    ),
}  # fmt: skip
