"""An axis of a picture: values to pixels, and ticks at round numbers in a unit that suits the values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["SECONDS", "SIZES", "Axis", "Tick"]

SIZES: Final = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}
SECONDS: Final = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Tick:
    pixel: float
    label: str
    """The number alone; the unit stands at the axis."""


@dataclass(frozen=True)
class Axis:
    """From `low` at pixel `begin` to `high` at pixel `end`; downward or leftward where `end` is the smaller."""

    low: float
    high: float
    begin: float
    end: float
    units: Mapping[str, float]
    """From the largest to the smallest."""

    def pixel(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    @property
    def unit(self) -> str:
        """The largest that the largest value reaches."""
        return next((unit for unit, size in self.units.items() if self.high >= size), list(self.units)[-1])

    def ticks(self, num_wanted: int = 6) -> list[Tick]:
        """About that many, at multiples of 1, 2 or 5 times a power of ten."""
        size = self.units[self.unit]
        step = _round_step((self.high - self.low) / size / num_wanted)
        first, last = math.ceil(self.low / size / step - 1e-9), math.floor(self.high / size / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step)))
        return [Tick(self.pixel(n * step * size), f"{n * step:,.{digits}f}") for n in range(first, last + 1)]


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ...

    >>> _round_step(0.03), _round_step(7.0)
    (0.05, 10.0)
    """
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
