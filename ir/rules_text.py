"""Rules a user gives the solver, in the language of plans: what must be, what must not be, which axes there may be.

    pin place model.layers.*.mlp.*.weight  R, S(*)
    pin recompute *.act_fn/*
    forbid offload *.self_attn/*
    allow axes dp, tp

In a pinned layout `*` is any placement, `S(*)` and `T(*)` any split of that kind. Globs are checked against a graph's
names by `check_rules`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from shardwright.ir.decisions import Fate
from shardwright.ir.errors import PlanError, TextError
from shardwright.ir.globs import NameIndex, matches
from shardwright.ir.graph import Graph, Phase
from shardwright.ir.names import closest
from shardwright.ir.ops import is_view
from shardwright.ir.placements import Layout, Shard, Strided, parse_placement
from shardwright.ir.plan_lines import Cursor, PlanSource, split_lines
from shardwright.ir.plan_text import PlanNames

__all__ = ["FateRule", "PlacePin", "UserRules", "check_rules", "parse_rules"]

_KEYS: Final = ("pin", "forbid", "allow")
_FATES: Final = {fate.value: fate for fate in Fate}
_ANY_SPLIT: Final = {"S(*)": Shard, "T(*)": Strided}
_COMMA: Final = re.compile(r",\s*(?![^()]*\))")


@dataclass(frozen=True, slots=True)
class PlacePin:
    """The layout of some values, as produced (parameters: at rest)."""

    glob: str
    patterns: tuple[str, ...]
    """One per mesh axis: a placement, `S(*)`, `T(*)` or `*`."""
    line: int
    """In the rules' text, from 1."""

    def __str__(self) -> str:
        return f"`pin place {self.glob}  {', '.join(self.patterns)}`"

    def agrees(self, other: "PlacePin") -> bool:
        """Whether a layout can be as both say."""
        if len(self.patterns) != len(other.patterns):
            return False
        return all(map(_agree, self.patterns, other.patterns))

    def allows(self, layout: Layout) -> bool:
        """Whether a layout is as pinned; one of another number of axes never is."""
        if len(layout) != len(self.patterns):
            return False
        return all(_allows(pattern, placement) for pattern, placement in zip(self.patterns, layout, strict=True))


@dataclass(frozen=True, slots=True)
class FateRule:
    """What must, or must not, become of some saved storages."""

    glob: str
    fate: Fate
    pinned: bool
    """True: this fate and no other; False: any fate but this."""
    line: int

    def __str__(self) -> str:
        return f"`{'pin' if self.pinned else 'forbid'} {self.fate.value} {self.glob}`"


@dataclass(frozen=True, slots=True)
class UserRules:
    """All rules of a text."""

    places: tuple[PlacePin, ...] = ()
    fates: tuple[FateRule, ...] = ()
    axes: tuple[str, ...] | None = None
    """The mesh axes there may be; None: any."""
    path: str = "<rules>"
    """Of the file, for messages."""

    def at(self, rule: PlacePin | FateRule) -> str:
        """The rule as it is written, and where."""
        return f"{rule} at {self.path}:{rule.line}"

    def allows_layout(self, name: str, layout: Layout) -> bool:
        return all(pin.allows(layout) for pin in self.places if matches(pin.glob, name))

    def allows_fate(self, name: str, fate: Fate) -> bool:
        return all((rule.fate is fate) == rule.pinned for rule in self.fates if matches(rule.glob, name))


def parse_rules(text: str, path: str = "<rules>") -> UserRules:
    """The rules that `text` states. `path` is for messages. Raises TextError."""
    source = PlanSource(text, path)
    lines = split_lines(source)
    for key, cursors in lines.items():
        if key not in _KEYS:
            column = cursors[0].text.index(key) + 1
            message = f"expected a rule, {', '.join(_KEYS)}, found {key!r}{closest(key, _KEYS)}"
            raise source.error(cursors[0].line, column, message)
    places: list[PlacePin] = []
    fates: list[FateRule] = []
    for key in ("pin", "forbid"):
        for cursor in lines.get(key, []):
            rule = _rule(cursor, pinned=key == "pin")
            if isinstance(rule, PlacePin):
                places.append(rule)
            else:
                fates.append(rule)
    allowed = lines.get("allow", [])
    if len(allowed) > 1:
        raise source.error(allowed[1].line, 1, f"expected one 'allow' line, found another on line {allowed[0].line}")
    return UserRules(tuple(places), tuple(fates), _axes(allowed[0]) if allowed else None, path)


