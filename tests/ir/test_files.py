"""Plans on disk: two files beside each other, matched by hash, written at once, bounded in size."""

from pathlib import Path

import pytest

from shardwright.ir import (
    Budget,
    Decisions,
    Graph,
    Identity,
    Mesh,
    Plan,
    PlanError,
    Prediction,
    StalePlanError,
    TextError,
    files,
    graph_hash,
    load_graph,
    load_plan,
    replicated,
    save_graph,
    save_plan,
)


@pytest.fixture
def plan(deep: Graph) -> Plan:
    mesh = Mesh(("dp",), (2,))
    layouts = dict.fromkeys(deep.types, replicated(mesh))
    reads = {node.name: (replicated(mesh),) * len(node.operands) for node in deep.nodes}
    return Plan(
        "net.py:build",
        Identity(graph_hash(deep), "train", ".loss", "adamw", "float32", 0, 1, ()),
        "cpu:2",
        Budget(2**30, 0),
        Decisions(mesh, layouts, reads),
        Prediction(0.1, 0.05, 2**20, 0),
        None,
    )


def test_a_plan_comes_back_with_its_graph(plan: Plan, deep: Graph, tmp_path: Path) -> None:
    save_plan(tmp_path / "net.plan", plan, deep)
    assert load_plan(tmp_path / "net.plan") == (plan, deep)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.graph", "net.plan"]


def test_a_plan_without_its_graph_says_where_it_should_be(plan: Plan, deep: Graph, tmp_path: Path) -> None:
    save_plan(tmp_path / "net.plan", plan, deep)
    (tmp_path / "net.graph").unlink()
    with pytest.raises(PlanError, match=r"beside it, found no '.*net.graph'"):
        load_plan(tmp_path / "net.plan")


def test_a_plan_beside_another_graph_is_stale(plan: Plan, deep: Graph, tmp_path: Path) -> None:
    save_plan(tmp_path / "net.plan", plan, deep)
    save_graph(tmp_path / "net.graph", Graph("Other", deep.inputs, deep.nodes, deep.types))
    with pytest.raises(StalePlanError, match=r"expected .*net.graph.* found sha256:"):
        load_plan(tmp_path / "net.plan")


def test_a_graph_written_in_another_way_is_the_same_graph(plan: Plan, deep: Graph, tmp_path: Path) -> None:
    save_plan(tmp_path / "net.plan", plan, deep)
    beside = tmp_path / "net.graph"
    beside.write_text("# a remark\n" + beside.read_text().replace("  ", " "))
    assert load_plan(tmp_path / "net.plan")[1] == deep


def test_a_plan_of_another_graph_is_not_written(plan: Plan, deep: Graph, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="expected a plan for graph sha256"):
        save_plan(tmp_path / "net.plan", plan, Graph("Other", deep.inputs, deep.nodes, deep.types))
    assert not list(tmp_path.iterdir())


def test_missing_large_and_binary_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="expected a plan file, found none"):
        load_plan(tmp_path / "net.plan")
    with pytest.raises(PlanError, match="found the graph file"):
        load_plan(tmp_path / "net.graph")
    binary = tmp_path / "net.plan"
    binary.write_bytes(b"plan 1\n\xff")
    with pytest.raises(TextError, match="expected text in UTF-8 .* at byte 7"):
        load_plan(binary)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 4)
    with pytest.raises(PlanError, match="expected a plan file of at most 4 bytes"):
        load_plan(binary)


def test_a_graph_that_breaks_a_rule_is_not_loaded(tmp_path: Path) -> None:
    path = tmp_path / "net.graph"
    path.write_text('graph "G" { forward { %y: f32[2] = aten.neg.default(%x) } }')
    with pytest.raises(Exception, match="found 'x', which nothing makes"):
        load_graph(path)


def test_writing_where_one_cannot_leaves_nothing_behind(plan: Plan, deep: Graph, tmp_path: Path) -> None:
    blocked = tmp_path / "net.graph"
    blocked.mkdir()
    with pytest.raises(PlanError, match="expected to write"):
        save_plan(tmp_path / "net.plan", plan, deep)
    assert [path.name for path in tmp_path.iterdir()] == ["net.graph"]
