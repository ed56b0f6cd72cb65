"""Sizes, seconds and rates as people write them: `900MiB`, `80GB`, `20us`, `450GB/s`.

`parse_*` read, `format_*` round for the eye, `exact_*` print so that reading gives the same number back.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Final

from shardwright.ir.errors import TextError
from shardwright.ir.names import closest

__all__ = [
    "exact_percent",
    "exact_seconds",
    "exact_size",
    "format_seconds",
    "format_size",
    "parse_percent",
    "parse_rate",
    "parse_seconds",
    "parse_size",
]

SIZE_UNITS: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BINARY: Final = ("TiB", "GiB", "MiB", "KiB")
_TIME_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_PREFIXES: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}

_QUANTITY: Final = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?|[+-]?inf|nan)?\s*(\S*)\s*")
_MAX_LETTERS: Final = 64
_MAX_BYTES: Final = 2**63


def parse_size(text: str, *, zero: bool = False) -> int:
    """Bytes, rounded down to a whole byte. `zero` admits 0, with a unit or without. Raises TextError.

    >>> parse_size("1.5KiB"), parse_size("80GB")
    (1536, 80000000000)
    """
    number, unit = _split(text)
    examples = "write for instance 900MiB, 2GiB or 80GB"
    if number is None:
        raise TextError(f"expected a size, found {text!r}, which has no number: {examples}")
    if not unit and zero and _fraction(number) == 0:
        return 0
    if not unit:
        raise TextError(f"expected a size with a unit, found {text!r} without one: {examples}")
    if unit not in SIZE_UNITS:
        raise TextError(
            f"expected one of the units {', '.join(SIZE_UNITS)}, found {unit!r} in {text!r}"
            f"{closest(unit, SIZE_UNITS)}: {examples}"
        )
    value = _fraction(number)
    size = -1 if value is None else int(value * SIZE_UNITS[unit])
    if size < 1 and not (zero and value == 0):
        raise TextError(f"expected a size of at least one byte, found {text!r}: {examples}")
    if size >= _MAX_BYTES:
        raise TextError(f"expected a size below 8388608TiB, found {text!r}: {examples}")
    return size


def parse_seconds(text: str) -> float:
    """`20us`, `1.5ms`, `3s` to seconds. Raises TextError."""
    number, unit = _split(text)
    if number is None or unit not in _TIME_DIGITS:
        raise TextError(f"expected a time with one of the units s, ms, us, ns such as 20us, found {text!r}")
    return _scaled(number, -_TIME_DIGITS[unit])


def parse_percent(text: str) -> float:
    """`6%` to 0.06. Raises TextError."""
    number, unit = _split(text)
    if number is None or unit != "%":
        raise TextError(f"expected a percentage such as 6%, found {text!r}")
    return _scaled(number, -2)


def parse_rate(text: str, noun: str) -> float:
    """A rate per second: of bytes (noun `B`, unit as in sizes: `450GB/s`), or of anything else with a decimal prefix
    (noun `FLOP`: `989TFLOP/s`). Raises TextError."""
    units = SIZE_UNITS if noun == "B" else {f"{prefix}{noun}": factor for prefix, factor in _PREFIXES.items()}
    number, unit = _split(text)
    value = None if number is None else _fraction(number)
    if value is None or unit.removesuffix("/s") not in units or not unit.endswith("/s"):
        names = [f"{name}/s" for name in units]
        raise TextError(
            f"expected a rate with one of the units {', '.join(names)}, found {text!r}{closest(unit, names)}"
        )
    try:
        return float(value * units[unit.removesuffix("/s")])
    except OverflowError:
        raise TextError(f"expected a rate that fits a float, found {text!r}") from None


def format_size(num_bytes: int) -> str:
    """Rounded to three digits, for people.

    >>> format_size(913_305_601), format_size(512)
    ('871MiB', '512B')
    """
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit in _BINARY:
        if size >= SIZE_UNITS[unit]:
            return f"{sign}{_three_digits(size / SIZE_UNITS[unit])}{unit}"
    return f"{sign}{size}B"


def format_seconds(seconds: float) -> str:
    """Rounded to three digits, for people.

    >>> format_seconds(0.4123), format_seconds(0.00002), format_seconds(75.2)
    ('412ms', '20us', '75.2s')
    """
    size = abs(seconds)
    for unit, at_least in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= at_least:
            return f"{_three_digits(seconds * 10 ** _TIME_DIGITS[unit])}{unit}"
    return f"{_three_digits(seconds * 1e9)}ns" if seconds else "0s"


def exact_size(num_bytes: int) -> str:
    """The largest unit in which the size is a whole number below 10,000, or bytes.

    >>> exact_size(900 * 2**20), exact_size(913_305_601)
    ('900MiB', '913305601B')
    """
    for unit in _BINARY:
        count, rest = divmod(num_bytes, SIZE_UNITS[unit])
        if num_bytes and not rest and count < 10_000:
            return f"{count}{unit}"
    return f"{num_bytes}B"


def exact_seconds(seconds: float) -> str:
    """All digits, in a unit that suits; `parse_seconds` gives the same float.

    >>> exact_seconds(0.412), exact_seconds(2.5e-05)
    ('412ms', '25us')
    """
    size = abs(seconds)
    unit = "s" if size >= 1 or not seconds else "ms" if size >= 1e-3 else "us"
    return f"{_shifted(seconds, _TIME_DIGITS[unit])}{unit}"


def exact_percent(fraction: float) -> str:
    """All digits; `parse_percent` gives the same float.

    >>> exact_percent(0.06)
    '6%'
    """
    return f"{_shifted(fraction, 2)}%"


def _split(text: str) -> tuple[str | None, str]:
    match = _QUANTITY.fullmatch(text) if len(text) <= _MAX_LETTERS else None
    return (match[1], match[2]) if match else (None, "")


def _fraction(number: str) -> Fraction | None:
    return Fraction(number) if number[-1] not in "fn" else None


def _scaled(number: str, digits: int) -> float:
    """Shifting the decimal point is exact, so that a float's shortest form survives it."""
    return float(Decimal(number).scaleb(digits)) if number[-1] not in "fn" else float(number)


def _shifted(value: float, digits: int) -> str:
    decimal = Decimal(repr(value))
    if not decimal.is_finite():
        return repr(value)
    shifted = decimal.scaleb(digits)
    plain = format(shifted, "f")
    return (plain.rstrip("0").rstrip(".") if "." in plain else plain) if len(plain) <= 24 else str(shifted)


def _three_digits(value: float) -> str:
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text