def check_rules(rules: UserRules, graph: Graph) -> None:
    """Raises PlanError for a rule about no name of the graph, or none that has a fate, and for rules against each
    other."""
    names = PlanNames(graph)
    pins: dict[str, list[PlacePin]] = {}
    for place in rules.places:
        for name in _matching(rules, place, names.values):
            _require_agreement(rules, name, place, pins.setdefault(name, []))
    for rule in rules.fates:
        if not names.storages.matching(rule.glob):
            _refuse_without_fate(rules, rule, names, graph)
        for name in _matching(rules, rule, names.storages, names.values):
            _require_a_fate(rules, name, rule)


def _require_agreement(rules: UserRules, name: str, pin: PlacePin, earlier: list[PlacePin]) -> None:
    for other in earlier:
        if not pin.agrees(other):
            raise PlanError(
                f"expected one layout for {name!r}, found {rules.at(other)} against {rules.at(pin)}; take one out"
            )
    earlier.append(pin)


def _require_a_fate(rules: UserRules, name: str, rule: FateRule) -> None:
    if any(rules.allows_fate(name, fate) for fate in Fate):
        return
    others = [rules.at(other) for other in rules.fates if other != rule and matches(other.glob, name)]
    raise PlanError(
        f"expected rules that leave a fate for {name!r}, found {rules.at(rule)} against {', '.join(others)};"
        " take one out"
    )


def _refuse_without_fate(rules: UserRules, rule: FateRule, names: PlanNames, graph: Graph) -> None:
    """Where the names are there, but nothing that keep, recompute and offload are about."""
    found = names.values.matching(rule.glob)
    if not found:
        return
    what, advice = _instead(found[0], graph)
    raise PlanError(f"expected the name of a storage that forward makes, found {what} for {rules.at(rule)}; {advice}")


def _instead(name: str, graph: Graph) -> tuple[str, str]:
    """What the name stands for, and what to write."""
    node = graph.producers.get(name)
    if node is None:
        return f"{name!r}, which forward is given", "rules on fates are about what forward makes: take it out"
    if node.phase is not Phase.FORWARD:
        return f"{name!r}, which backward makes", "rules on fates are about what forward makes: take it out"
    root = name
    while (made := graph.producers.get(root)) is not None and is_view(made.op):
        root = made.operands[0]
    if root in graph.producers:
        return f"{name!r}, a view of {root!r}", f"write {root} instead"
    return f"{name!r}, a view of {root!r}, which forward is given", "take the rule out"


def _matching(rules: UserRules, rule: PlacePin | FateRule, *indices: NameIndex) -> tuple[str, ...]:
    """Of the first index; the last has the names that may be meant."""
    found = indices[0].matching(rule.glob)
    if not found:
        near = closest(rule.glob, indices[-1].positions)
        raise PlanError(f"expected rules about names of the graph, found {rules.at(rule)}, which matches none{near}")
    return found


def _agree(one: str, other: str) -> bool:
    """Whether a placement can be as both patterns say."""
    if one == other or "*" in (one, other):
        return True
    return not _ANY_SPLIT.keys().isdisjoint((one, other)) and one[:2] == other[:2]


def _allows(pattern: str, placement: object) -> bool:
    if pattern in _ANY_SPLIT:
        return isinstance(placement, _ANY_SPLIT[pattern])
    return pattern == "*" or pattern == str(placement)


def _rule(cursor: Cursor, pinned: bool) -> PlacePin | FateRule:
    word = cursor.next()
    kinds = ("place", *_FATES) if pinned else tuple(_FATES)
    if word.text not in kinds:
        cursor.fail(word, f"one of {', '.join(kinds)}")
    name = cursor.next_name()
    if name.kind != "word":
        cursor.fail(name, "a name or glob")
    try:
        matches(name.text, "")
    except TextError as error:
        raise cursor.source.error(cursor.line, name.column, str(error)) from None
    if word.text == "place":
        return PlacePin(name.text, tuple(_patterns(cursor)), cursor.line)
    cursor.expect_end()
    return FateRule(name.text, _FATES[word.text], pinned, cursor.line)


def _patterns(cursor: Cursor) -> Iterator[str]:
    text, column = cursor.rest()
    for part in _COMMA.split(text):
        pattern = part.strip()
        if pattern == "*" or pattern in _ANY_SPLIT:
            yield pattern
            continue
        try:
            yield str(parse_placement(pattern))
        except TextError as error:
            raise cursor.source.error(cursor.line, column, f"{error}, or S(*), T(*) or * for any") from None


def _axes(cursor: Cursor) -> tuple[str, ...]:
    cursor.expect("axes")
    axes = [cursor.expect_text("an axis such as dp")]
    while not cursor.at_end:
        cursor.expect(",")
        axes.append(cursor.expect_text("an axis such as dp"))
    return tuple(axes)
