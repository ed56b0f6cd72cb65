"""Rules in the language of plans: read, matched, and refused with the place."""

import pytest

from shardwright.ir import (
    Fate,
    Graph,
    Partial,
    PlanError,
    Replicate,
    Shard,
    Strided,
    TextError,
    check_rules,
    parse_rules,
)

TEXT = """\
# what I know about this model
pin place net.layers.*.weight  *, S(*)
pin place x  S(0), R
pin recompute net.layers.{0..1}.act/*
forbid offload *.act/*   # slow host
allow axes dp, tp
"""


def test_a_pinned_layout_allows_what_it_says() -> None:
    rules = parse_rules(TEXT)
    assert rules.allows_layout("net.layers.3.up.weight", (Replicate(), Shard(1)))
    assert rules.allows_layout("net.layers.3.up.weight", (Shard(0), Shard(0)))
    assert not rules.allows_layout("net.layers.3.up.weight", (Shard(0), Replicate()))
    assert not rules.allows_layout("net.layers.3.up.weight", (Shard(0), Strided(0, 2)))
    assert not rules.allows_layout("net.layers.3.up.weight", (Shard(0),))
    assert not rules.allows_layout("x", (Shard(0), Shard(1)))
    assert rules.allows_layout("other", (Partial(), Partial()))


def test_pinned_and_forbidden_fates() -> None:
    rules = parse_rules(TEXT)
    assert [fate for fate in Fate if rules.allows_fate("net.layers.0.act/silu", fate)] == [Fate.RECOMPUTE]
    assert [fate for fate in Fate if rules.allows_fate("net.layers.2.act/silu", fate)] == [Fate.KEEP, Fate.RECOMPUTE]
    assert all(rules.allows_fate("net.layers.2.up/mm", fate) for fate in Fate)


def test_axes_are_any_unless_named() -> None:
    assert parse_rules(TEXT).axes == ("dp", "tp")
    assert parse_rules("").axes is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pan place x R", "found 'pan' (did you mean 'pin'?)"),
        ("pin plaice x R", "expected one of place, keep, recompute, offload, found 'plaice'"),
        ("forbid place x R", "expected one of keep, recompute, offload, found 'place'"),
        ("pin place x Q", "expected a placement"),
        ("pin place x", "expected a placement"),
        ("pin place", "expected a name or glob, found the end of the line"),
        ("forbid recompute h.{x}", "expected numbers in braces"),
        ("forbid recompute x y", "expected the end of the line, found 'y'"),
        ("allow dp", "expected 'axes', found 'dp'"),
        ("allow axes dp tp", "expected ',', found 'tp'"),
    ],
)
def test_a_rule_that_cannot_be_read_is_shown(line: str, message: str) -> None:
    with pytest.raises(TextError) as error:
        parse_rules(f"allow axes dp\n{line}" if "allow" not in line else line, "my.rules")
    assert message in str(error.value)
    assert "at my.rules:" in str(error.value)


def test_rules_fit_the_graph(deep: Graph) -> None:
    check_rules(parse_rules(TEXT), deep)
    with pytest.raises(PlanError, match="found 'net.layer.0.act/silu' on line 1, which matches none .did you mean"):
        check_rules(parse_rules("forbid recompute net.layer.0.act/silu"), deep)
    with pytest.raises(PlanError, match="leave a fate for 'net.layers.0.act/silu', found line 1 against 2"):
        check_rules(parse_rules("pin recompute *.0.act/*\nforbid recompute *.act/silu"), deep)
