"""Lines of a plan text as words with their columns, and errors that point at them."""

import json
import re
from dataclasses import dataclass
from typing import Final, NoReturn

from shardwright.ir.errors import TextError
from shardwright.ir.text_error import error_at

__all__ = ["Cursor", "PlanSource", "Word", "split_lines"]

_WORD: Final = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<type>[a-z][a-z0-9]*\[[^\]]*\](?:\{[^}]*\})?)"""
    r"""|(?P<mark>[,()=])|(?P<comment>\#.*)|(?P<word>[^\s,()="]+)|(?P<bad>\S))"""
)
_END: Final = "end of line"


@dataclass(frozen=True, slots=True)
class PlanSource:
    """The whole text, for messages."""

    text: str
    path: str

    def error(self, line: int, column: int, message: str) -> TextError:
        return error_at(self.text, self.path, line, column, message)


@dataclass(frozen=True, slots=True)
class Word:
    """A piece of a line."""

    kind: str
    """string, type, mark, word, bad, or end of line."""
    text: str
    """Without quotes."""
    column: int
    """From 1."""


class Cursor:
    """Reads one line word by word."""

    def __init__(self, source: PlanSource, line: int, text: str, start: int = 0) -> None:
        self.source = source
        self.line = line
        self.text = text
        self._at = start

    def peek(self) -> Word:
        return self._scan()[0]

    def next(self) -> Word:
        word, self._at = self._scan()
        return word

    def _scan(self) -> tuple[Word, int]:
        match = _WORD.match(self.text, self._at)
        kind = match.lastgroup if match else None
        if match is None or kind is None or kind == "comment":
            return Word(_END, "", len(self.text.rstrip()) + 1), len(self.text)
        raw, column = match[kind], match.start(kind) + 1
        if kind != "string":
            return Word(kind, raw, column), match.end()
        try:
            return Word(kind, str(json.loads(raw)), column), match.end()
        except json.JSONDecodeError as error:
            raise self.source.error(
                self.line, column, f"expected text quoted as in JSON, found {raw} ({error.msg})"
            ) from None

    def next_name(self) -> Word:
        """The next word with all marks in it: a name or glob may have commas, parentheses and '='."""
        match = re.compile(r"\s*([^\s\"#]\S*)").match(self.text, self._at)
        if match is None:
            return self.next()
        self._at = match.end()
        return Word("word", match[1], match.start(1) + 1)

    @property
    def at_end(self) -> bool:
        return self.peek().kind == _END

    def fail(self, word: Word, expected: str) -> NoReturn:
        found = "the end of the line" if word.kind == _END else repr(word.text)
        raise self.source.error(self.line, word.column, f"expected {expected}, found {found}")

    def expect_text(self, what: str) -> str:
        """A word or text in quotes."""
        word = self.next()
        if word.kind not in ("word", "string"):
            self.fail(word, what)
        return word.text

    def expect(self, text: str) -> None:
        word = self.next()
        if word.kind not in ("word", "mark") or word.text != text:
            self.fail(word, repr(text))

    def expect_end(self) -> None:
        word = self.next()
        if word.kind != _END:
            self.fail(word, "the end of the line")

    def skip_comma(self) -> None:
        if self.peek().text == "," and self.peek().kind == "mark":
            self.next()
        elif not self.at_end:
            self.fail(self.peek(), "',' or the end of the line")

    def rest(self) -> tuple[str, int]:
        """What remains of the line without a comment, and its column."""
        remaining = re.sub(r"(?:^|\s)#.*", "", self.text[self._at :])
        column = self._at + len(remaining) - len(remaining.lstrip()) + 1
        self._at = len(self.text)
        return remaining.strip(), column


def split_lines(source: PlanSource) -> dict[str, list[Cursor]]:
    """Key to its lines, in order, each read past the key; empty lines and comments are left out."""
    found: dict[str, list[Cursor]] = {}
    for number, text in enumerate(source.text.split("\n"), start=1):
        key = re.match(r"\s*([^\s#]\S*)", text)
        if key:
            found.setdefault(key[1], []).append(Cursor(source, number, text.rstrip("\r"), key.end()))
    return found
