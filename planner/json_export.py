"""A plan as JSON for scripts: an export only, never read back. Bytes and seconds are plain numbers."""

from dataclasses import asdict

from shardwright.ir import Fate, Graph, Tier, format_layout
from shardwright.ir.plan import Plan
from shardwright.planner.module_classes import ModuleClass, module_classes
from shardwright.planner.plan_header import objective_drift
from shardwright.planner.rank_totals import rank_totals
from shardwright.planner.spending import Spending

__all__ = ["Json", "class_json", "plan_json", "show_json"]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def plan_json(plan: Plan) -> dict[str, Json]:
    """The plan file's content; decisions by value name, without folding."""
    decisions, certificate = plan.decisions, plan.certificate
    identity: dict[str, Json] = {
        "graph": plan.identity.graph_hash,
        "mode": plan.identity.mode,
        "loss": plan.identity.loss,
        "optimizer": plan.identity.optimizer,
        "dtype": plan.identity.dtype,
        "seed": plan.identity.seed,
        "accumulate": plan.identity.accumulate,
        "clip": str(decisions.clip),
        "inputs": {spec.name: str(spec.type) for spec in plan.identity.inputs},
    }
    return {
        "target": plan.target,
        "identity": identity,
        "cluster": plan.cluster,
        "mesh": dict(zip(decisions.mesh.axes, decisions.mesh.sizes, strict=True)),
        "budget": _record(plan.budget),
        "prediction": _record(plan.prediction),
        "certificate": None
        if certificate is None
        else _record(certificate) | {"gap": certificate.gap, "replay_drift": objective_drift(plan)},
        "baselines": [_record(baseline) for baseline in plan.baselines],
        "versions": dict(plan.versions),
        "place": {name: format_layout(layout) for name, layout in decisions.layouts.items()},
        "fates": {name: str(fate) for name, fate in decisions.fates.items() if fate is not Fate.KEEP},
        "gathers": {name: str(gather) for name, gather in decisions.gathers.items()},
        "copies": {
            name: str(decisions.tiers.get(name, Tier.HOST))
            for name, fate in decisions.fates.items()
            if fate is Fate.OFFLOAD
        },
        "state": {name: str(tier) for name, tier in decisions.tiers.items() if name not in decisions.fates},
        "parameters": {name: str(tier) for name, tier in decisions.parameters.items()},
    }


def show_json(
    plan: Plan, graph: Graph, spending: Spending | None = None, module_glob: str | None = None
) -> dict[str, Json]:
    """What `show` prints: the plan, its module classes and the totals of one rank."""
    spent = spending.by_module if spending else None
    classes = module_classes(graph, plan.decisions, spent or None, module_glob)
    modules: list[Json] = [class_json(row) for row in classes]
    return plan_json(plan) | {
        "modules": modules,
        "prices": spending.source if spending else None,
        "rank_totals": _record(rank_totals(plan, graph)),
    }


def class_json(row: ModuleClass) -> dict[str, Json]:
    """One module class."""
    return {
        "path": row.path,
        "num_modules": row.num_modules,
        "weights": {
            weight.name: {layout: _layers(layers) for layout, layers in weight.layouts.items()}
            for weight in row.weights
        },
        "output": row.activation,
        "num_saved": row.num_saved,
        "fates": {str(f.fate): {"num_values": f.num_values, "layers": _layers(f.layers)} for f in row.fates},
        "weight_bytes": row.weight_bytes,
        "kept_bytes": row.kept_bytes,
        "offloaded_bytes": row.offloaded_bytes,
        "recomputed_bytes": row.recomputed_bytes,
        "spent": None if row.spent is None else _record(row.spent),
    }


def _layers(layers: tuple[tuple[int, ...], ...]) -> list[Json]:
    """Layer numbers: plain where a path has one number, lists where it has several."""
    return [layer[0] if len(layer) == 1 else list(layer) for layer in layers]


def _record(value: object) -> dict[str, Json]:
    """A flat dataclass of numbers and text."""
    return asdict(value)  # type: ignore[call-overload, no-any-return]
