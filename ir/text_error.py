"""One look for all errors in text: what was expected and found, the place, the line, a caret under the column."""

from shardwright.ir.errors import TextError

__all__ = ["error_at"]

_WIDTH = 160
"""Longest piece of a line that is shown."""


def error_at(text: str, path: str, line: int, column: int, message: str) -> TextError:
    """The error at a place in `text`; `line` and `column` count from 1.

    >>> print(error_at("plan 2", "net.plan", 1, 6, "expected 1, found 2"))
    expected 1, found 2
      at net.plan:1:6
      plan 2
           ^
    """
    lines = text.split("\n")
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    start = max(0, column - _WIDTH // 2) if len(shown) > _WIDTH else 0
    piece = shown[start : start + _WIDTH].replace("\t", " ")
    caret = " " * max(0, column - 1 - start) + "^"
    return TextError(f"{message}\n  at {path}:{line}:{column}\n  {piece}\n  {caret}")
