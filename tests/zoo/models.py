"""Real architectures, tiny and without dropout: each entry builds (module, args, kwargs), the same on every call."""

from collections.abc import Callable
from typing import TypeAlias

import torch
import transformers
from tests.zoo.small import Perceptron, ResNet
from tests.zoo.transformer import Decoder
from torch import Tensor, nn

__all__ = ["MORE", "ZOO", "Example"]

Example: TypeAlias = tuple[nn.Module, tuple[object, ...], dict[str, object]]

BATCH, LENGTH, VOCABULARY = 4, 16, 64
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokens(vocabulary: int = VOCABULARY, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def labels(vocabulary: int = VOCABULARY) -> Tensor:
    """With ignored labels, unevenly over the batch."""
    result = tokens(vocabulary)
    result[0, : LENGTH // 2] = -100
    result[3, -2:] = -100
    return result


def _text(config: transformers.PretrainedConfig, kind: type) -> Example:
    config.use_cache = False
    return kind(config).train(), (), {"input_ids": tokens(), "labels": labels()}


def _images(config: transformers.PretrainedConfig, kind: type) -> Example:
    images = torch.randn(BATCH, 3, config.image_size, config.image_size)
    return kind(config).train(), (), {"pixel_values": images, "labels": torch.arange(BATCH) % config.num_labels}


def llama() -> Example:
    config = transformers.LlamaConfig(**TEXT, intermediate_size=64, num_key_value_heads=2)
    return _text(config, transformers.LlamaForCausalLM)


def qwen3() -> Example:
    config = transformers.Qwen3Config(
        **TEXT, intermediate_size=64, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True
    )
    return _text(config, transformers.Qwen3ForCausalLM)


def gemma2() -> Example:
    config = transformers.Gemma2Config(
        **TEXT, intermediate_size=64, num_key_value_heads=2, head_dim=8, sliding_window=8, query_pre_attn_scalar=8
    )
    return _text(config, transformers.Gemma2ForCausalLM)


def gpt_neox() -> Example:
    config = transformers.GPTNeoXConfig(**TEXT, intermediate_size=64, attention_dropout=0.0, hidden_dropout=0.0)
    return _text(config, transformers.GPTNeoXForCausalLM)


def opt() -> Example:
    config = transformers.OPTConfig(
        **TEXT, ffn_dim=64, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0, word_embed_proj_dim=32
    )
    return _text(config, transformers.OPTForCausalLM)


def mixtral() -> Example:
    config = transformers.MixtralConfig(
        **TEXT, intermediate_size=64, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    config.output_router_logits = True
    return _text(config, transformers.MixtralForCausalLM)


def bert() -> Example:
    config = transformers.BertConfig(
        **TEXT, intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=32,
    )  # fmt: skip
    return _text(config, transformers.BertForMaskedLM)


def t5() -> Example:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _text(config, transformers.T5ForConditionalGeneration)


def vit() -> Example:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=8,
    )  # fmt: skip
    return _images(config, transformers.ViTForImageClassification)


def perceptron() -> Example:
    return Perceptron(16, 32, 2), (torch.randn(8, 16), torch.randn(8, 16)), {}


def resnet() -> Example:
    return ResNet(8, 8), (torch.randn(8, 3, 16, 16), torch.arange(8)), {}


def decoder() -> Example:
    return Decoder(VOCABULARY, 32, 4, 64, 2, LENGTH), (tokens(), labels()), {}


def indivisible() -> Example:
    """Six heads of five, hidden 30, vocabulary 99: no usual mesh divides anything but the batch."""
    return Decoder(99, 30, 6, 45, 2, LENGTH), (tokens(99), labels(99)), {}


def gpt2() -> Example:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    return _text(config, transformers.GPT2LMHeadModel)


def falcon() -> Example:
    config = transformers.FalconConfig(**TEXT, attention_dropout=0.0, hidden_dropout=0.0)
    return _text(config, transformers.FalconForCausalLM)


def phi() -> Example:
    config = transformers.PhiConfig(
        **TEXT, intermediate_size=64, resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0
    )
    return _text(config, transformers.PhiForCausalLM)


def roberta() -> Example:
    config = transformers.RobertaConfig(
        **TEXT, intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=32,
    )  # fmt: skip
    return _text(config, transformers.RobertaForMaskedLM)


def distilbert() -> Example:
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0,
    )  # fmt: skip
    return _text(config, transformers.DistilBertForMaskedLM)


def bart() -> Example:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return _text(config, transformers.BartForConditionalGeneration)


def convnext() -> Example:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=16, patch_size=2, num_labels=8
    )
    return _images(config, transformers.ConvNextForImageClassification)


def swin() -> Example:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return _images(config, transformers.SwinForImageClassification)


def whisper() -> Example:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    config.use_cache = False
    model = transformers.WhisperForConditionalGeneration(config).train()
    return model, (), {"input_features": torch.randn(BATCH, 8, 32), "labels": labels()}


def _seeded(build: Callable[[], Example]) -> Callable[[], Example]:
    def example() -> Example:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return example


ZOO: dict[str, Callable[[], Example]] = {
    build.__name__: _seeded(build)
    for build in (
        llama, qwen3, gemma2, gpt_neox, opt, mixtral, bert, t5, vit, perceptron, resnet, decoder, indivisible,
    )
}  # fmt: skip
"""What every part is tested with."""

MORE: dict[str, Callable[[], Example]] = {
    build.__name__: _seeded(build) for build in (gpt2, falcon, phi, roberta, distilbert, bart, convnext, swin, whisper)
}
"""Of the same kinds: captured, and compared with plain PyTorch."""
