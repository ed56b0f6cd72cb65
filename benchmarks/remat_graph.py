"""Recomputation instances: a directed acyclic graph in a fixed order, with a duration and a size for every node.

Reads the networkx node-link files of Checkmate (cost_cpu, cost_ram, links source -> target, ordered by id) and of
Moccasin (duration, out_cost, links 0 -> 1, `graph.order`). Nodes are renumbered by position: node p is computed in
stage p. Durations and sizes are in the file's own units.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["RematGraph", "load"]


@dataclass(frozen=True)
class RematGraph:
    name: str
    inputs: tuple[tuple[int, ...], ...]
    """Of node p: the nodes it reads, all smaller than p."""
    sizes: tuple[int, ...]
    durations: tuple[int, ...]

    @property
    def edges(self) -> int:
        return sum(map(len, self.inputs))

    @property
    def duration(self) -> int:
        """Of computing everything once."""
        return sum(self.durations)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        consumers: list[list[int]] = [[] for _ in self.inputs]
        for node, inputs in enumerate(self.inputs):
            for value in inputs:
                consumers[value].append(node)
        return tuple(map(tuple, consumers))

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes while node p runs when nothing is recomputed: a value lives from its node to its last consumer."""
        change = [0] * (len(self.inputs) + 1)
        for node, consumers in enumerate(self.consumers):
            change[node] += self.sizes[node]
            change[max(consumers, default=node) + 1] -= self.sizes[node]
        live = [0]
        for difference in change[:-1]:
            live.append(live[-1] + difference)
        return tuple(live[1:])

    @property
    def peak(self) -> int:
        return max(self.live)

    @property
    def size_unit(self) -> int:
        """All sizes are multiples of it, so a budget can be rounded down to one without losing a schedule."""
        return math.gcd(*self.sizes)

    @property
    def duration_unit(self) -> int:
        return math.gcd(*self.durations) or 1


def load(path: Path) -> RematGraph:
    content = json.loads(path.read_text())
    nodes, links = content["nodes"], content["links"]
    if "cost_ram" in nodes[0]:
        order = sorted(node["id"] for node in nodes)
        measured = {node["id"]: (node["cost_ram"], node["cost_cpu"]) for node in nodes}
        edges = {(link["source"], link["target"]) for link in links}
    else:
        order = content["graph"]["order"]
        measured = {node["name"]: (node["out_cost"], node["duration"]) for node in nodes}
        edges = {(link["0"], link["1"]) for link in links}
    position = {node: place for place, node in enumerate(order)}
    inputs: list[list[int]] = [[] for _ in order]
    for value, node in edges:
        if position[value] >= position[node]:
            raise ValueError(f"{path}: expected an order in which inputs come first, found {value} after {node}")
        inputs[position[node]].append(position[value])
    return RematGraph(
        path.stem,
        tuple(tuple(sorted(values)) for values in inputs),
        tuple(measured[node][0] for node in order),
        tuple(measured[node][1] for node in order),
    )
