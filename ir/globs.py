"""Globs over value names: `model.layers.*.mlp.up_proj.weight`, `h.{0..5,7}.attn/out`.

`*` stands for any text, also across dots; braces for one of the numbers in them. `NameIndex` finds what a glob
matches; `fold_names` finds few globs that say which names share a decision.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Final, TypeVar

from shardwright.ir.errors import TextError
from shardwright.ir.names import is_bare, number_parts, quote

__all__ = ["NameIndex", "fold_names", "matches", "write_plan_name"]

_T = TypeVar("_T")
_WILD: Final = re.compile(r"(\*+|\{[^{}]*\})")
_BRACES: Final = re.compile(r"[0-9]{1,9}(?:\.\.[0-9]{1,9})?(?:,[0-9]{1,9}(?:\.\.[0-9]{1,9})?)*")
_MAX_STARS: Final = 8
"""More would make matching slow on purpose."""
_MAX_NUMBERS: Final = 10_000
_LAST: Final = "\U0010ffff"
"""Sorts after every character of a name."""


def write_plan_name(name: str) -> str:
    """A name in a plan line: quoted where it could be read as a glob or a comment."""
    return name if is_bare(name) and not name.startswith("#") else quote(name)


def matches(glob: str, name: str) -> bool:
    """Whether a glob matches a name. Raises TextError for a glob that cannot be read.

    >>> matches("h.*.w", "h.3.w"), matches("h.{0..2,5}.w", "h.3.w")
    (True, False)
    """
    return _pattern(glob).fullmatch(name) is not None


class NameIndex:
    """Names, sorted from both ends, so that a glob looks only at names with its first or last text."""

    def __init__(self, names: Iterable[str]) -> None:
        self.positions: Mapping[str, int] = {name: position for position, name in enumerate(dict.fromkeys(names))}
        """Name to its place in the given order."""
        self._sorted = sorted(self.positions)
        self._reversed = sorted(name[::-1] for name in self.positions)

    def matching(self, glob: str) -> tuple[str, ...]:
        """Names that `glob` matches, in the given order. Raises TextError."""
        parts = _WILD.split(glob)
        if len(parts) == 1:
            return (glob,) if glob in self.positions else ()
        pattern = _pattern(glob)
        starts = _with_prefix(self._sorted, parts[0])
        ends = _with_prefix(self._reversed, parts[-1][::-1])
        near = starts if len(starts) <= len(ends) else [name[::-1] for name in ends]
        found = [name for name in near if pattern.fullmatch(name)]
        return tuple(sorted(found, key=self.positions.__getitem__))

    @cached_property
    def families(self) -> Mapping[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Text around the numbers of a name to the numbers of all names with that text."""
        found: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        for name in self.positions:
            texts, numbers = _family(name)
            found.setdefault(texts, []).append(numbers)
        return {texts: tuple(numbers) for texts, numbers in found.items()}


def fold_names(decided: Mapping[str, _T], index: NameIndex, agrees: Callable[[str, _T], bool]) -> list[tuple[str, _T]]:
    """Lines (name or glob, decision) that together say `decided`. A line may cover more names than that, but
    only such that `agrees(name, decision)`."""
    groups: dict[tuple[tuple[str, ...], _T], None] = {}
    for name in sorted(decided, key=index.positions.__getitem__):
        groups[_family(name)[0], decided[name]] = None
    lines: list[tuple[str, _T]] = []
    for texts, decision in groups:
        if len(texts) == 1:
            lines.append((write_plan_name(texts[0]), decision))
            continue
        family = index.families[texts]
        members = [numbers for numbers in family if agrees(_join(texts, map(str, numbers)), decision)]
        for box in _boxes(members):
            lines.append((_glob(texts, box, family, index, partial(_agrees, agrees, decision)), decision))
    return lines


def _agrees(agrees: Callable[[str, _T], bool], decision: _T, name: str) -> bool:
    return agrees(name, decision)


_Box = tuple[tuple[int, ...], ...]
"""Numbers for every place of a family: all combinations of them."""


def _boxes(members: list[tuple[int, ...]]) -> list[_Box]:
    """Disjoint boxes whose union is `members`: numbers in front that allow the same rest go together."""
    if not members[0]:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in members:
        rests.setdefault(first, []).append(tuple(rest))
    same: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, following in sorted(rests.items()):
        same.setdefault(tuple(sorted(following)), []).append(first)
    return [(tuple(firsts), *box) for following, firsts in same.items() for box in _boxes(list(following))]


def _glob(
    texts: tuple[str, ...],
    box: _Box,
    family: tuple[tuple[int, ...], ...],
    index: NameIndex,
    agrees: Callable[[str], bool],
) -> str:
    exact = [_braces(numbers) for numbers in box]
    everywhere = [tuple(sorted(set(numbers))) for numbers in zip(*family, strict=True)]
    starred = ["*" if len(b) > 1 and b == every else e for b, every, e in zip(box, everywhere, exact, strict=True)]
    glob = _join(texts, starred)
    return glob if starred != exact and all(map(agrees, index.matching(glob))) else _join(texts, exact)


def _braces(numbers: tuple[int, ...]) -> str:
    """`3`, `{0..5}` or `{0..5,7}`."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs) + "}"


def _family(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if name.startswith("#"):
        return (name,), ()
    parts = number_parts(name)
    return parts[0::2], tuple(int(part) for part in parts[1::2])


def _join(texts: tuple[str, ...], numbers: Iterable[str]) -> str:
    parts = [texts[0]]
    for number, text in zip(numbers, texts[1:], strict=True):
        parts += (number, text)
    return "".join(parts)


def _with_prefix(names: list[str], prefix: str) -> list[str]:
    return names[bisect_left(names, prefix) : bisect_left(names, prefix + _LAST)]


def _pattern(glob: str) -> re.Pattern[str]:
    parts = _WILD.split(glob)
    if sum(part.startswith("*") for part in parts[1::2]) > _MAX_STARS:
        raise TextError(f"expected at most {_MAX_STARS} stars in a glob, found {glob!r}")
    pieces = [re.escape(part) if place % 2 == 0 else _wild(part) for place, part in enumerate(parts)]
    return re.compile("".join(pieces), re.DOTALL)


def _wild(part: str) -> str:
    if part.startswith("*"):
        return ".*"
    inside = part[1:-1]
    if not _BRACES.fullmatch(inside):
        raise TextError(f"expected numbers in braces such as {{0..5}} or {{0..5,7}}, found {part!r}")
    numbers: list[str] = []
    for item in inside.split(","):
        first, _, last = item.partition("..")
        span = range(int(first), int(last or first) + 1)
        if not span or len(numbers) + len(span) > _MAX_NUMBERS:
            raise TextError(f"expected rising ranges of at most {_MAX_NUMBERS} numbers, found {part!r}")
        numbers += map(str, span)
    return rf"(?<![0-9])(?:{'|'.join(numbers)})(?![0-9])"
