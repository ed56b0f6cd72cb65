"""Globs match what they say, and folding says exactly what was decided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir import TextError
from shardwright.ir.globs import NameIndex, fold_names, matches

NAMES = (
    [f"h.{k}.{w}" for k in range(12) for w in ("q", "k")]
    + [f"h.{k}.e.{e}.w" for k in range(3) for e in range(4)]
    + ["x"]
)


@pytest.mark.parametrize(
    ("glob", "name", "expected"),
    [
        ("h.*.w", "h.3.w", True),
        ("h.*.w", "h.3.mlp.w", True),
        ("*.attn/*", "model.layers.3.attn/mm:2", True),
        ("h.{0..2,5}.w", "h.5.w", True),
        ("h.{0..2,5}.w", "h.3.w", False),
        ("*{3}.w", "h.13.w", False),
        ("h.{1}*", "h.12", False),
        ("h.w", "h.w", True),
        ("h.w", "hxw", False),
    ],
)
def test_a_glob_matches_what_it_says(glob: str, name: str, expected: bool) -> None:
    assert matches(glob, name) is expected
    assert NameIndex([name]).matching(glob) == ((name,) if expected else ())


@pytest.mark.parametrize("glob", ["h.{a}.w", "h.{5..3}.w", "h.{}", "h.{0..999999}", "*a" * 9, "h.{1..2..3}"])
def test_a_glob_that_cannot_be_read_is_refused(glob: str) -> None:
    with pytest.raises(TextError, match="expected"):
        matches(glob, "h.3.w")


def test_matches_come_in_the_order_of_the_graph() -> None:
    assert NameIndex(["b.1", "a.1", "b.0"]).matching("*") == ("b.1", "a.1", "b.0")


def _said(lines: list[tuple[str, str]]) -> dict[str, str]:
    index = NameIndex(NAMES)
    return {name: decision for glob, decision in lines for name in index.matching(glob)}


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from("ab")))
def test_folded_lines_say_what_was_decided_and_nothing_else(decided: dict[str, str]) -> None:
    lines = fold_names(decided, NameIndex(NAMES), lambda name, decision: decided.get(name) == decision)
    assert _said(lines) == decided


def _fold(decided: dict[str, str]) -> list[str]:
    return [line for line, _ in fold_names(decided, NameIndex(NAMES), lambda name, d: decided.get(name) == d)]


def test_all_layers_fold_to_a_star_and_some_to_ranges() -> None:
    assert _fold({f"h.{k}.q": "a" for k in range(12)}) == ["h.*.q"]
    assert _fold({f"h.{k}.q": "a" for k in (0, 1, 2, 7, 9, 10)}) == ["h.{0..2,7,9..10}.q"]
    assert _fold({"h.3.q": "a"}) == ["h.3.q"]
    assert _fold({f"h.{k}.e.{e}.w": "a" for k in (0, 1) for e in range(4)}) == ["h.{0..1}.e.*.w"]


def test_a_star_is_not_used_where_it_would_say_more() -> None:
    """`a.*.w` also matches `a.0.b.w`, which has no decision."""
    names, decided = ["a.0.w", "a.1.w", "a.0.b.w"], {"a.0.w": "x", "a.1.w": "x"}
    assert fold_names(decided, NameIndex(names), lambda name, d: decided.get(name) == d) == [("a.{0..1}.w", "x")]
