"""Names of values: module path and what it is, `layers.3.mlp.act_fn/silu`.

Later ones of the same kind in a module get `:2`, `:3`; a module's second call `#1`; what backward computes is
`layers.3.mlp.act_fn/grad:silu_backward`, a parameter's gradient `grad(layers.3.mlp.up_proj.weight)`. An operator's
further results are `norm/native_layer_norm.1`. Names do not depend on hashing, only on the order of the graph.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from shardwright.ir import Graph, Node, Phase

__all__ = ["ROOT", "call_path", "named", "source_line"]

ROOT = "target"
"""Attribute under which the captured step holds the user's module."""

_OWN_CODE = (os.path.dirname(torch.__file__) + os.sep, "<")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in')


def call_path(stack: Mapping[str, tuple[str, object]] | None) -> str:
    """Module path from fx's module stack, with `#1` for the second call; "" at the top.

    >>> call_path({"1": ("L['self'].target.layers.0", None), "2@1": ("L['self'].target.layers.0.act", None)})
    'layers.0.act#1'
    """
    if not stack:
        return ""
    key, (path, _) = list(stack.items())[-1]
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = "" if path == ROOT else path.removeprefix(f"{ROOT}.")
    call = key.partition("@")[2]
    return f"{path}#{call}" if call else path


def source_line(stack_trace: str | None) -> str:
    """`models/llama.py:12`: the innermost frame outside torch; "" where unknown."""
    for file, line in reversed(_FRAME.findall(stack_trace or "")):
        if not file.startswith(_OWN_CODE):
            return f"{os.path.join(os.path.basename(os.path.dirname(file)), os.path.basename(file))}:{line}"
    return ""


def named(graph: Graph) -> Graph:
    """The same graph with names for people; `Node.module` holds `call_path`s before and plain module paths after."""
    taken = {i.name: i.name for i in graph.inputs}
    gradients = {value: f"grad({parameter})" for parameter, value in reversed(list(graph.gradients.items()))}
    names = dict(taken)
    counts: dict[str, int] = {}
    nodes = []
    for node in graph.nodes:
        base = _unused(_base_name(node), counts, taken)
        for position, result in enumerate(node.results):
            wanted = gradients.get(result) or (f"{base}.{position}" if position else base)
            names[result] = taken[wanted] = wanted
        nodes.append(_renamed(node, names))
    return replace(
        graph,
        nodes=tuple(nodes),
        types={names[name]: type_ for name, type_ in graph.types.items()},
        loss=names[graph.loss],
        gradients={parameter: names[value] for parameter, value in graph.gradients.items()},
        updates={buffer: names[value] for buffer, value in graph.updates.items()},
        outputs={path: names[value] for path, value in graph.outputs.items()},
    )


def _base_name(node: Node) -> str:
    kind = node.op.split(".")[1].lstrip("_")
    kind = f"grad:{kind}" if node.phase is Phase.BACKWARD else kind
    return f"{node.module}/{kind}" if node.module else kind


def _unused(base: str, counts: dict[str, int], taken: Mapping[str, str]) -> str:
    while True:
        counts[base] = number = counts.get(base, 0) + 1
        name = base if number == 1 else f"{base}:{number}"
        if name not in taken:
            return name


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    read = node.with_operands(tuple(names[name] for name in node.operands))
    results = tuple(names[result] for result in node.results)
    return replace(read, results=results, module=node.module.partition("#")[0])
