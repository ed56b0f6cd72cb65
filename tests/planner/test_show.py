"""What `show` says about a plan, on a hand-made Llama of 32 layers whose figures can be worked out by hand."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from shardwright.ir import (
    Decisions,
    Fate,
    Graph,
    Input,
    InputKind,
    Mesh,
    Node,
    Phase,
    Ref,
    Replicate,
    Shard,
    TensorType,
    Tier,
    format_size,
    load_cluster,
    parse_layout,
)
from shardwright.ir.plan import Plan
from shardwright.passes.analytical import AnalyticalPrices
from shardwright.planner.json_export import show_json
from shardwright.planner.module_classes import layer_runs, module_classes, saved_storages
from shardwright.planner.module_seconds import Spent
from shardwright.planner.rank_totals import rank_totals
from shardwright.planner.show import show_plan
from shardwright.planner.spending import Spending, plan_spending
from shardwright.planner.summary import plan_summary

RANKS, TOKENS, HIDDEN, WIDE, BF16 = 64, 8192, 4096, 14336, 2


def printed(renderable: RenderableType, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(renderable)
    return out.getvalue().splitlines()


def line_with(lines: list[str], start: str) -> str:
    (found,) = [line for line in lines if line.strip().startswith(start)]
    return found


def test_equal_layers_are_one_row(llama_plan: Plan, llama_graph: Graph) -> None:
    classes = {row.path: row for row in module_classes(llama_graph, llama_plan.decisions)}
    assert classes["model.layers.*.mlp.up_proj"].num_modules == 32
    assert sum(path.count("layers") for path in classes) == 10


def test_bytes_of_a_class_are_local_and_summed_over_its_layers(llama_plan: Plan, llama_graph: Graph) -> None:
    classes = {row.path: row for row in module_classes(llama_graph, llama_plan.decisions)}
    up = classes["model.layers.*.mlp.up_proj"]
    assert up.weight_bytes == 32 * WIDE * HIDDEN * BF16 // RANKS
    assert up.recomputed_bytes == 20 * TOKENS * WIDE * BF16 // RANKS
    assert up.kept_bytes == 12 * TOKENS * WIDE * BF16 // RANKS
    norm = classes["model.layers.*.input_layernorm"]
    assert norm.weight_bytes == 32 * HIDDEN * BF16  # whole on every rank
    assert norm.offloaded_bytes == 6 * TOKENS * HIDDEN * BF16 // RANKS


def test_fates_say_in_which_layers(llama_plan: Plan, llama_graph: Graph) -> None:
    lines = printed(show_plan(llama_plan, llama_graph))
    at = lines.index(line_with(lines, "self_attn"))
    assert "recomputed 0..19" in lines[at]
    assert "kept 20..31" in lines[at + 1]
    assert "offloaded 20..25" in line_with(lines, "input_layernorm")


def test_layers_that_are_placed_differently_are_told_apart(llama_plan: Plan, llama_graph: Graph) -> None:
    name = "model.layers.5.mlp.up_proj.weight"
    layouts = {**llama_plan.decisions.layouts, name: parse_layout("R, R")}
    changed = replace(llama_plan, decisions=replace(llama_plan.decisions, layouts=layouts))
    lines = printed(show_plan(changed, llama_graph), width=120)
    at = lines.index(line_with(lines, "up_proj"))
    assert "S(1), S(0) in 0..4, 6..31" in lines[at]
    assert "R, R in 5" in lines[at + 1]


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(llama_plan: Plan, llama_graph: Graph, width: int) -> None:
    spent = {node.module: Spent(1.5e-3, 1e-4) for node in llama_graph.nodes}
    lines = printed(show_plan(llama_plan, llama_graph, Spending(spent, "modelled")), width)
    assert max(map(len, lines)) <= width
    assert len(lines) < 70
    assert any(line.startswith("model.embed_tokens") for line in lines)


def test_prices_are_summed_over_a_class(llama_plan: Plan, llama_graph: Graph) -> None:
    spent = {f"model.layers.{number}.mlp.up_proj": Spent(1e-3, 5e-4) for number in range(32)}
    lines = printed(show_plan(llama_plan, llama_graph, Spending(spent, "modelled")))
    assert line_with(lines, "up_proj").split()[-2:] == ["32.0", "16.0"]


def test_spending_is_that_of_the_rank_graph_by_module(llama_plan: Plan) -> None:
    """One matmul over a split batch: its price at local shapes, and its weight's gather, under its module."""
    rows, width = 1024, 512
    types = {"x": TensorType("bf16", (rows, width)), "m.weight": TensorType("bf16", (width, width))}
    types |= {"m/mm": TensorType("bf16", (rows, width)), "grad": TensorType("bf16", (width, width))}
    forward = Node("aten.mm.default", (Ref("x"), Ref("m.weight")), (), ("m/mm",), module="m")
    backward = Node("aten.mm.default", (Ref("m.weight"), Ref("m/mm")), (), ("grad",), Phase.BACKWARD, "n")
    inputs = (Input("x", InputKind.INPUT), Input("m.weight", InputKind.PARAM))
    graph = Graph("g", inputs, (forward, backward), types, gradients={"m.weight": "grad"})
    split, whole = (Shard(0),), (Replicate(),)
    decisions = Decisions(
        mesh=Mesh(("dp",), (8,)),
        layouts={"x": split, "m/mm": split, "m.weight": split, "grad": whole},
        reads={"m/mm": (split, whole), "grad": (whole, whole)},
    )
    found = plan_spending(replace(llama_plan, cluster="h100x8", decisions=decisions), graph)
    prices = AnalyticalPrices(load_cluster("h100x8"))
    local = TensorType("bf16", (rows // 8, width))
    matmul_seconds = prices.op_seconds(forward, (local, types["m.weight"]), (local,))
    gather_seconds = prices.collective_seconds("all_gather", 2 * width * width, (8,), 0)
    assert found.source == "modelled"
    assert found.by_module["m"].compute_seconds == pytest.approx(matmul_seconds)
    assert found.by_module["m"].move_seconds == pytest.approx(gather_seconds)


def test_a_plan_that_cannot_be_priced_says_why(llama_plan: Plan, llama_graph: Graph) -> None:
    found = plan_spending(replace(llama_plan, cluster="gone.toml"), llama_graph)
    assert not found.by_module
    assert "gone.toml" in "".join(printed(show_plan(llama_plan, llama_graph, found), 300))


def test_a_glob_restricts_the_rows(llama_plan: Plan, llama_graph: Graph) -> None:
    lines = printed(show_plan(llama_plan, llama_graph, None, "model.layers.3.mlp*"))
    assert line_with(lines, "model.layers.3.mlp ")
    assert line_with(lines, "up_proj")
    assert not [line for line in lines if "embed_tokens" in line or "baseline" in line]


def test_saved_storages_are_what_backward_reads_of_forward(llama_graph: Graph) -> None:
    saved = saved_storages(llama_graph)
    assert "model.layers.0.mlp.up_proj/mm" in saved
    assert "model.layers.0.mlp.up_proj/t" not in saved  # a view of the weight
    assert "model.layers.0.mlp.up_proj.weight" not in saved
    assert "loss" not in saved


def test_totals_count_optimizer_state_where_it_lives(llama_plan: Plan, llama_graph: Graph) -> None:
    totals = rank_totals(llama_plan, llama_graph)
    embedding = 128256 * HIDDEN * BF16 // RANKS
    assert totals.state_host_bytes == 2 * embedding + 4  # two moments and AdamW's step count
    steps = 4 * (len(llama_graph.gradients) + 1)
    assert 2 * totals.weight_bytes <= totals.state_device_bytes + totals.state_host_bytes
    assert totals.state_device_bytes + totals.state_host_bytes <= 2 * totals.weight_bytes + 2 * steps
    assert totals.gradient_bytes == totals.weight_bytes


def test_every_saved_byte_has_one_fate(llama_plan: Plan, llama_graph: Graph) -> None:
    totals = rank_totals(llama_plan, llama_graph)
    rows = module_classes(llama_graph, llama_plan.decisions)
    assert totals.kept_bytes == sum(row.kept_bytes for row in rows)
    assert totals.offloaded_bytes == sum(row.offloaded_bytes for row in rows)
    assert totals.recomputed_bytes == sum(row.recomputed_bytes for row in rows)


def test_summary_says_mesh_budget_gap_decisions_and_baselines(llama_plan: Plan, llama_graph: Graph) -> None:
    lines = printed(plan_summary(llama_plan, llama_graph))
    assert len(lines) <= 27
    text = "\n".join(lines)
    for expected in (
        "(dp=8, tp=8)",
        "of 70GiB",
        "gap 0.5%",
        "S(0), S(1)",
        "recompute",
        "offload",
        "1.21x",
        "over budget",
    ):
        assert expected in text


def test_what_lies_on_disk_is_told_from_what_lies_on_the_host(llama_plan: Plan, llama_graph: Graph) -> None:
    """Of six layers' norms, two on disk: in totals, tables and JSON; nothing speaks of a disk where there is none."""
    moved = [f"model.layers.{number}.input_layernorm/mul" for number in (20, 21)]
    tiers = {**llama_plan.decisions.tiers, **dict.fromkeys(moved, Tier.DISK)}
    plan = replace(
        llama_plan,
        budget=replace(llama_plan.budget, disk_bytes=2**40),
        prediction=replace(llama_plan.prediction, disk_bytes=2**30),
        decisions=replace(llama_plan.decisions, tiers=tiers),
    )
    before, totals = rank_totals(llama_plan, llama_graph), rank_totals(plan, llama_graph)
    assert totals.spilled_bytes * 3 == before.offloaded_bytes == totals.spilled_bytes + totals.offloaded_bytes
    assert totals.state_host_bytes == before.state_host_bytes
    shown = "\n".join([*printed(plan_summary(plan, llama_graph), 200), *printed(show_plan(plan, llama_graph), 200)])
    size = format_size(totals.spilled_bytes)
    for expected in ("disk 1GiB of 1TiB", f"; {size} of it on disk", "one rank holds     device  host      disk"):
        assert re.search(re.sub(" +", r"\\s+", expected), shown), expected
    found = show_json(plan, llama_graph)
    where = {f"model.layers.{k}.input_layernorm/mul": "disk" if k < 22 else "host" for k in range(20, 26)}
    assert found["copies"] == where
    assert found["state"] == {"model.embed_tokens.weight": "host"}
    without = [*printed(plan_summary(llama_plan, llama_graph)), *printed(show_plan(llama_plan, llama_graph))]
    assert "disk" not in "\n".join(without)


def test_an_objective_far_from_replay_is_pointed_out(llama_plan: Plan, llama_graph: Graph) -> None:
    assert "differ by" not in "".join(printed(plan_summary(llama_plan, llama_graph)))
    slow = replace(llama_plan, prediction=replace(llama_plan.prediction, step_seconds=0.5))
    assert "objective and replay differ by 19.8%" in "".join(printed(plan_summary(slow, llama_graph), 140))


def test_json_has_what_the_tables_have(llama_plan: Plan, llama_graph: Graph) -> None:
    value = json.loads(json.dumps(show_json(llama_plan, llama_graph)))
    assert value["mesh"] == {"dp": 8, "tp": 8}
    assert value["prediction"]["step_seconds"] == 0.412
    assert value["fates"]["model.layers.0.mlp/mul"] == Fate.RECOMPUTE
    (up,) = [row for row in value["modules"] if row["path"] == "model.layers.*.mlp.up_proj"]
    assert up["fates"]["recompute"]["layers"] == list(range(20))
    assert value["rank_totals"]["kept_bytes"] > 0


def test_runs_of_layers() -> None:
    assert layer_runs([(3,), (0,), (1,), (2,), (7,)]) == "0..3, 7"
    assert layer_runs([(0, 1), (0, 2)]) == "2"
