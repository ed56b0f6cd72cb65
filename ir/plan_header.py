"""The head and tail of a plan text: what it is for, and what is known about it. Decisions are in `plan_parse`."""

from collections.abc import Callable
from typing import Final, TypeVar

from shardwright.ir.decisions import Clip, Schedule
from shardwright.ir.errors import TextError
from shardwright.ir.names import closest
from shardwright.ir.placements import Mesh
from shardwright.ir.plan import FORMAT_VERSION, Baseline, Budget, Certificate, Identity, InputSpec, Prediction
from shardwright.ir.plan_lines import Cursor, PlanSource, split_lines
from shardwright.ir.plan_text import SCHEDULE_FIELDS
from shardwright.ir.type_text import parse_type
from shardwright.ir.units import parse_percent, parse_seconds, parse_size

__all__ = [
    "check_frame",
    "parse_baseline",
    "parse_budget",
    "parse_certificate",
    "parse_cluster_line",
    "parse_identity",
    "parse_prediction",
    "parse_schedule",
    "parse_target",
]

_T = TypeVar("_T")
_ONCE: Final = ("target", "graph", "inputs", "cluster", "budget", "schedule", "predict")
_KEYS: Final = (
    "plan", *_ONCE, "certify", "baseline", "place", "read", "keep", "recompute", "offload", "gather", "state",
    "parameter", "end",
)  # fmt: skip


def check_frame(source: PlanSource) -> dict[str, list[Cursor]]:
    """The lines by key, of a text that starts with `plan 1`, ends with `end`, and has what every plan has."""
    lines = split_lines(source)
    ordered = sorted((cursor.line, key, cursor) for key, cursors in lines.items() for cursor in cursors)
    if not ordered or ordered[0][1] != "plan":
        raise source.error(
            ordered[0][0] if ordered else 1, 1, f"expected a plan, which starts with 'plan {FORMAT_VERSION}'"
        )
    _check_version(ordered[0][2])
    for line, key, cursor in ordered:
        if key not in _KEYS:
            column = cursor.text.index(key) + 1
            raise source.error(line, column, f"expected one of {', '.join(_KEYS)}, found {key!r}{closest(key, _KEYS)}")
    last_line, last_key, last = ordered[-1]
    if last_key != "end":
        raise source.error(
            last_line,
            len(last.text) + 1,
            "expected the last line 'end', found none: the file is cut off; copy it again, or make the plan again",
        )
    last.expect_end()
    for key in ("plan", "end", *_ONCE, "certify"):
        found = lines.get(key, [])
        if len(found) > 1:
            raise source.error(found[1].line, 1, f"expected one {key!r} line, found another on line {found[0].line}")
        if not found and key != "certify":
            raise source.error(last_line, 1, f"expected a {key!r} line before this one, found none")
    return lines


def _check_version(cursor: Cursor) -> None:
    word = cursor.next()
    if word.text.isdigit() and int(word.text[:9]) != FORMAT_VERSION:
        raise cursor.source.error(
            cursor.line,
            word.column,
            f"this shardwright reads plan {FORMAT_VERSION}, the file is plan {word.text}: "
            "make the plan again, or use the shardwright that made it",
        )
    if word.text != str(FORMAT_VERSION):
        cursor.fail(word, f"the format's number, {FORMAT_VERSION}")
    cursor.expect_end()


