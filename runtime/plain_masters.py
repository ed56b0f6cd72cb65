"""Mixed precision as anyone writes it: float32 masters of a plain model, stepped by torch and cast back; to compare."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shardwright.runtime.one_step import Kind

__all__ = ["PlainMasters"]


class PlainMasters:
    """Steps parameters by float32 copies of them; those of more by copies of their own dtype."""

    def __init__(self, parameters: Iterable[Tensor], kind: Kind, options: Mapping[str, object]) -> None:
        self._parameters = list(parameters)
        self._masters = [nn.Parameter(_widened(parameter.detach()).clone()) for parameter in self._parameters]
        self._inner = kind(self._masters, **options)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            master.grad = None if parameter.grad is None else _widened(parameter.grad)
        self._inner.step()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
