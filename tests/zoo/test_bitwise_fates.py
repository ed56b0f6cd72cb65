"""Recomputing and offloading change no bit: the emitted program of any fates against that with everything kept."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from tests.zoo.drawn import drawn_decisions
from tests.zoo.planned import PlannedZoo
from tests.zoo.whole import Subject
from torch import Tensor

from shardwright.ir import Decisions, Fate, Graph, Mesh, Phase, Schedule
from shardwright.ir.ops import aliased_operand
from shardwright.passes.pipeline import rank_graph
from shardwright.planner.storages import Life, find_storages
from shardwright.runtime.copies import CpuCopies
from shardwright.runtime.emit import emit
from shardwright.runtime.host_pool import HostPool

ALONE = Mesh((), ())
CPU = torch.device("cpu")
FAR, NEAR = Schedule(room_bytes=2**40), Schedule(0, 0, 0, 0, 0)
"""Copies far apart from their waits, and side by side with them."""
MODELS = ("llama", "mixtral", "resnet", "t5", "vit")
"""Experts, batch norm with running statistics, relative positions shared by layers, convolutions."""
MORE = ("bert", "gpt_neox", "decoder", "gemma2", "opt", "qwen3")


def lives(graph: Graph) -> dict[str, Life]:
    """Storages of forward that may have any fate."""
    return {name: life for name, life in find_storages(graph, {}).forward.items() if not life.random}


def fates_of(graph: Graph, kind: str) -> dict[str, Fate]:
    names = list(lives(graph))
    if kind in ("recompute", "offload"):
        return dict.fromkeys(names, Fate(kind))
    if kind == "in turns":  # each recomputed storage stands on an offloaded one
        return {name: (Fate.RECOMPUTE, Fate.OFFLOAD)[number % 2] for number, name in enumerate(names)}
    chance = random.Random(kind)
    drawn = {name: chance.choice((Fate.KEEP, Fate.RECOMPUTE, Fate.RECOMPUTE, Fate.OFFLOAD)) for name in names}
    return {name: fate for name, fate in drawn.items() if fate is not Fate.KEEP}


def step(subject: Subject, decisions: Decisions, given: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Loss, new buffers and gradients of the emitted program, by name."""
    graph = rank_graph(subject.graph, decisions)
    engine = CpuCopies(CPU, HostPool(1 << 30))
    program = emit(graph, decisions.mesh, 0, {}, CPU, copies=engine)
    returned, saved = program.forward([given[name] for name in program.inputs])
    gradients = program.backward(saved, *(given[name] for name in program.tangents))
    engine.close()
    assert (engine.pool.peak_bytes > 0) == any(node.op == "tier.offload" for node in graph.nodes)
    yield from zip(program.returned, returned, strict=True)
    yield from zip(program.parameters, gradients, strict=True)


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.study) for name in MORE)])
def test_any_fates_give_the_bits_of_everything_kept(zoo: PlannedZoo, name: str) -> None:
    subject = zoo.subject(name)
    kept = replace(drawn_decisions(subject.graph, ALONE, zoo.rules, seed=0), fates={}, gathers={})
    expected = dict(step(subject, kept, subject.given))
    for kind, schedule in (("recompute", NEAR), ("offload", FAR), ("in turns", FAR), ("drawn", NEAR)):
        decisions = replace(kept, fates=fates_of(subject.graph, kind), schedule=schedule)
        found = dict(step(subject, decisions, subject.given))
        assert found.keys() == expected.keys()
        wrong = [key for key, value in found.items() if not torch.equal(value, expected[key])]
        assert not wrong, f"{kind}: {wrong}"


def test_the_fates_tried_have_chains_views_several_results_statistics_and_routing(zoo: PlannedZoo) -> None:
    """Else the test above would prove little."""
    seen: set[str] = set()
    for name in ("mixtral", "resnet"):
        graph = zoo.subject(name).graph
        fates, found = fates_of(graph, "in turns") | fates_of(graph, "recompute"), lives(graph)
        offloaded = {key for key, fate in fates_of(graph, "in turns").items() if fate is Fate.OFFLOAD}
        roots = find_storages(graph, {}).roots
        for node in graph.nodes:
            if node.phase is Phase.BACKWARD and any(roots.get(x, x) in offloaded - {x} for x in node.operands):
                seen.add("a view of what was offloaded")
            if node.phase is Phase.FORWARD and aliased_operand(node) is None and node.results[0] in fates:
                seen.add("several results" if len(node.results) > 1 else "one result")
                seen.add("routing" if "topk" in node.op or "sort" in node.op else "")
        if set(graph.updates.values()) & {name for name in graph.types if roots.get(name) in fates}:
            seen.add("running statistics")
        if any(len(_chain(key, found)) > 5 for key in found):
            seen.add("a chain")
    assert seen >= {"a view of what was offloaded", "several results", "running statistics", "routing", "a chain"}


def _chain(name: str, found: Mapping[str, Life]) -> list[str]:
    """Storages that must be made again one after the other where none is kept."""
    parents = [parent for parent in found[name].parents if parent in found]
    return [name, *max((_chain(parent, found) for parent in parents[:1]), key=len, default=[])]
