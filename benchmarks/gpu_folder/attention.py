"""Attention on CUDA for programs that were captured on a CPU: the CPU's operator, by CUDA's fused kernels.

Both give the output and the logarithm of the sum of exponents, from which backward starts. Flash attention takes half
precision without a mask, the memory-efficient kernel the rest; the latter pads its logarithms to multiples of 32.
There is no dropout, so that nothing depends on random state.
"""

import torch
from torch import Tensor

__all__ = ["register"]

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_ATEN = torch.ops.aten
_LIBRARY: list[torch.library.Library] = []
"""Keeps the registration alive."""


def register() -> None:
    """Give the operator of the CPU a CUDA implementation."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(FORWARD, _forward, "CUDA")
    library.impl(f"{FORWARD}_backward", _backward, "CUDA")
    _LIBRARY.append(library)


def _takes_flash(query: Tensor, mask: Tensor | None) -> bool:
    return mask is None and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] % 8 == 0


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(f"expected attention without dropout, found a probability of {dropout_p}")


def _forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    _refuse_dropout(dropout_p)
    if _takes_flash(query, attn_mask):
        found = _ATEN._scaled_dot_product_flash_attention.default(query, key, value, 0.0, is_causal, False, scale=scale)
    else:
        found = _ATEN._scaled_dot_product_efficient_attention.default(
            query, key, value, _bias(query, key, attn_mask), True, 0.0, is_causal, scale=scale
        )
    return found[0], found[1]


def _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    _refuse_dropout(dropout_p)
    if _takes_flash(query, attn_mask):
        # Two words of random state where dropout would need them.
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.zeros((), dtype=torch.uint64, device=query.device)
        longest = query.shape[-2], key.shape[-2]
        found = _ATEN._scaled_dot_product_flash_attention_backward.default(
            grad_out, query, key, value, out, logsumexp, None, None, *longest, 0.0, is_causal, seed, unused, scale=scale
        )
        return tuple(found)
    nothing = torch.zeros((), dtype=torch.int64, device=query.device)
    bias = _bias(query, key, attn_mask)
    wanted = [True, True, True, False]
    found = _ATEN._scaled_dot_product_efficient_attention_backward.default(
        grad_out, query, key, value, bias, out, logsumexp, nothing, nothing, 0.0, wanted, is_causal, scale=scale
    )
    return tuple(found[:3])


def _bias(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask as the kernel wants it: added to the scores, whole, its rows aligned to 16 elements."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    length = key.shape[-2]
    shape = (*query.shape[:-1], length)
    room = query.new_empty(*mask.shape[:-1], -(-length // 16) * 16)
    room[..., :length].copy_(mask)
    return room[..., :length].expand(shape)
