"""From a solution of the program to decisions about names: representatives are unfolded over their layers."""

from collections.abc import Mapping, Sequence

from shardwright.ir import Decisions, Fate, Gather, Layout, Tier
from shardwright.planner.fates import FateChoice, State
from shardwright.planner.formulation import Formulation
from shardwright.planner.space import Choice, Space

__all__ = ["decode", "chosen"]


def chosen(formulation: Formulation, values: Sequence[float]) -> list[Choice]:
    """The choice of every unit."""
    found = []
    for unit, variables in zip(formulation.space.units, formulation.flows.choices, strict=True):
        shares = [values[variable] for variable in variables]
        found.append(unit.choices[shares.index(max(shares))])
    return found


def decode(formulation: Formulation, values: Sequence[float]) -> Decisions:
    """`values`: one per variable of the program."""
    space = formulation.space
    layouts, reads = _layouts(space, chosen(formulation, values))
    members = space.fold.members()
    fates, spilled = _fates(formulation, values, members)
    return Decisions(
        mesh=space.mesh,
        layouts=layouts,
        reads=reads,
        fates=fates,
        gathers={name: Gather.KEEP for name in _first(formulation.kept_gathers, values, members)},
        tiers={name: Tier.HOST for name in _first(formulation.host, values, members)}
        | dict.fromkeys(spilled, Tier.DISK),
    )


def _layouts(space: Space, choices: list[Choice]) -> tuple[dict[str, Layout], dict[str, tuple[Layout, ...]]]:
    by_value: dict[str, Layout] = {}
    by_node: dict[str, tuple[Layout, ...]] = {}
    for unit, choice in zip(space.units, choices, strict=True):
        by_value.update(zip(unit.values, choice.layouts, strict=True))
        by_node.update((node.name, reads) for node, reads in zip(unit.nodes, choice.node_reads, strict=True))
    layouts = {given.name: by_value[space.fold.key(given.name)] for given in space.graph.inputs}
    reads = {}
    for node in space.graph.nodes:
        layouts.update((result, by_value[space.fold.key(result)]) for result in node.results)
        reads[node.name] = by_node[space.fold.key(node.name)]
    return layouts, reads


def _first(counts: Mapping[str, int], values: Sequence[float], members: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The first layers of each, as many as the solution counts."""
    return [name for key, variable in counts.items() for name in members.get(key, (key,))[: round(values[variable])]]


def _fates(
    formulation: Formulation, values: Sequence[float], members: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, Fate], list[str]]:
    """Fates, and which of the offloaded go to disk. Recomputed layers first, then those on disk, then on the host, then
    kept, then dropped: chains never meet a dropped parent.

    The early layers wait longest for their backward: a copy has most time there, and the disk needs most.
    """
    fates: dict[str, Fate] = {}
    spilled: list[str] = []
    for storage, fate in formulation.fates.items():
        names = members.get(storage, (storage,))
        recomputed = _number(fate, State.RECOMPUTE, values)
        on_disk = recomputed + _number(fate, State.SPILL, values)
        offloaded = on_disk + _number(fate, State.OFFLOAD, values)
        fates.update(dict.fromkeys(names[:recomputed], Fate.RECOMPUTE))
        fates.update(dict.fromkeys(names[recomputed:offloaded], Fate.OFFLOAD))
        spilled.extend(names[recomputed:on_disk])
    return fates, spilled


def _number(fate: FateChoice, state: State, values: Sequence[float]) -> int:
    return round(values[fate.counts[state]]) if state in fate.counts else 0
