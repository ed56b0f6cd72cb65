"""Files of ours that run without the package: readable copies whose imports lead to each other.

A program that is written to a folder needs torch and a few modules of this layer beside it. Each is copied as it is,
comments included; only where it imports from `shardwright` the line names the copy instead.
"""

import ast
import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Final

from shardwright.ir import PlanError

__all__ = ["standalone"]

PACKAGE: Final = "shardwright"


def standalone(modules: Iterable[ModuleType]) -> dict[str, str]:
    """File name to text: the modules, and everything of ours that they import.

    Raises PlanError where two modules would have one name.
    """
    found: dict[str, str] = {}
    origins: dict[str, str] = {}
    waiting = [module.__name__ for module in modules]
    while waiting:
        name = waiting.pop()
        stem = name.rpartition(".")[2]
        if origins.setdefault(stem, name) != name:
            raise PlanError(
                f"expected modules of different names to stand side by side, found {name} and {origins[stem]};"
                " rename one"
            )
        if f"{stem}.py" not in found:
            found[f"{stem}.py"], imported = _copied(importlib.import_module(name))
            waiting.extend(imported)
    return found


def _copied(module: ModuleType) -> tuple[str, list[str]]:
    """The text with its imports renamed, and the modules of ours that it imports from."""
    text = Path(str(module.__file__)).read_text()
    lines = text.splitlines(keepends=True)
    imported: list[str] = []
    # From the end, so that line numbers stay right.
    for node in sorted(_own_imports(ast.parse(text)), key=lambda node: -node.lineno):
        by_module: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            by_module.setdefault(_origin(str(node.module), alias.name), []).append(alias)
        imported.extend(by_module)
        lines[node.lineno - 1 : node.end_lineno] = [
            f"from {name.rpartition('.')[2]} import {', '.join(map(ast.unparse, aliases))}\n"
            for name, aliases in sorted(by_module.items())
        ]
    return "".join(lines), imported


def _own_imports(tree: ast.Module) -> list[ast.ImportFrom]:
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == PACKAGE
    ]


def _origin(module: str, name: str) -> str:
    """The module that defines what `from module import name` gives: a layer passes on what its files define."""
    found = importlib.import_module(module)
    if not hasattr(found, "__path__"):
        return module
    return str(getattr(found, name).__module__)
