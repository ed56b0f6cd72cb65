"""All private torch imports stand in `runtime/compat.py`."""

import ast
import re
from pathlib import Path

import shardwright.runtime.compat as compat

PACKAGE = Path(__file__).parents[2]
ALLOWED = {"torch._ops.OpOverload"}
"""The type of an operator: what `torch.ops` itself hands out has no public name."""


def private_imports(source: str) -> set[str]:
    """Private torch modules or members that a file imports, and private modules that it spells out."""
    imported: set[str] = set()
    spelled: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            spelled.add(ast.unparse(node))
    private = {name for name in imported if name.startswith("torch.") and "._" in name}
    return private | {name for name in spelled if re.match(r"torch\._[a-z]|torch\._C\b", name)}


def test_no_other_file_imports_private_parts_of_torch() -> None:
    files = [f for layer in ("ir", "passes", "planner", "runtime") for f in (PACKAGE / layer).rglob("*.py")]
    assert len(files) > 20
    private = {
        str(file.relative_to(PACKAGE)): found
        for file in files
        if file.name != "compat.py" and (found := private_imports(file.read_text()) - ALLOWED)
    }
    assert private == {}


def test_the_search_sees_private_imports() -> None:
    source = (
        "import torch._dynamo\nfrom torch.fx import _pytree as p\nx = torch._C._foo\ny = torch.nn.Linear.__name__\n"
    )
    assert private_imports(source) == {"torch._dynamo", "torch.fx._pytree", "torch._C._foo", "torch._C"}


def test_every_private_part_is_named() -> None:
    assert sorted(compat.__all__) == compat.__all__
    assert all(hasattr(compat, name) for name in compat.__all__)
