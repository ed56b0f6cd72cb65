"""Plan to text. `plan_parse` is the inverse; the text of one plan is always the same, byte for byte.

A header, then one line per decision, folded over layers by globs; layouts that `plan_defaults` derives are left out.
Numbers are exact; the remark after `#` gives them rounded, for people.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Final, TypeVar

from shardwright.ir.decisions import Clip, Decisions, Fate, Schedule, Tier
from shardwright.ir.errors import PlanError
from shardwright.ir.globs import NameIndex, fold_names
from shardwright.ir.graph import Graph, InputKind, Phase
from shardwright.ir.names import closest, quote
from shardwright.ir.ops import is_view
from shardwright.ir.placements import Layout, format_layout, replicated
from shardwright.ir.plan import FORMAT_VERSION, Baseline, Certificate, Plan, Prediction
from shardwright.ir.plan_defaults import default_layout, default_reads
from shardwright.ir.units import exact_percent, exact_seconds, exact_size, format_seconds, format_size

__all__ = ["ABSENT", "COPY_TIERS", "RESIDENT_TIERS", "SCHEDULE_FIELDS", "PlanNames", "print_plan"]

ABSENT: Final = "none"
"""Stands where a value has no layout or a node no reads: plans of a part of the graph."""

COPY_TIERS: Final = (Tier.HOST, Tier.DISK)
"""Where the copy of an offloaded storage may lie; the first where nothing is decided."""
RESIDENT_TIERS: Final = (Tier.DEVICE, Tier.HOST)
"""Where a parameter and its optimizer state may live."""

SCHEDULE_FIELDS: Final = tuple((field.name.removesuffix("_bytes"), field.name) for field in fields(Schedule))
"""Word in the text and attribute, all sizes."""

_T = TypeVar("_T")
_WORD: Final = re.compile(r"[A-Za-z0-9_.:/+~@*-]+")
_KEY_WIDTH: Final = 9
_NAME_WIDTH: Final = 44


class PlanNames:
    """Which names of a graph each kind of decision is about."""

    def __init__(self, graph: Graph) -> None:
        results = [result for node in graph.nodes for result in node.results]
        self.values = NameIndex((*(given.name for given in graph.inputs), *results))
        self.nodes = NameIndex(node.name for node in graph.nodes if node.results)
        forward = (node for node in graph.nodes if node.phase is Phase.FORWARD and not is_view(node.op))
        self.storages = NameIndex(result for node in forward for result in node.results)
        weights = graph.inputs_of(InputKind.PARAM, InputKind.FROZEN)
        self.copied = NameIndex((*weights, *(r for n in graph.nodes if n.phase is Phase.FORWARD for r in n.results)))
        self.params = NameIndex(graph.inputs_of(InputKind.PARAM))
        self.weights = NameIndex(weights)


def print_plan(plan: Plan, graph: Graph) -> str:
    """The text of a plan for `graph`. Raises PlanError for decisions about what the graph does not have."""
    names, decisions = PlanNames(graph), plan.decisions
    blocks = [
        _header(plan),
        _layout_lines(decisions, graph, names),
        _read_lines(decisions, graph, names),
        _fate_lines(decisions, names),
        _map_lines("gather", decisions.gathers, names.copied, lambda gather: gather.value),
        [*_state_lines(decisions, names), *_parameter_lines(decisions, names)],
        [_prediction(plan.prediction), *_certificate(plan.certificate), *map(_baseline, plan.baselines)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n\nend\n"


def _line(key: str, *parts: str) -> str:
    return f"{key:<{_KEY_WIDTH}} {'  '.join(part for part in parts if part)}".rstrip()


def _word(text: str) -> str:
    return text if _WORD.fullmatch(text) else quote(text)


def _fields(**fields: str) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items())


def _header(plan: Plan) -> list[str]:
    identity, budget = plan.identity, plan.budget
    what = _fields(
        mode=_word(identity.mode),
        loss=_word(identity.loss),
        optimizer=_word(identity.optimizer),
        dtype=_word(identity.dtype),
        seed=str(identity.seed),
        accumulate=str(identity.accumulate),
        **({"clip": plan.decisions.clip.value} if plan.decisions.clip is not Clip.UNKNOWN else {}),
    )
    size = _fields(**_tier_sizes(budget.device_bytes, budget.host_bytes, budget.disk_bytes))
    schedule = _fields(**{field: exact_size(getattr(plan.decisions.schedule, name)) for field, name in SCHEDULE_FIELDS})
    mesh = ", ".join(
        f"{_word(a)}={n}" for a, n in zip(plan.decisions.mesh.axes, plan.decisions.mesh.sizes, strict=True)
    )
    return [
        f"plan {FORMAT_VERSION}",
        _line("target", quote(plan.target), ", ".join(f"{_word(name)} {_word(v)}" for name, v in plan.versions)),
        _line("graph", _word(identity.graph_hash), what),
        _line("inputs", ", ".join(f"{_word(spec.name)} {spec.type}" for spec in identity.inputs)),
        _line("cluster", quote(plan.cluster), f"mesh ({mesh})"),
        _line("budget", size),
        _line("schedule", schedule),
    ]


def _tier_sizes(device_bytes: int, host_bytes: int, disk_bytes: int) -> dict[str, str]:
    """A disk is named where there is one: plans without are those of before there were any."""
    sizes = {"device": exact_size(device_bytes), "host": exact_size(host_bytes)}
    return sizes | {"disk": exact_size(disk_bytes)} if disk_bytes else sizes


def _prediction(found: Prediction) -> str:
    step = f"{exact_seconds(found.step_seconds)} ±{exact_percent(found.error_fraction)}"
    sizes = (found.device_bytes, found.host_bytes, found.disk_bytes)
    exact = _fields(step=step, **_tier_sizes(*sizes))
    rounded = ", ".join(format_size(size) for size in (sizes if found.disk_bytes else sizes[:2]))
    return _line("predict", exact, f"# {format_seconds(found.step_seconds)}, {rounded}")


def _certificate(found: Certificate | None) -> list[str]:
    if found is None:
        return []
    exact = _fields(
        objective=exact_seconds(found.objective_seconds),
        bound=exact_seconds(found.bound_seconds),
        space=quote(found.space),
        engine=_word(found.engine),
    )
    return [_line("certify", exact + (", interrupted" if found.interrupted else ""), f"# gap {found.gap:.2%}")]


def _baseline(found: Baseline) -> str:
    seconds = "n/a" if found.step_seconds is None else exact_seconds(found.step_seconds)
    size = "n/a" if found.device_bytes is None else exact_size(found.device_bytes)
    rounded = [
        *([] if found.step_seconds is None else [format_seconds(found.step_seconds)]),
        *([] if found.device_bytes is None else [format_size(found.device_bytes)]),
    ]
    remark = f"# {', '.join(rounded)}" if rounded else ""
    return _line("baseline", f"{_word(found.name):<20}", seconds, size, quote(found.note) if found.note else "", remark)


def _layout_lines(decisions: Decisions, graph: Graph, names: PlanNames) -> list[str]:
    mesh, layouts = decisions.mesh, decisions.layouts
    _check_known("place", layouts, names.values)
    whole = replicated(mesh)
    explicit = {given.name: layouts.get(given.name) for given in graph.inputs if layouts.get(given.name) != whole}
    for node in graph.nodes:
        for result in node.results:
            if layouts.get(result) != default_layout(graph, node, result, decisions.reads.get(node.name), mesh):
                explicit[result] = layouts.get(result)
    return _decision_lines("place", explicit, names.values, layouts.get, _layout)


def _read_lines(decisions: Decisions, graph: Graph, names: PlanNames) -> list[str]:
    reads = decisions.reads
    _check_known("read", reads, names.nodes)
    explicit: dict[str, tuple[Layout, ...] | None] = {}
    for node in graph.nodes:
        found = reads.get(node.name)
        if found is not None and len(found) != len(node.operands):
            raise PlanError(
                f"expected a layout for each of the {len(node.operands)} operands of {node.name!r}, found {len(found)}"
            )
        if node.results and found != default_reads(node, decisions.layouts, decisions.mesh):
            explicit[node.name] = found
    return _decision_lines("read", explicit, names.nodes, reads.get, _layouts)


def _fate_lines(decisions: Decisions, names: PlanNames) -> list[str]:
    _check_known("keep, recompute and offload", decisions.fates, names.storages)
    lines: list[str] = []
    for fate in Fate:
        chosen = {name: _copy_tier(decisions, name) for name, found in decisions.fates.items() if found is fate}
        lines += _decision_lines(fate.value, chosen, names.storages, chosen.get, str)
    return lines


def _copy_tier(decisions: Decisions, name: str) -> str:
    """What follows the name of an offloaded storage; nothing for other fates."""
    tier = decisions.tiers.get(name)
    if decisions.fates[name] is not Fate.OFFLOAD and tier is None:
        return ""
    if decisions.fates[name] is not Fate.OFFLOAD or tier not in (None, *COPY_TIERS):
        raise PlanError(f"expected a tier of {name!r} only where it is offloaded, to host or disk, found {tier}")
    return (tier or COPY_TIERS[0]).value


def _state_lines(decisions: Decisions, names: PlanNames) -> list[str]:
    states = {name: tier for name, tier in decisions.tiers.items() if name not in decisions.fates}
    return _resident_lines("state", "optimizer state of ", states, names.params)


def _parameter_lines(decisions: Decisions, names: PlanNames) -> list[str]:
    return _resident_lines("parameter", "", decisions.parameters, names.weights)


def _resident_lines(key: str, what: str, tiers: Mapping[str, Tier], index: NameIndex) -> list[str]:
    away = next((name for name, tier in tiers.items() if tier not in RESIDENT_TIERS), None)
    if away is not None:
        raise PlanError(f"expected {what}{away!r} on device or host, found {tiers[away].value}")
    return _map_lines(key, tiers, index, lambda tier: tier.value)


def _map_lines(key: str, decided: Mapping[str, _T], index: NameIndex, write: Callable[[_T], str]) -> list[str]:
    _check_known(key, decided, index)
    return _decision_lines(key, decided, index, decided.get, write)


def _decision_lines(
    key: str,
    explicit: Mapping[str, _T],
    index: NameIndex,
    decided: Callable[[str], object],
    write: Callable[[_T], str],
) -> list[str]:
    folded = fold_names(explicit, index, lambda name, decision: decided(name) == decision)
    return [_line(key, f"{name:<{_NAME_WIDTH}}", write(decision)) for name, decision in folded]


def _layout(layout: Layout | None) -> str:
    return ABSENT if layout is None else format_layout(layout)


def _layouts(layouts: tuple[Layout, ...] | None) -> str:
    return ABSENT if layouts is None else " ".join(f"[{format_layout(layout)}]" for layout in layouts)


def _check_known(key: str, names: Iterable[str], index: NameIndex) -> None:
    unknown = next((name for name in names if name not in index.positions), None)
    if unknown is not None:
        raise PlanError(
            f"expected {key} decisions about names that the graph has for them, found {unknown!r}"
            f"{closest(unknown, index.positions)}"
        )
