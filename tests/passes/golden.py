"""Golden cases: a graph, `---`, the graph that a pass makes of it. Text on both sides, in `tests/cases/<pass>/*.ir`.

The first lines say what to run and where:

    # pass: bucket{bucket_bytes=512}
    # mesh: a=2, b=2
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.ir import Graph, Mesh
from shardwright.ir.parse import parse_graph
from shardwright.ir.print import print_graph
from shardwright.passes.base import Pass
from shardwright.passes.bucket import Bucket
from shardwright.passes.bucket_gathers import BucketGathers
from shardwright.passes.copy_room import CopyRoom
from shardwright.passes.early_starts import EarlyStarts
from shardwright.passes.inplace import InPlace
from shardwright.passes.late_waits import LateWaits
from shardwright.passes.prefetch import Prefetch

__all__ = ["CASES", "Case", "read_case"]

FOLDER = Path(__file__).parent.parent / "cases"
_PASSES = {p.name: p for p in (Bucket, BucketGathers, CopyRoom, EarlyStarts, InPlace, LateWaits, Prefetch)}
_HEADER = re.compile(r"# pass: ([a-z-]+)(?:\{(.*)\})?\n# mesh: (.*)\n")
_BORDER = "---\n"

CASES = sorted(path for name in _PASSES for path in (FOLDER / name.replace("-", "_")).glob("*.ir"))


@dataclass(frozen=True)
class Case:
    """One file."""

    path: Path
    step: Pass
    mesh: Mesh
    text: str
    """Header and graph before."""
    expected: str
    before: Graph
    after: Graph
    """What the pass makes now."""

    @property
    def found(self) -> str:
        return print_graph(self.after)

    def rewrite(self) -> None:
        self.path.write_text(f"{self.text}{_BORDER}{self.found}")


def read_case(path: Path) -> Case:
    """Read a file and run its pass."""
    text, _, expected = path.read_text().partition(_BORDER)
    header = _HEADER.match(text)
    if header is None:
        raise ValueError(f"{path} does not start with '# pass: name{{option=1}}' and '# mesh: axis=2'")
    name, options, axes = header.groups()
    given: dict[str, Any] = {key: int(value) for key, value in _pairs(options or "")}
    step = _PASSES[name](**given)
    mesh = Mesh(*map(tuple, zip(*((axis, int(size)) for axis, size in _pairs(axes)), strict=True)))
    before = parse_graph(text)
    return Case(path, step, mesh, text, expected, before, step.run(before))


def _pairs(text: str) -> list[list[str]]:
    return [part.strip().split("=") for part in text.split(",") if part.strip()]
