"""How names stand in text: bare where the grammar allows it, quoted otherwise; where layer numbers are in them.

A bare name has letters, digits and `_ . / # ~ + -`, colons that something follows, and balanced parentheses up to
four deep, so that `%grad(a.b/mm:2)` ends where a reader thinks it ends. Anything else is written `"…"` as in JSON.
"""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Final

__all__ = ["MARK", "closest", "is_bare", "mark_numbers", "number_parts", "quote", "write_name"]

MARK: Final = "\0"
"""Stands before and after a layer number in a line that may be folded; never part of printed text."""


def _nested(depth: int) -> str:
    inner = rf"|\({_nested(depth - 1)}*+\)" if depth else ""
    return rf"(?:[A-Za-z0-9_./#~+\-]++|:(?=[A-Za-z0-9_(]){inner})"


_BARE: Final = re.compile(rf"{_nested(4)}++")
_NUMBER: Final = re.compile(r"(?<![^.(])(0|[1-9][0-9]{0,8})(?![^./:#)~+\-])")


def is_bare(name: str) -> bool:
    """Whether `name` needs no quotes.

    >>> is_bare("grad(model.layers.0/mm:2)"), is_bare("a b"), is_bare("a)")
    (True, False, False)
    """
    return _BARE.fullmatch(name) is not None


def quote(text: str) -> str:
    """Text in double quotes, ASCII only, on one line."""
    return json.dumps(text)


def write_name(name: str) -> str:
    return name if is_bare(name) else quote(name)


def mark_numbers(name: str) -> str:
    """The name as written, its whole-segment numbers between marks; a quoted name has none.

    >>> mark_numbers("h.3/mm:2").replace(MARK, "|")
    'h.|3|/mm:2'
    """
    return _NUMBER.sub(rf"{MARK}\1{MARK}", name) if is_bare(name) else quote(name)


def number_parts(name: str) -> tuple[str, ...]:
    """The name cut at its whole-segment numbers, which stand at odd places.

    >>> number_parts("h.3.w")
    ('h.', '3', '.w')
    """
    return tuple(_NUMBER.split(name)) if is_bare(name) else (name,)


def closest(name: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing where no choice is near."""
    pool = [choice for choice in choices if abs(len(choice) - len(name)) <= 12]
    found = difflib.get_close_matches(name, sorted(pool), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""
