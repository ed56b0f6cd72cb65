"""Text to graph: the inverse of `print`. Repeats are expanded while the graph is built.

An error shows the line with a caret. What repeats may expand to is bounded, so that no text makes this loop for long.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from lark import Lark, Token, Tree, UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from shardwright.ir.errors import TextError
from shardwright.ir.graph import Arg, Graph, Input, InputKind, Node, Phase, Ref
from shardwright.ir.graph import Token as Word
from shardwright.ir.print import RESERVED_WORDS
from shardwright.ir.text_error import error_at
from shardwright.ir.type_text import parse_type
from shardwright.ir.types import TensorType

__all__ = ["parse_graph"]

_MAX_LINES: Final = 2_000_000
"""Most lines that repeats may expand to."""

_TEMPLATE: Final = re.compile(r"\{\{|\{i(?:([+-][0-9]+))?\}")

_HUMAN: Final = {
    "NAME": "a value such as %x", "TYPE": "a type such as f32[8, 4]", "WORD": "an operator or word", "RBRACE": "'}'",
    "STRING": 'text in quotes', "NUMBER": "a number", "LSQB": "'['", "RSQB": "']'", "LPAR": "'('", "RPAR": "')'",
    "LBRACE": "'{'", "COLON": "':'", "EQUAL": "'='", "COMMA": "','", "MODULE": "a module such as @model.layers.0",
    "KIND": "param, frozen, buffer, input or tangent", "RANGE": "a range such as 0..31", "$END": "the end of the text",
}  # fmt: skip
"""What a terminal of the grammar is called in messages; others by their own text."""

_HIDDEN: Final = frozenset({"QUOTED_WORD"})

_Lines = list[Tree[Token]]


def parse_graph(text: str, path: str = "<graph>") -> Graph:
    """The graph that `text` describes. `path` is only for messages. Raises TextError."""
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise _syntax_error(text, path, error) from None
    try:
        return _Builder(text, path).graph(tree)
    except RecursionError:
        raise TextError(
            f"expected lists nested less deeply than Python can follow, found deeper ones in {path}"
        ) from None


@cache
def _parser() -> Lark:
    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", maybe_placeholders=False)


def _syntax_error(text: str, path: str, error: UnexpectedInput) -> TextError:
    line, column = error.line, error.column
    if not text.rstrip().endswith("}"):
        last = text.rstrip().split("\n")
        message = "expected the closing '}' of the graph, found none: the file is cut off; copy it again, or plan again"
        return error_at(text, path, len(last), len(last[-1]) + 1, message)
    if isinstance(error, UnexpectedToken):
        expected, at_end = set(error.expected), error.token.type == "$END"
        found = "the end of the text" if at_end else repr(str(error.token))
        if at_end:
            last = text.rstrip("\n").split("\n")
            line, column = len(last), len(last[-1]) + 1
    else:
        assert isinstance(error, UnexpectedCharacters), "lark raises no other kind for LALR"
        expected, found = set(error.allowed or ()), repr(error.char)
    names = sorted(_HUMAN.get(name, repr(name.lower())) for name in expected - _HIDDEN)
    return error_at(text, path, line, column, f"expected {' or '.join(names)}, found {found}")


@dataclass(frozen=True, slots=True)
class _NodeLine:
    """One line of a phase, names as templates."""

    place: Token
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[Token, ...]
    names: tuple[str, ...]
    types: tuple[TensorType, ...]
    module: str
    source: str


class _Builder:
    """Collects a graph from a syntax tree."""

    def __init__(self, text: str, path: str) -> None:
        self._text = text
        self._path = path
        self._num_lines = 0
        self._inputs: list[Input] = []
        self._nodes: list[Node] = []
        self._types: dict[str, TensorType] = {}
        self._returned: dict[str, dict[str, str]] = {"loss": {}, "gradient": {}, "update": {}, "output": {}}

    def graph(self, tree: Tree[Token]) -> Graph:
        title, *sections = tree.children
        for section in _trees(sections):
            for lines, indices in self._blocks(section):
                self._add_block(str(section.data), lines, indices)
        found = self._returned
        return Graph(
            name=self._json(_token(title)),
            inputs=tuple(self._inputs),
            nodes=tuple(self._nodes),
            types=self._types,
            loss=found["loss"].get("loss", ""),
            gradients=found["gradient"],
            updates=found["update"],
            outputs=found["output"],
        )

    def _blocks(self, section: Tree[Token]) -> Iterator[tuple[_Lines, range | None]]:
        """Lines of a section with the layer numbers they are repeated for; None outside of a repeat."""
        for child in _trees(section.children):
            if not str(child.data).endswith("_repeat"):
                yield [child], None
                continue
            head, *lines = _trees(child.children)
            indices = self._range(head)
            self._num_lines += len(indices) * len(lines)
            if self._num_lines > _MAX_LINES:
                raise self._error(_token(head.children[0]), f"expected repeats of at most {_MAX_LINES} lines in all")
            yield lines, indices

    def _range(self, head: Tree[Token]) -> range:
        bounds, *rest = (_token(child) for child in head.children)
        first, last = (self._whole(bounds, part) for part in bounds.split(".."))
        step = self._whole(rest[0], str(rest[0])) if rest else 1
        if step <= 0:
            raise self._error(rest[0], f"expected a step of 1 or more, found {step}")
        return range(first, last + 1, step) if first <= last else range(first, last - 1, -step)

    def _add_block(self, section: str, lines: _Lines, indices: range | None) -> None:
        if section in ("forward", "backward"):
            parsed = [self._node_line(line) for line in lines]
            phase = Phase(section)
            for index in indices if indices is not None else (None,):
                for node_line in parsed:
                    self._add_node(node_line, phase, index)
            return
        add_line = self._add_input if section == "inputs" else self._add_returned
        for index in indices if indices is not None else (None,):
            for line in lines:
                add_line(line, index)

    def _add_input(self, line: Tree[Token], index: int | None) -> None:
        kind, value = line.children
        (name, tensor_type) = self._value(_tree(value))
        resolved = self._declare(name, self._name(name), tensor_type, index)
        self._inputs.append(Input(resolved, InputKind(_token(kind))))

    def _add_node(self, line: _NodeLine, phase: Phase, index: int | None) -> None:
        results = tuple(
            self._declare(place, name, tensor_type, index)
            for place, name, tensor_type in zip(line.results, line.names, line.types, strict=True)
        )
        args = tuple([self._resolve_arg(arg, line.place, index) for arg in line.args])
        kwargs = tuple([(key, self._resolve_arg(arg, line.place, index)) for key, arg in line.kwargs])
        module = self._resolve(line.module, line.place, index)
        self._nodes.append(Node(line.op, args, kwargs, results, phase, module, line.source))

    def _add_returned(self, line: Tree[Token], index: int | None) -> None:
        what, tokens = str(line.data), [_token(child) for child in line.children]
        value = self._resolve(self._name(tokens[-1]), tokens[-1], index)
        if what == "loss":
            key = "loss"
        elif what == "output":
            key = self._json(tokens[0])
        else:
            key = self._resolve(self._name(tokens[0]), tokens[0], index)
        if key in self._returned[what]:
            raise self._error(tokens[0], f"expected one {what} line for each key, found a second one for {key!r}")
        self._returned[what][key] = value

    def _node_line(self, tree: Tree[Token]) -> _NodeLine:
        values: list[tuple[Token, TensorType]] = []
        words: list[Token] = []
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        for child in tree.children:
            if isinstance(child, Token):
                words.append(child)
            elif child.data == "values":
                values = [self._value(value) for value in _trees(child.children)]
            else:
                self._read_arguments(child, args, kwargs)
        op, *rest = words
        module = next((self._name(word) for word in rest if word.type == "MODULE"), "")
        source = next((self._json(word) for word in rest if word.type == "STRING"), "")
        places, types = tuple(v[0] for v in values), tuple(v[1] for v in values)
        names = tuple(self._name(place) for place in places)
        return _NodeLine(op, str(op), tuple(args), tuple(kwargs), places, names, types, module, source)

    def _read_arguments(self, tree: Tree[Token], args: list[Arg], kwargs: list[tuple[str, Arg]]) -> None:
        for child in tree.children:
            if isinstance(child, Token) or child.data == "list":
                if kwargs:
                    place = child if isinstance(child, Token) else next(iter(child.scan_values(_is_token)), None)
                    raise self._error(place, "expected only keyword arguments after the first keyword argument")
                args.append(self._arg(child))
            else:
                key, item = child.children
                kwargs.append((str(key), self._arg(item)))

    def _arg(self, item: Tree[Token] | Token) -> Arg:
        """An argument; the names in refs are templates."""
        if not isinstance(item, Token):
            return tuple([self._arg(child) for child in item.children])
        if item.type == "NAME":
            return Ref(self._name(item))
        if item.type == "WORD":
            return RESERVED_WORDS[item] if item in RESERVED_WORDS else Word(str(item))
        if item.type == "NUMBER":
            return self._number(item)
        return self._json(item) if item.type == "STRING" else Word(self._json(item, skip=len("token")))

    def _number(self, token: Token) -> int | float:
        plain = token.lstrip("-").isdigit()
        return self._whole(token, str(token)) if plain else float(token)

    def _whole(self, place: Token, digits: str) -> int:
        if len(digits) > 4000:
            raise self._error(place, f"expected a number of at most 4000 digits, found {len(digits)}")
        return int(digits)

    def _value(self, tree: Tree[Token]) -> tuple[Token, TensorType]:
        name, type_token = (_token(child) for child in tree.children)
        return name, self._type(type_token)

    def _type(self, token: Token) -> TensorType:
        try:
            return parse_type(str(token))
        except TextError as error:
            raise self._error(token, str(error)) from None

    def _name(self, token: Token) -> str:
        """The template of a name: braces that are part of a quoted name are doubled."""
        if token[1] == '"':
            return self._json(token, skip=1).replace("{", "{{")
        return token[1:]

    def _json(self, token: Token, skip: int = 0) -> str:
        try:
            return str(json.loads(token[skip:]))
        except json.JSONDecodeError as error:
            raise self._error(token, f"expected text quoted as in JSON, found {token[skip:]} ({error.msg})") from None

    def _declare(self, place: Token, name: str, tensor_type: TensorType, index: int | None) -> str:
        resolved = self._resolve(name, place, index)
        if resolved in self._types:
            raise self._error(place, f"expected every value to be named once, found a second {resolved!r}")
        self._types[resolved] = tensor_type
        return resolved

    def _resolve_arg(self, arg: Arg, place: Token, index: int | None) -> Arg:
        if isinstance(arg, Ref):
            return Ref(self._resolve(arg.name, place, index)) if "{" in arg.name else arg
        if isinstance(arg, tuple):
            return tuple([self._resolve_arg(item, place, index) for item in arg])
        return arg

    def _resolve(self, name: str, place: Token, index: int | None) -> str:
        if "{" not in name:
            return name

        def number(match: re.Match[str]) -> str:
            if match[0] == "{{":
                return "{"
            if index is None:
                raise self._error(place, f"expected {match[0]} only inside of a repeat")
            found = index + self._whole(place, match[1] or "0")
            if found < 0:
                raise self._error(place, f"expected layer numbers of 0 or more, found {match[0]} = {found}")
            return str(found)

        return _TEMPLATE.sub(number, name)

    def _error(self, place: Token | None, message: str) -> TextError:
        line, column = (place.line or 1, place.column or 1) if place is not None else (1, 1)
        return error_at(self._text, self._path, line, column, message)


def _is_token(item: object) -> bool:
    return isinstance(item, Token)


def _trees(children: list[Tree[Token] | Token]) -> list[Tree[Token]]:
    return [_tree(child) for child in children]


def _tree(child: Tree[Token] | Token) -> Tree[Token]:
    assert isinstance(child, Tree), "the grammar puts a rule here"
    return child


def _token(child: Tree[Token] | Token) -> Token:
    assert isinstance(child, Token), "the grammar puts a token here"
    return child
