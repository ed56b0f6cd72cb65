"""A curve as JSON for scripts: an export only, never read back. Bytes and seconds are plain numbers."""

from dataclasses import asdict
from pathlib import Path

from shardwright.planner.curve import Curve, Point, Rival
from shardwright.planner.curve_files import Written
from shardwright.planner.json_export import Json

__all__ = ["curve_json"]


def curve_json(curve: Curve, written: Written) -> dict[str, Json]:
    """Points from the largest budget down, baselines, and where each way to save memory begins."""
    plan = curve.points[0].plan
    files: list[Path | None] = [*written.plans] or [None] * len(curve.points)
    return {
        "target": plan.target,
        "cluster": plan.cluster,
        "inputs": {spec.name: str(spec.type) for spec in plan.identity.inputs},
        "optimizer": plan.identity.optimizer,
        "dtype": plan.identity.dtype,
        "host_bytes": plan.budget.host_bytes,
        "disk_bytes": plan.budget.disk_bytes,
        "smallest_bytes": curve.smallest_bytes,
        "points": [_point(curve, point, path) for point, path in zip(curve.points, files, strict=True)],
        "baselines": [_rival(rival) for rival in curve.rivals],
        "begins": {begin.what: begin.point.budget.device_bytes for begin in curve.begins},
        "picture": None if written.picture is None else str(written.picture),
    }


def _point(curve: Curve, point: Point, path: Path | None) -> dict[str, Json]:
    plan, mesh = point.plan, point.plan.decisions.mesh
    costs: dict[str, Json] = asdict(point.costs)
    return {
        "budget_bytes": point.budget.device_bytes,
        "peak_bytes": point.peak_bytes,
        "host_peak_bytes": plan.prediction.host_bytes,
        "disk_peak_bytes": plan.prediction.disk_bytes,
        "step_seconds": point.step_seconds,
        "of_fastest": point.step_seconds / curve.fastest_seconds,
        "gap": point.gap,
        "interrupted": point.is_cut,
        "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)),
        "costs": costs,
        "file": None if path is None else str(path),
    }


def _rival(rival: Rival) -> dict[str, Json]:
    record: dict[str, Json] = asdict(rival)
    return record | {"dominated": rival.is_dominated, "beaten": rival.is_beaten}
