"""From a solution of the program to decisions about names: representatives are unfolded over their layers."""

from collections.abc import Mapping, Sequence

from shardwright.ir import Decisions, Fate, Gather, Layout, Tier
from shardwright.planner.fates import AGAIN, FATES, FateChoice, State
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


def decode(formulation: Formulation, values: Sequence[float], *, copies_first: bool = False) -> Decisions:
    """`values`: one per variable of the program, which says in how many layers a storage has a fate; in which is said
    here.

    Recomputed layers are the first, then those moved to disk, to the host, kept and dropped: so nothing is recomputed
    from what was dropped. With `copies_first` the dropped are the first and the recomputed the last: copies then have
    the time of all layers behind them, and where a layer reads the one before, one dropped may have to be kept.
    """
    space = formulation.space
    layouts, reads = _layouts(space, chosen(formulation, values))
    members = space.fold.members()
    fates, spilled = _fates(formulation, values, members, copies_first)
    return Decisions(
        mesh=space.mesh,
        layouts=layouts,
        reads=reads,
        fates=fates,
        gathers={name: Gather.KEEP for name in _first(formulation.kept_copies, values, members)},
        tiers={name: Tier.HOST for name in _first(formulation.host, values, members)}
        | dict.fromkeys(spilled, Tier.DISK),
        parameters={name: Tier.HOST for name in _first(formulation.host_parameters, values, members)},
        clip=formulation.machine.clip,
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
    formulation: Formulation, values: Sequence[float], members: Mapping[str, tuple[str, ...]], copies_first: bool
) -> tuple[dict[str, Fate], list[str]]:
    """Fates, and which of the offloaded go to disk: those that wait longest for their backward."""
    fates: dict[str, Fate] = {}
    spilled: list[str] = []
    order = (State.RECOMPUTE, State.SPILL, State.OFFLOAD, State.KEEP, State.DROP)
    if copies_first:
        order = (State.DROP, State.SPILL, State.OFFLOAD, State.KEEP, State.RECOMPUTE)
    for storage, fate in formulation.fates.items():
        names = members.get(storage, (storage,))
        for state in order:
            number = _number(fate, state, values)
            fates.update(dict.fromkeys(names[:number], FATES[state]) if state in AGAIN else {})
            spilled.extend(names[:number] if state is State.SPILL else ())
            names = names[number:]
    return fates, spilled


def _number(fate: FateChoice, state: State, values: Sequence[float]) -> int:
    return round(values[fate.counts[state]]) if state in fate.counts else 0