def parse_target(cursor: Cursor) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Target, and versions."""
    target = cursor.expect_text("a target in quotes")
    versions: list[tuple[str, str]] = []
    while not cursor.at_end:
        name = cursor.expect_text("a name such as torch")
        versions.append((name, cursor.expect_text("a version")))
        cursor.skip_comma()
    return target, tuple(versions)


def parse_identity(graph: Cursor, inputs: Cursor) -> tuple[Identity, Clip]:
    """What the plan is for, and what is declared about gradients: unknown where nothing is."""
    digest = graph.expect_text("the hash of the graph")
    mode, loss, optimizer, dtype = (_field(graph, key, str) for key in ("mode", "loss", "optimizer", "dtype"))
    seed, accumulate = (_number(graph, key) for key in ("seed", "accumulate"))
    clip = Clip.UNKNOWN if graph.at_end else _field(graph, "clip", _parse_clip)
    graph.expect_end()
    specs: list[InputSpec] = []
    while not inputs.at_end:
        name = inputs.expect_text("the name of an input")
        word = inputs.next()
        if word.kind != "type":
            inputs.fail(word, "a type such as i64[8, 512]")
        specs.append(InputSpec(name, _converted(inputs, word.text, word.column, parse_type)))
        inputs.skip_comma()
    return Identity(digest, mode, loss, optimizer, dtype, seed, accumulate, tuple(specs)), clip


def _parse_clip(text: str) -> Clip:
    if text not in tuple(Clip):
        raise TextError(f"expected one of {', '.join(Clip)}, found {text!r}")
    return Clip(text)


def parse_cluster_line(cursor: Cursor) -> tuple[str, Mesh]:
    cluster = cursor.expect_text("a cluster in quotes")
    cursor.expect("mesh")
    cursor.expect("(")
    axes: list[str] = []
    sizes: list[int] = []
    while cursor.peek().text != ")":
        if axes:
            cursor.expect(",")
        word = cursor.peek()
        axes.append(cursor.expect_text("an axis such as dp"))
        if axes.count(axes[-1]) > 1:
            cursor.fail(word, "every axis once")
        cursor.expect("=")
        sizes.append(_whole(cursor, least=1))
    cursor.expect(")")
    cursor.expect_end()
    return cluster, Mesh(tuple(axes), tuple(sizes))


def parse_budget(cursor: Cursor) -> Budget:
    device, host, disk = _tier_sizes(cursor)
    return Budget(device, host, disk)


def parse_schedule(cursor: Cursor) -> Schedule:
    """Sizes by the names of `SCHEDULE_FIELDS`, in their order."""
    found = {name: _size_field(cursor, word) for word, name in SCHEDULE_FIELDS}
    cursor.expect_end()
    return Schedule(**found)


def parse_prediction(cursor: Cursor) -> Prediction:
    cursor.expect("step")
    step = _quantity(cursor, parse_seconds)
    error = _quantity(cursor, lambda text: parse_percent(text.removeprefix("±")))
    cursor.skip_comma()
    device, host, disk = _tier_sizes(cursor)
    return Prediction(step, error, device, host, disk)


def _tier_sizes(cursor: Cursor) -> tuple[int, int, int]:
    """Bytes on device, host and disk; a disk is named only where there is one."""
    device, host = (_size_field(cursor, key) for key in ("device", "host"))
    disk = 0 if cursor.at_end else _size_field(cursor, "disk")
    cursor.expect_end()
    return device, host, disk


def parse_certificate(cursor: Cursor) -> Certificate:
    objective, bound = (_field(cursor, key, parse_seconds) for key in ("objective", "bound"))
    space, engine = (_field(cursor, key, str) for key in ("space", "engine"))
    interrupted = cursor.peek().text == "interrupted"
    if interrupted:
        cursor.next()
    cursor.expect_end()
    return Certificate(objective, bound, space, engine, interrupted)


def parse_baseline(cursor: Cursor) -> Baseline:
    name = cursor.expect_text("the name of a baseline")
    seconds = _quantity(cursor, lambda text: None if text == "n/a" else parse_seconds(text))
    size = _quantity(cursor, lambda text: None if text == "n/a" else parse_size(text, zero=True))
    note = "" if cursor.at_end else cursor.expect_text("a note in quotes")
    cursor.expect_end()
    return Baseline(name, seconds, size, note)


def _field(cursor: Cursor, key: str, parse: Callable[[str], _T]) -> _T:
    """`key value` and the comma after it."""
    cursor.expect(key)
    value = _quantity(cursor, parse)
    cursor.skip_comma()
    return value


def _size_field(cursor: Cursor, key: str) -> int:
    return _field(cursor, key, lambda text: parse_size(text, zero=True))


def _converted(cursor: Cursor, text: str, column: int, parse: Callable[[str], _T]) -> _T:
    try:
        return parse(text)
    except TextError as error:
        raise cursor.source.error(cursor.line, column, str(error)) from None


def _quantity(cursor: Cursor, parse: Callable[[str], _T]) -> _T:
    word = cursor.peek()
    return _converted(cursor, cursor.expect_text("a value"), word.column, parse)


def _number(cursor: Cursor, key: str) -> int:
    cursor.expect(key)
    value = _whole(cursor)
    cursor.skip_comma()
    return value


def _whole(cursor: Cursor, least: int | None = None) -> int:
    word = cursor.next()
    digits = word.text.removeprefix("-")
    if word.kind != "word" or not digits.isdecimal() or not digits.isascii() or len(digits) > 30:
        cursor.fail(word, "a whole number")
    if least is not None and int(word.text) < least:
        cursor.fail(word, f"a whole number of {least} or more")
    return int(word.text)
