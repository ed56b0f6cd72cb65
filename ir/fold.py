"""Equal layers print once: periodic runs of lines become `repeat i = 1..31 { … }`.

Needs lines whose layer numbers stand between marks (`names.mark_numbers`). A run folds when, from one period to the
next, every number either stays or moves by one step, the same for all. No layer is named here: which
number is the layer's follows from the text alone.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir.names import MARK

__all__ = ["fold_lines"]

_HEADER_LINES = 2
"""What a repeat costs: its first and last line."""


@dataclass(frozen=True, slots=True)
class _Line:
    literal: tuple[str, ...]
    """The text around the numbers; one part more than numbers."""
    numbers: tuple[int, ...]

    def write(self, texts: Sequence[str]) -> str:
        parts = [self.literal[0]]
        for text, literal in zip(texts, self.literal[1:], strict=True):
            parts += (text, literal)
        return "".join(parts)

    @property
    def plain(self) -> str:
        return self.write([str(number) for number in self.numbers])


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    period: int
    step: int
    num_lines: int
    """Lines from `start` that follow the pattern, an incomplete last period included."""

    @property
    def repeats(self) -> int:
        return self.num_lines // self.period

    @property
    def saved_lines(self) -> int:
        return (self.repeats - 1) * self.period - _HEADER_LINES


def fold_lines(lines: Sequence[str]) -> list[str]:
    """The lines without marks, runs folded."""
    parsed = [_parse(line) for line in lines]
    places: dict[tuple[str, ...], list[int]] = {}
    for position, line in enumerate(parsed):
        places.setdefault(line.literal, []).append(position)
    printed: list[str] = []
    position = 0
    while position < len(parsed):
        run = _best_run(parsed, places, position)
        if run is None:
            printed.append(parsed[position].plain)
            position += 1
            continue
        first = run.start + _alignment(parsed, run)
        printed += [line.plain for line in parsed[run.start : first]]
        printed += _repeat(parsed, first, run)
        position = first + run.repeats * run.period
    return printed


def _parse(line: str) -> _Line:
    parts = line.split(MARK)
    return _Line(tuple(parts[0::2]), tuple(int(part) for part in parts[1::2]))


def _best_run(lines: list[_Line], places: dict[tuple[str, ...], list[int]], start: int) -> _Run | None:
    same = places[lines[start].literal]
    best: _Run | None = None
    saved = 0
    for position in same[bisect_right(same, start) :]:
        period = position - start
        if len(lines) - start - period - _HEADER_LINES <= saved or start + 2 * period > len(lines):
            break
        step = _step(lines[start].numbers, lines[position].numbers)
        if not step:
            continue
        run = _Run(start, period, step, _matching_lines(lines, start, period, step))
        if run.saved_lines > saved:
            best, saved = run, run.saved_lines
    return best


def _moves(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([b - a for a, b in zip(before, after, strict=True)])


def _step(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """The one distance that numbers move by; 0 where there is none or several."""
    found = set(_moves(before, after)) - {0}
    return found.pop() if len(found) == 1 else 0


def _matching_lines(lines: list[_Line], start: int, period: int, step: int) -> int:
    seen: list[tuple[int, ...]] = []
    allowed = {0, step}
    for position in range(start + period, len(lines)):
        before, line = lines[position - period], lines[position]
        if before.literal != line.literal:
            return position - start
        moves = _moves(before.numbers, line.numbers)
        index = len(seen) - period
        if not allowed.issuperset(moves) or (index >= 0 and seen[index] != moves):
            return position - start
        seen.append(moves)
    return len(lines) - start


def _owner(lines: list[_Line], position: int, period: int) -> int | None:
    """The first number of a line that moves: which layer the line belongs to."""
    line, later = lines[position], lines[position + period]
    for a, b in zip(line.numbers, later.numbers, strict=True):
        if a != b:
            return a
    return None


def _alignment(lines: list[_Line], run: _Run) -> int:
    """How many lines to skip so that a period holds one layer and not the end of one and the start of the next;
    costs no line, as only those of the incomplete last period are skipped."""
    offset, spare = 0, run.num_lines % run.period
    while offset <= spare:
        change = _first_change(lines, run.start + offset, run.period)
        if change is None:
            return offset
        offset = change - run.start
    return 0


def _first_change(lines: list[_Line], first: int, period: int) -> int | None:
    layer: int | None = None
    for position in range(first, first + period):
        owner = _owner(lines, position, period)
        if owner is None or owner == layer:
            continue
        if layer is not None:
            return position
        layer = owner
    return None


def _repeat(lines: list[_Line], first: int, run: _Run) -> list[str]:
    owners = (_owner(lines, position, run.period) for position in range(first, first + run.period))
    base = next(owner for owner in owners if owner is not None)
    last = base + run.step * (run.repeats - 1)
    step = "" if abs(run.step) == 1 else f" step {abs(run.step)}"
    body = [_template(lines[p], lines[p + run.period], base) for p in range(first, first + run.period)]
    return [f"repeat i = {base}..{last}{step} {{", *(f"  {line}" for line in body), "}"]


def _template(line: _Line, later: _Line, base: int) -> str:
    texts = [
        str(a) if a == b else "{i}" if a == base else f"{{i{a - base:+d}}}"
        for a, b in zip(line.numbers, later.numbers, strict=True)
    ]
    return line.write(texts)
