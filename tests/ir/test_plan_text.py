"""Plan text: prints and parses back exactly, folds over layers, and refuses with the line and a caret."""

import contextlib
import dataclasses
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.ir import (
    Baseline,
    Budget,
    Certificate,
    Clip,
    Decisions,
    Fate,
    Gather,
    Graph,
    Identity,
    InputSpec,
    Layout,
    Mesh,
    Partial,
    Plan,
    PlanError,
    Prediction,
    Replicate,
    Shard,
    TensorType,
    TextError,
    Tier,
    graph_hash,
    parse_plan,
    print_plan,
)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LIMITS = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@LIMITS
@given(data=st.data())
def test_any_plan_survives_print_and_parse(plans: st.SearchStrategy[tuple[Plan, Graph]], data: st.DataObject) -> None:
    """Also plans of a part of the graph, and with decisions that say what is so anyway."""
    plan, graph = data.draw(plans)
    text = print_plan(plan, graph)
    again = parse_plan(text, graph)
    assert again == plan
    assert print_plan(again, graph) == text


@LIMITS
@given(at=st.integers(0, 1500), cut=st.integers(0, 4), put=st.text('*{}()[]"\\\\.,:=#i1- \n\0±%', max_size=3))
def test_a_spoiled_plan_is_read_or_refused_but_never_fails_otherwise(deep: Graph, at: int, cut: int, put: str) -> None:
    text = print_plan(_plan(deep), deep)
    with contextlib.suppress(TextError):
        parse_plan(text[:at] + put + text[at + cut :], deep)


def _plan(graph: Graph) -> Plan:
    """Batch over dp, up by columns and down by rows over tp in all layers; fates differ by layer."""
    layouts: dict[str, Layout] = {"x": (S0, R)}
    reads: dict[str, tuple[Layout, ...]] = {}
    for given_ in graph.inputs[1:]:
        layouts[given_.name] = (S0, S1) if ".up." in given_.name else (R, S0)
    for node in graph.nodes:
        name = node.name
        if name.endswith("up/mm"):
            reads[name], layouts[name] = ((S0, R), (R, S1)), (S0, S1)
        elif name.endswith("down/mm"):
            reads[name], layouts[name] = ((S0, S1), (R, S0)), (S0, Partial())
        elif name.endswith("/add"):
            reads[name], layouts[name] = ((S0, R), (S0, R)), (S0, R)
        elif name.endswith("silu"):
            reads[name], layouts[name] = ((S0, S1),), (S0, S1)
        else:
            reads[name], layouts[name] = ((R, R),) * len(node.operands), (R, R)
    params = [i.name for i in graph.inputs[1:]]
    decisions = Decisions(
        Mesh(("dp", "tp"), (2, 2)),
        layouts,
        reads,
        {f"net.layers.{k}.act/silu": Fate.RECOMPUTE if k < 4 else Fate.OFFLOAD for k in range(6)},
        {name: Gather.KEEP for name in params if ".up." in name},
        dict.fromkeys(params, Tier.HOST),
        {name: Tier.HOST for name in params if ".down." in name},
    )
    return Plan(
        target="train.py:build",
        identity=Identity(
            graph_hash(graph), "train", ".loss", "adamw", "float32", 0, 1, (InputSpec("x", TensorType("f32", (4, 4))),)
        ),
        cluster="cpu:4",
        budget=Budget(900 * 2**20, 4 * 2**30),
        decisions=decisions,
        prediction=Prediction(0.412, 0.06, 913_305_601, 0),
        certificate=Certificate(0.401, 0.399, "1,204 choices over 3 meshes", "highs"),
        baselines=(Baseline("ddp", 0.455, 1_406_599_168, "over budget"), Baseline("fsdp", None, None, "no split")),
        versions=(("python", "3.11"), ("torch", "2.13.0")),
    )


def test_a_plan_reads_as_designed(deep: Graph) -> None:
    text = re.sub(r"sha256:\w+", "sha256:9f1c", print_plan(_plan(deep), deep))
    assert re.sub(r" {2,}", "  ", text) == GOLDEN


def test_what_is_declared_about_gradients_stands_with_the_identity(deep: Graph) -> None:
    """Nothing where nothing is declared; read back; anything else is an error with its place."""
    plan = _plan(deep)
    declared = dataclasses.replace(plan, decisions=dataclasses.replace(plan.decisions, clip=Clip.NONE))
    text = print_plan(declared, deep)
    assert "accumulate 1, clip none\n" in text
    assert parse_plan(text, deep) == declared
    with pytest.raises(TextError, match="expected one of unknown, none, found 'norm'"):
        parse_plan(text.replace("clip none", "clip norm"), deep)


