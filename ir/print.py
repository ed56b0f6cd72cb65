"""Graph to text, and the hash of that text. `parse` is the inverse; `fold` prints equal layers once."""

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Final

from shardwright.ir.errors import GraphError
from shardwright.ir.fold import fold_lines
from shardwright.ir.graph import Arg, Graph, Node, Phase, Ref, Token
from shardwright.ir.names import mark_numbers, quote

__all__ = ["RESERVED_WORDS", "format_node", "graph_hash", "print_graph"]

RESERVED_WORDS: Final[dict[str, Arg]] = {
    "true": True,
    "false": False,
    "none": None,
    "inf": float("inf"),
    "nan": float("nan"),
}
"""Words that are constants; every other word is a Token."""

_WORD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def print_graph(graph: Graph) -> str:
    """The text of a graph; equal graphs print equal. Raises GraphError for what the text cannot say."""
    _check_printable(graph)
    text = _Text(graph, _marked_names(graph))
    phases = {phase: [text.node(n) for n in graph.nodes if n.phase is phase] for phase in Phase}
    lines = [
        f"graph {quote(graph.name)} {{",
        *_indent(fold_lines(text.inputs())),
        *_section("forward", phases[Phase.FORWARD]),
        *_section("backward", phases[Phase.BACKWARD]),
        *_section("return", text.returned()),
        "}",
    ]
    return "\n".join(lines) + "\n"


def graph_hash(graph: Graph) -> str:
    """`sha256:` and the digest of the printed graph."""
    return "sha256:" + hashlib.sha256(print_graph(graph).encode()).hexdigest()


def format_node(graph: Graph, node: Node) -> str:
    """One line for one node, as in the graph's text, for messages."""
    return _Text(graph, lambda name: mark_numbers(name).replace("\0", "")).node(node)


class _Text:
    """Lines of one graph; `name` gives a name as it is written."""

    def __init__(self, graph: Graph, name: Callable[[str], str]) -> None:
        self._graph = graph
        self._name = name

    def inputs(self) -> list[str]:
        return [f"{i.kind.value:<7} {self._value(i.name)}" for i in self._graph.inputs]

    def node(self, node: Node) -> str:
        results = ", ".join(self._value(result) for result in node.results)
        arguments = [self._arg(arg) for arg in node.args]
        arguments += [f"{key}={self._arg(arg)}" for key, arg in node.kwargs]
        call = f"{node.op}({', '.join(arguments)})"
        module = f"  @{self._name(node.module)}" if node.module else ""
        source = f"  {quote(node.source)}" if node.source else ""
        return f"{f'{results} = ' if results else ''}{call}{module}{source}"

    def returned(self) -> list[str]:
        graph = self._graph
        loss = [f"loss %{self._name(graph.loss)}"] if graph.loss else []
        outputs = [f"output {quote(path)} = %{self._name(value)}" for path, value in graph.outputs.items()]
        updates = [f"update %{self._name(name)} = %{self._name(value)}" for name, value in graph.updates.items()]
        grads = [f"grad %{self._name(name)} = %{self._name(value)}" for name, value in graph.gradients.items()]
        return [*loss, *outputs, *updates, *grads]

    def _value(self, name: str) -> str:
        return f"%{self._name(name)}: {self._graph.types[name]}"

    def _arg(self, arg: Arg) -> str:
        if isinstance(arg, Ref):
            return f"%{self._name(arg.name)}"
        if isinstance(arg, tuple):
            return f"[{', '.join([self._arg(item) for item in arg])}]"
        return _constant(arg)


def _constant(arg: Token | int | float | bool | str | None) -> str:
    if isinstance(arg, Token):
        plain = _WORD.fullmatch(arg.text) and arg.text not in RESERVED_WORDS
        return arg.text if plain else f"token{quote(arg.text)}"
    if isinstance(arg, str):
        return quote(arg)
    if arg is None:
        return "none"
    return str(arg).lower() if isinstance(arg, bool) else repr(arg)


def _marked_names(graph: Graph) -> Callable[[str], str]:
    known = {name: mark_numbers(name) for name in graph.types}
    known |= {node.module: mark_numbers(node.module) for node in graph.nodes}
    return lambda name: known.get(name) or mark_numbers(name)


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"  {title} {{", *_indent(_indent(fold_lines(lines))), "  }"] if lines else []


def _indent(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _check_printable(graph: Graph) -> None:
    results = (result for node in graph.nodes for result in node.results)
    for name in (*(i.name for i in graph.inputs), *results):
        if name not in graph.types:
            raise GraphError(f"expected a type for every value, found none for {name!r} in graph {graph.name!r}")
    phase = Phase.FORWARD
    for node in graph.nodes:
        if node.phase is Phase.FORWARD and phase is Phase.BACKWARD:
            raise GraphError(f"expected all forward nodes before all backward nodes, found {node.name!r} late")
        phase = node.phase
        for word in (node.op, *(key for key, _ in node.kwargs)):
            if not _WORD.fullmatch(word):
                raise GraphError(
                    f"expected letters, digits, '_' and '.' in operators and keywords, found {word!r} at {node.name!r}"
                )
