"""Models to measure memory on: as those of the zoo, large enough that tensors of a few bytes count for nothing.

Ranks import this file by itself: nothing here knows the planner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import transformers
from tests.planner.measured_step import Example
from tests.zoo.small import Perceptron, ResNet

__all__ = ["MODELS", "Model"]

TEXT: Final = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
BATCH, LENGTH = 8, 64


def _text(config: transformers.PretrainedConfig, kind: type) -> Example:
    config.use_cache = False
    tokens = torch.randint(3, 256, (BATCH, LENGTH))
    return kind(config).train(), (), {"input_ids": tokens, "labels": tokens.clone()}


def llama() -> Example:
    config = transformers.LlamaConfig(**TEXT, intermediate_size=128, num_key_value_heads=2)
    return _text(config, transformers.LlamaForCausalLM)


def gemma2() -> Example:
    config = transformers.Gemma2Config(
        **TEXT, intermediate_size=128, num_key_value_heads=2, head_dim=16, sliding_window=16, query_pre_attn_scalar=16
    )
    return _text(config, transformers.Gemma2ForCausalLM)


def gpt_neox() -> Example:
    config = transformers.GPTNeoXConfig(**TEXT, intermediate_size=128, attention_dropout=0.0, hidden_dropout=0.0)
    return _text(config, transformers.GPTNeoXForCausalLM)


def mixtral() -> Example:
    config = transformers.MixtralConfig(
        **{**TEXT, "num_hidden_layers": 2}, intermediate_size=128, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    config.output_router_logits = True
    return _text(config, transformers.MixtralForCausalLM)


def bert() -> Example:
    config = transformers.BertConfig(
        **TEXT, intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    return _text(config, transformers.BertForMaskedLM)


def t5() -> Example:
    config = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _text(config, transformers.T5ForConditionalGeneration)


def vit() -> Example:
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=8,
    )  # fmt: skip
    images = torch.randn(BATCH, 3, config.image_size, config.image_size)
    model = transformers.ViTForImageClassification(config).train()
    return model, (), {"pixel_values": images, "labels": torch.arange(BATCH) % 8}


def resnet() -> Example:
    return ResNet(8, 16), (torch.randn(BATCH, 3, 32, 32), torch.arange(BATCH)), {}


def perceptron() -> Example:
    return Perceptron(64, 128, 4), (torch.randn(512, 64), torch.randn(512, 64)), {}


MODELS: Final[dict[str, Callable[[], Example]]] = {
    model.__name__: model for model in (llama, bert, vit, t5, mixtral, gpt_neox, gemma2, resnet, perceptron)
}


@dataclass(frozen=True)
class Model:
    """Called, it builds the model of that name: the same weights and batch every time."""

    name: str

    def __call__(self) -> Example:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return MODELS[self.name]()
