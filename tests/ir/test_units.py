"""Sizes, times and rates: read as written, refused with examples, printed exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir import TextError, format_seconds, format_size, parse_seconds, parse_size
from shardwright.ir.units import exact_percent, exact_seconds, exact_size, parse_percent, parse_rate


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("900MiB", 900 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("80GB", 80 * 10**9),
        ("512 B", 512),
        ("0.3GB", 3 * 10**8),
        ("2TiB", 2**41),
    ],
)
def test_a_size_is_read_to_the_byte(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "900", "-3GiB", "0MiB", "3GIB", "nanGiB", "infGB", "0.1B", "1 2MB", "9e99TB", "x" * 99]
)
def test_a_size_that_is_none_is_refused_with_examples(text: str) -> None:
    with pytest.raises(TextError, match=r"expected .* found .*900MiB, 2GiB or 80GB"):
        parse_size(text)


def test_a_wrong_unit_names_the_closest() -> None:
    with pytest.raises(TextError, match="did you mean 'MiB'"):
        parse_size("900Mib")


@given(st.integers(0, 2**62))
def test_an_exact_size_reads_back(size: int) -> None:
    assert parse_size(exact_size(size), zero=True) == size


@given(st.floats(allow_nan=False))
def test_exact_seconds_and_percent_read_back(value: float) -> None:
    assert repr(parse_seconds(exact_seconds(value))) == repr(value)
    assert repr(parse_percent(exact_percent(value))) == repr(value)


def test_rates_have_units() -> None:
    assert parse_rate("450GB/s", "B") == 450e9
    assert parse_rate("989TFLOP/s", "FLOP") == 989e12
    with pytest.raises(TextError, match="did you mean 'TFLOP/s'"):
        parse_rate("989TFLOPs/s", "FLOP")


def test_people_get_three_digits() -> None:
    assert [format_size(n) for n in (0, 512, 1536, 913_305_601, 10**12)] == ["0B", "512B", "1.5KiB", "871MiB", "931GiB"]
    assert [format_seconds(s) for s in (0.0, 2e-8, 2e-5, 0.4123, 1.25, 75.21, 5000.0)] == [
        "0s", "20ns", "20us", "412ms", "1.25s", "75.2s", "5000s",
    ]  # fmt: skip


def test_nothing_needs_no_unit_where_it_may_be() -> None:
    assert parse_size("0", zero=True) == parse_size("0B", zero=True) == 0
    with pytest.raises(TextError, match="without one"):
        parse_size("0")
