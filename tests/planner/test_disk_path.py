"""Where the disk tier's file is made: where `apply` and `parallelize` are told, else where their cluster says."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.planner.fast_host import fast_host
from tests.runtime.decided import batch_split
from tests.runtime.test_disk_step import MIB, Deep, captured_deep, data, engines_of

import shardwright
from shardwright.ir import Budget, Cluster, Decisions, Disk, DiskError, Fate, Mesh, Plan, Prediction, StoredPlan, Tier
from shardwright.runtime.identity import identify


@pytest.fixture(scope="module")
def stored() -> StoredPlan:
    """Every relu on disk."""
    captured = captured_deep()
    graph = captured.graph
    relus = [n.name for n in graph.nodes if n.op == "aten.relu.default"]
    decisions = batch_split(graph, Mesh(("dp",), (1,)))
    decisions = replace(decisions, fates=dict.fromkeys(relus, Fate.OFFLOAD), tiers=dict.fromkeys(relus, Tier.DISK))
    return StoredPlan(plan_of(decisions), graph)


def plan_of(decisions: Decisions) -> Plan:
    return Plan(
        target="deep",
        identity=identify(captured_deep(), optimizer="sgd", seed=0, accumulate=1),
        cluster="cpu:1",
        budget=Budget(64 * MIB, MIB, 4 * MIB),
        decisions=decisions,
        prediction=Prediction(0.1, 0.1, MIB, MIB, MIB),
        certificate=None,
    )


def directory_of(net: Deep) -> Path:
    """After a step that is the plain one's."""
    plain = Deep()
    for model in (net, plain):
        model(data())["loss"].backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad)
    _, disk = engines_of(net)
    assert disk is not None and disk.file.peak_bytes > 0
    return disk.file.directory


def decorated(path: Path, **options: object) -> Deep:
    class Decorated(Deep):
        pass

    cls = shardwright.parallelize(budget="64MiB", host="1MiB", disk="4MiB", plan=path, **options)(Decorated)  # type: ignore[arg-type]
    return cls()


def with_disk(path: Path) -> Cluster:
    return replace(fast_host(1), disk=Disk(2**40, 1e9, 1e9, 1e-4, str(path)))


def test_apply_makes_it_where_it_is_told(stored: StoredPlan, tmp_path: Path) -> None:
    assert directory_of(shardwright.apply(Deep(), stored, (data(),), disk_path=tmp_path)) == tmp_path  # type: ignore[arg-type]
    with pytest.raises(DiskError, match="expected a directory for the disk tier at .*/nowhere"):
        shardwright.apply(Deep(), stored, (data(),), disk_path=tmp_path / "nowhere")


def test_parallelize_makes_it_where_it_is_told_or_its_cluster_says(stored: StoredPlan, tmp_path: Path) -> None:
    told, said = tmp_path / "told", tmp_path / "said"
    for folder in (told, said):
        folder.mkdir()
    stored.save(tmp_path / "net.plan")
    assert directory_of(decorated(tmp_path / "net.plan", cluster=with_disk(said))) == said
    assert directory_of(decorated(tmp_path / "net.plan", cluster=with_disk(said), disk_path=told)) == told
