"""The models of `peers.py` and `offload_cost.py`: how each is built, fed, cut into blocks, and made tensor parallel by
hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

__all__ = ["MODELS", "Batch", "PeerModel", "loss_of"]

Batch: TypeAlias = dict[str, Tensor]
"""Keyword arguments of forward; dim 0 is the batch."""


@dataclass(frozen=True)
class PeerModel:
    """One model of the benchmark."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    """A global batch."""
    blocks: str
    """Path of the list of blocks: what `fully_shard` wraps one by one, and what is checkpointed."""
    block_styles: Callable[[], dict[str, ParallelStyle]]
    """Tensor parallel inside a block, by path from the block."""
    outer_styles: Callable[[], dict[str, ParallelStyle]]
    """And outside of blocks, by path from the model."""


def loss_of(output: object) -> Tensor:
    """The loss in what a model returns."""
    found = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(found, Tensor):
        raise TypeError(f"expected a loss, or an output with a loss, found {type(output).__name__}")
    return found


LLAMA_CONFIG: Final = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1376, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=8, use_cache=False,
)  # fmt: skip
LLAMA_TOKENS: Final = (8, 256)


def _llama_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(LLAMA_CONFIG.vocab_size, LLAMA_TOKENS, generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _llama_block() -> dict[str, ParallelStyle]:
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    return _styles(columns, rows)


def _llama_outside() -> dict[str, ParallelStyle]:
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


VIT_CONFIG: Final = ViTConfig(
    hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, image_size=224, patch_size=16,
    num_labels=1000, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
VIT_IMAGES: Final = 8


def _vit_batch(generator: torch.Generator) -> Batch:
    size = VIT_CONFIG.image_size
    return {
        "pixel_values": torch.randn(VIT_IMAGES, 3, size, size, generator=generator),
        "labels": torch.randint(VIT_CONFIG.num_labels, (VIT_IMAGES,), generator=generator),
    }


def _vit_block() -> dict[str, ParallelStyle]:
    return _styles(
        ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1"), ("attention.o_proj", "mlp.fc2")
    )


def _vit_outside() -> dict[str, ParallelStyle]:
    return {"classifier": ColwiseParallel(output_layouts=Replicate())}


def _styles(columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, ParallelStyle]:
    return {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}


class MLP(nn.Module):
    """Blocks of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def _mlp(name: str, width: int, rows: int) -> PeerModel:
    def batch(generator: torch.Generator) -> Batch:
        return {name: torch.randn(rows, width, generator=generator) for name in ("x", "y")}

    return PeerModel(name, lambda: MLP(width), batch, "blocks", lambda: _styles(("0",), ("2",)), dict)


MODELS: Final = {
    model.name: model
    for model in (
        PeerModel(
            "llama", lambda: LlamaForCausalLM(LLAMA_CONFIG), _llama_batch, "model.layers", _llama_block, _llama_outside
        ),
        PeerModel(
            "vit", lambda: ViTForImageClassification(VIT_CONFIG), _vit_batch, "vit.layers", _vit_block, _vit_outside
        ),
        _mlp("wide-mlp", 4096, 8),
        _mlp("square-mlp", 2048, 1024),
    )
}
"""The wide MLP has far more parameters than activations: moving weights or gradients costs more than computing. The
square one computes much for every byte that backward needs: what is moved is little beside it."""
