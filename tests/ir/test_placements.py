"""Placements and layouts print as DTensor prints them and parse back; local shapes follow even splits."""

import pytest

from shardwright.ir import Mesh, Shard, Strided, TextError, divides, format_layout, local_shape, parse_layout

MESH = Mesh(("dp", "tp"), (2, 3))


@pytest.mark.parametrize("text", ["R", "S(0), R", "T(0, 8), S(1)", "P(sum), P(avg)", "P(max), S(3)"])
def test_a_layout_parses_back_to_its_text(text: str) -> None:
    assert format_layout(parse_layout(text)) == text


def test_a_wrong_placement_is_named() -> None:
    with pytest.raises(TextError, match=r"found 'Q\(1\)'"):
        parse_layout("S(0), Q(1)")


def test_two_axes_on_one_dim_multiply() -> None:
    assert local_shape((12, 5), (Shard(0), Shard(0)), MESH) == (2, 5)
    assert divides((12, 5), (Shard(0), Shard(0)), MESH)
    assert not divides((8, 5), (Shard(0), Shard(0)), MESH)


def test_a_strided_split_needs_its_inner_part_to_divide() -> None:
    assert divides((24,), (Shard(0), Strided(0, 8)), MESH)
    assert not divides((32,), (Shard(0), Strided(0, 8)), MESH)
    assert not divides((9,), (Shard(0), Strided(0, 3)), MESH)
