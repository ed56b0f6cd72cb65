"""What a user pins and forbids holds in the plan; what cannot be is refused with the reason."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.zoo.models import decoder

from shardwright.ir import Cluster, Fate, PlanError, TextError, format_layout, load_cluster
from shardwright.planner.api import PlanResult, plan


def machines() -> Cluster:
    preset = load_cluster("h100x8")
    device = replace(preset.device, launch_seconds=0.0, flops_per_second={"f32": 1e9, "bf16": 1e9})
    return replace(preset, ranks_per_node=2, device=device)


def planned(tmp_path: Path, rules: str) -> PlanResult:
    path = tmp_path / "rules"
    path.write_text(rules)
    module, args, kwargs = decoder()
    return plan(module, args, kwargs, cluster=machines(), budget="1GiB", rules=path, time_limit=10, gap=0.05)


def test_a_pinned_layout_and_fate_hold_in_every_layer(tmp_path: Path) -> None:
    found = planned(tmp_path, "pin place layers.*.up.weight S(0)\npin recompute layers.*/gelu\n").plan.decisions
    up = [name for name in found.layouts if name.startswith("layers.") and name.endswith(".up.weight")]
    assert len(up) > 1 and {format_layout(found.layouts[name]) for name in up} == {"S(0)"}
    gelu = [name for name, fate in found.fates.items() if name.endswith("/gelu") and fate is Fate.RECOMPUTE]
    assert len(gelu) == len(up)


def test_a_forbidden_fate_does_not_occur(tmp_path: Path) -> None:
    found = planned(tmp_path, "forbid recompute *\n").plan.decisions
    assert Fate.RECOMPUTE not in found.fates.values()


def test_axes_that_leave_no_mesh_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected `allow axes` to leave a mesh, found pp"):
        planned(tmp_path, "allow axes pp\n")


def test_a_layout_that_no_rule_offers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="to leave a layout for layers.0.up.weight on mesh"):
        planned(tmp_path, "pin place layers.*.up.weight T(0, 3)\n")


def test_a_rule_about_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises((PlanError, TextError), match="nothing.*"):
        planned(tmp_path, "pin place nothing.* R\n")


def test_a_pin_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    """Without host memory nothing can be offloaded."""
    with pytest.raises(PlanError, match="host memory for `pin offload layers.0/gelu` at .*rules:1, found none"):
        planned(tmp_path, "pin offload layers.0/gelu\n")