GOLDEN = """\
plan 1
target  "train.py:build"  python 3.11, torch 2.13.0
graph  sha256:9f1c  mode train, loss .loss, optimizer adamw, dtype float32, seed 0, accumulate 1
inputs  x f32[4, 4]
cluster  "cpu:4"  mesh (dp=2, tp=2)
budget  device 900MiB, host 4GiB
schedule  bucket 25MiB, gather_bucket 1MiB, gather 64MiB, reduce 64MiB, room 0B

place  x  S(0), R
place  net.layers.*.up.weight  S(0), S(1)
place  net.layers.*.down.weight  R, S(0)
place  net.layers.*.up/mm  S(0), S(1)
place  net.layers.*.down/mm  S(0), P(sum)

read  net.layers.*.up/mm  [S(0), R] [R, S(1)]
read  net.layers.*/add  [S(0), R] [S(0), R]
read  grad(net.layers.5/add)  [R, R]
read  grad(net.layers.*.down.weight)  [R, R] [R, R]
read  grad(net.layers.*.up.weight)  [R, R] [R, R]

recompute net.layers.{0..3}.act/silu
offload  net.layers.{4..5}.act/silu  host

gather  net.layers.*.up.weight  keep

state  net.layers.*.up.weight  host
state  net.layers.*.down.weight  host
parameter net.layers.*.down.weight  host

predict  step 412ms ±6%, device 913305601B, host 0B  # 412ms, 871MiB, 0B
certify  objective 401ms, bound 399ms, space "1,204 choices over 3 meshes", engine highs  # gap 0.50%
baseline  ddp  455ms  1406599168B  "over budget"  # 455ms, 1.31GiB
baseline  fsdp  n/a  n/a  "no split"

end
"""


def test_a_line_edited_by_hand_changes_what_it_names(deep: Graph) -> None:
    text = print_plan(_plan(deep), deep)
    edited = text.replace("recompute net.layers.{0..3}", "recompute net.layers.{0..1}")
    found = parse_plan(edited, deep).decisions.fates
    assert set(found) == {f"net.layers.{k}.act/silu" for k in (0, 1, 4, 5)}


def test_comments_blank_lines_and_windows_line_ends_say_nothing(deep: Graph) -> None:
    plan = _plan(deep)
    text = "# mine\n\n" + print_plan(plan, deep).replace("\n\n", "\n# so\n")
    assert parse_plan(text, deep) == plan
    assert parse_plan(text.replace("\n", "\r\n"), deep) == plan


