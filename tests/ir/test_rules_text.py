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
    parse_graph,
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "forbid recompute net.layer.0.act/silu",
            "found `forbid recompute net.layer.0.act/silu` at my.rules:1, which matches none"
            " (did you mean 'net.layers.0.act/silu'?)",
        ),
        (
            "\npin offload net.layers.0.up.weigth",
            "my.rules:2, which matches none (did you mean 'net.layers.0.up.weight'?)",
        ),
        (
            "pin offload net.layers.0.up.weight",
            "expected the name of a storage that forward makes, found 'net.layers.0.up.weight', which forward is given",
        ),
        (
            "pin recompute *.0.act/*\nforbid recompute *.act/silu",
            "expected rules that leave a fate for 'net.layers.0.act/silu', found `pin recompute *.0.act/*` at"
            " my.rules:1 against `forbid recompute *.act/silu` at my.rules:2",
        ),
        (
            "pin place *.up.weight R, S(*)\npin place net.layers.0.up.weight R, R",
            "expected one layout for 'net.layers.0.up.weight', found `pin place *.up.weight  R, S(*)` at my.rules:1"
            " against `pin place net.layers.0.up.weight  R, R` at my.rules:2",
        ),
    ],
)
def test_a_rule_that_cannot_hold_is_named_with_its_line(deep: Graph, text: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        check_rules(parse_rules(text, "my.rules"), deep)
    assert message in str(error.value)


def test_pins_that_leave_a_layout_agree(deep: Graph) -> None:
    check_rules(parse_rules("pin place *.up.weight S(*), *\npin place net.layers.0.up.weight S(1), R"), deep)


def test_a_view_has_no_fate_of_its_own() -> None:
    graph = parse_graph("""graph "net" {
  input   %x: f32[4, 4]
  forward {
    %y: f32[4, 4] = aten.relu.default(%x)
    %v: f32[16] = aten.view.default(%y, [16])
  }
}
""")
    with pytest.raises(PlanError, match="found 'v', a view of 'y' for `pin offload v` at my.rules:1; write y instead"):
        check_rules(parse_rules("pin offload v", "my.rules"), graph)
