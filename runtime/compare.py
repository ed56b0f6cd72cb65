"""When two sets of gradients are equal, up to the order of additions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GradientDifference", "Tolerance", "differing_gradients", "relative", "tolerance"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """By dtype of the parameters."""

    rtol: float
    parameters: float
    """Of parameters after the optimizer: a few roundings of their dtype."""
    against_exact: bool = False
    """Compare with float64, and allow twice the plain model's own error."""


def tolerance(dtype: torch.dtype) -> Tolerance:
    """float64 to 1e-10, float32 to 1e-5; lower precision against float64."""
    if dtype == torch.float64:
        return Tolerance(1e-10, 1e-12)
    if dtype == torch.float32:
        return Tolerance(1e-5, 1e-6)
    return Tolerance(torch.finfo(dtype).eps, torch.finfo(dtype).eps, against_exact=True)


@dataclass(frozen=True, slots=True)
class GradientDifference:
    name: str
    relative: float
    """norm(difference) / norm(expected); infinite where only the expected one is zero."""
    passes_alone: bool
    """By the first term, its own norm."""
    passes: bool


def relative(found: Tensor, expected: Tensor) -> float:
    """norm(found - expected) / norm(expected), in float64; NaN counts as infinite."""
    difference = (found.double() - expected.double()).norm().item()
    scale = expected.double().norm().item()
    if difference == 0.0:
        return 0.0
    ratio = difference / scale if scale else float("inf")
    return ratio if ratio == ratio else float("inf")


def differing_gradients(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float
) -> list[GradientDifference]:
    """norm(difference) <= rtol norm(g) + rtol sqrt(n) rms(all gradients of the model), for each that both have."""
    every = [g.double().flatten() for g in expected.values()]
    rms = torch.cat(every).square().mean().sqrt().item() if every else 0.0
    return list(_differences(found, expected, rtol, rms))


def _differences(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, rms: float
) -> Iterator[GradientDifference]:
    for name, gradient in expected.items():
        if name not in found:
            continue
        difference = (found[name].double() - gradient.double()).norm().item()
        own = rtol * gradient.double().norm().item()
        other = rtol * gradient.numel() ** 0.5 * rms
        # `not >` would let NaN pass.
        yield GradientDifference(name, relative(found[name], gradient), difference <= own, difference <= own + other)