EDITS = {
    "another format": ("plan 1", "plan 2", "this shardwright reads plan 1, the file is plan 2", "2"),
    "no format": ("plan 1", "plan x", "expected the format's number, 1", "x"),
    "not a plan": ("plan 1\n", "", "expected a plan, which starts with 'plan 1'", "target"),
    "cut off": ("\nend\n", "\n", "expected the last line 'end', found none: the file is cut off", ""),
    "unknown key": ("offload   ", "ofload    ", "found 'ofload' (did you mean 'offload'?)", "ofload"),
    "missing line": ("budget    device 900MiB, host 4GiB\n", "", "expected a 'budget' line", "end"),
    "second line": ("plan 1\n", "plan 1\nbudget device 1GiB, host 0B\n", "expected one 'budget' line", "budget"),
    "unknown name": ("place     x ", "place     y ", "expected a name of the graph", "y "),
    "near name": ("*.up/mm", "7.up/mm", "did you mean 'net.layers.", "net.layers.7"),
    "recomputed input": ("net.layers.{0..3}.act/silu", "x", "expected a name of the graph that this line can", "x"),
    "wrong placement": ("S(0), P(sum)", "S(0), Q", "expected a placement", "S(0), Q"),
    "axes": ("S(0), P(sum)", "S(0)", "expected a placement for each axis of mesh (dp=2, tp=2), found 1", "S(0)"),
    "uneven": ("S(0), P(sum)", "S(2), R", "splits 'net.layers.0.down/mm': f32[4, 4] evenly over mesh", "S(2), R"),
    "operands": ("[S(0), R] [R, S(1)]", "[S(0), R]", "each of the 2 operands of 'net.layers.0.up/mm', found 1", "[S"),
    "no brackets": ("[S(0), R] [R, S(1)]", "S(0), R", "expected layouts such as [S(0), R] [R, R]", "S(0), R"),
    "tier": ("  keep", "  disk", "expected again or keep, found 'disk'", "disk"),
    "no unit": ("device 900MiB", "device 900", "expected a size with a unit, found '900' without one", "900,"),
    "mesh": ("tp=2", "tp=0", "expected a whole number of 1 or more, found '0'", "0)"),
    "type": ("x f32[4, 4]", "x f9[4, 4]", "expected a dtype of", "f9[4, 4]"),
    "glob": ("{0..3}", "{0..x}", "expected numbers in braces", "net.layers.{0..x}"),
    "more": ("host 4GiB", "host 4GiB, desk 1GiB", "expected 'disk', found 'desk'", "desk"),
    "copy on the device": (f"silu{' ' * 20}host", "silu  device", "expected host or disk, found", "device"),
    "parameter on disk": (
        "parameter net.layers.*.",
        "parameter net.layers.0.up.weight disk #",
        "device or host",
        "disk",
    ),
    "state on disk": (f".down.weight{' ' * 22}host", ".down.weight  disk", "expected device or host, found", "disk"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_cannot_be_read_is_shown_with_a_caret(edit: str, deep: Graph) -> None:
    old, new, message, at = EDITS[edit]
    text = print_plan(_plan(deep), deep)
    assert old in text
    with pytest.raises(TextError) as error:
        parse_plan(text.replace(old, new, 1), deep, "net.plan")
    first, place, line, caret = str(error.value).split("\n")
    assert message in first
    assert place.startswith("  at net.plan:")
    assert line[caret.index("^") :].startswith(at)


@pytest.mark.parametrize(
    "line",
    [
        "recompute net.layers.5.act/silu",
        "keep *.act/silu",
        "place net.layers.*.weight R, R",
        "state *.3.up.weight device",
        "parameter *.3.down.weight device",
        "offload net.layers.4.act/silu disk",
    ],
)
def test_two_lines_that_decide_one_name_differently_name_each_other(line: str, deep: Graph) -> None:
    text = print_plan(_plan(deep), deep).replace("\nend\n", f"\n{line}\nend\n")
    with pytest.raises(
        TextError, match=r"expected one decision for 'net.layers.\S*', found .* on line \d+ and .* on line \d+"
    ):
        parse_plan(text, deep)


def test_a_disk_is_named_where_there_is_one_and_nowhere_else(deep: Graph) -> None:
    """The golden plan above, of before there were disks, is read as one without."""
    plan = _plan(deep)
    moved = {f"net.layers.{k}.act/silu": Tier.DISK for k in (4, 5)}
    spilled = dataclasses.replace(
        plan,
        budget=dataclasses.replace(plan.budget, disk_bytes=2**31),
        prediction=dataclasses.replace(plan.prediction, disk_bytes=3 * 2**20),
        decisions=dataclasses.replace(plan.decisions, tiers={**plan.decisions.tiers, **moved}),
    )
    text = print_plan(spilled, deep)
    assert parse_plan(text, deep) == spilled
    lines = {line for line in re.sub(r" {2,}", "  ", text).split("\n") if "disk" in line or "3MiB" in line}
    assert lines == {
        "budget  device 900MiB, host 4GiB, disk 2GiB",
        "offload  net.layers.{4..5}.act/silu  disk",
        "predict  step 412ms ±6%, device 913305601B, host 0B, disk 3MiB  # 412ms, 871MiB, 0B, 3MiB",
    }
    assert parse_plan(print_plan(plan, deep), deep).budget.disk_bytes == 0
    back = text.replace("silu" + " " * 20 + "disk", "silu  host")
    assert back != text and parse_plan(back, deep).decisions.tiers == plan.decisions.tiers


@pytest.mark.parametrize(
    ("name", "tier", "message"),
    [
        ("net.layers.0.act/silu", Tier.DISK, "only where it is offloaded, to host or disk"),
        ("net.layers.4.act/silu", Tier.DEVICE, "only where it is offloaded, to host or disk"),
        ("net.layers.0.up.weight", Tier.DISK, "expected optimizer state of .* on device or host, found disk"),
    ],
)
def test_a_tier_where_nothing_can_lie_is_not_printed(deep: Graph, name: str, tier: Tier, message: str) -> None:
    plan = _plan(deep)
    decisions = dataclasses.replace(plan.decisions, tiers={**plan.decisions.tiers, name: tier})
    with pytest.raises(PlanError, match=message):
        print_plan(dataclasses.replace(plan, decisions=decisions), deep)


def test_two_lines_may_say_the_same(deep: Graph) -> None:
    plan = _plan(deep)
    text = print_plan(plan, deep).replace("\nend\n", "\nrecompute net.layers.2.act/silu\nend\n")
    assert parse_plan(text, deep) == plan


def test_every_cut_of_the_file_is_refused(deep: Graph) -> None:
    text = print_plan(_plan(deep), deep)
    for cut in range(0, len(text) - 1, 7):
        with pytest.raises(TextError):
            parse_plan(text[:cut], deep)


def test_order_of_decisions_does_not_change_the_text(deep: Graph) -> None:
    plan = _plan(deep)
    decisions = plan.decisions
    turned = dataclasses.replace(
        decisions,
        layouts=dict(reversed(list(decisions.layouts.items()))),
        fates=dict(reversed(list(decisions.fates.items()))),
        tiers=dict(reversed(list(decisions.tiers.items()))),
    )
    assert print_plan(dataclasses.replace(plan, decisions=turned), deep) == print_plan(plan, deep)
