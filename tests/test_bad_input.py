"""What a user gets wrong, through the command line or `apply`: one message that says what was expected, what was found,
where, and what to do; the right exit code; never a traceback. `docs/troubleshooting.md` lists the same messages."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.conftest import CommandLine
from tests.zoo.machines import link_bound
from torch import Tensor, nn

import shardwright
from shardwright.ir import InputError, Shard, StalePlanError, save_plan
from shardwright.ir.files import graph_path
from shardwright.runtime.ranks import RankPool

ROOT = Path(__file__).parents[1]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
BATCH, WIDTH = 256, 64
MODELS = """
import torch
from torch import nn

X = torch.zeros(8, 64)

@torch.library.custom_op("acme::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)

    def forward(self, x):
        return self.up(x).square().mean()

class Branch(Net):
    def forward(self, x):
        if x.sum() > 0:  # the branch
            x = -x
        return super().forward(x)

class Item(Net):
    def forward(self, x):
        return self.up(x).mean() * x.max().item()

class Custom(Net):
    def forward(self, x):
        return twice(self.up(x)).mean()  # the operator

class NoLoss(Net):
    def forward(self, x):
        return self.up(x)

def build(): return Net(), (X,)
def branch(): return Branch(), (X,)
def item(): return Item(), (X,)
def custom(): return Custom(), (X,)
def no_loss(): return NoLoss(), (X,)
def odd(): return Net(), (torch.zeros(7, 64),)
def raises(): raise ValueError("no data")  # the mistake
def leaves(): raise SystemExit(3)
def alone(): return Net()
def bare(): return Net(), X
number = 3
"""


class Net(nn.Module):
    """The same as in MODELS, for ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 128)
        self.down = nn.Linear(128, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.down(self.up(x).relu()).square().mean()
        return loss


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(MODELS.splitlines(), 1) if text in line)


@pytest.fixture
def run(run: CommandLine, tmp_path: Path) -> CommandLine:
    (tmp_path / "m.py").write_text(MODELS)
    return run


def refused(answer: tuple[int, str, str], code: int, *parts: str) -> None:
    """The exit code, nothing on stdout, all parts in this order on stderr, and the message in the documentation."""
    found, out, err = answer
    assert found == code, err
    assert not out
    assert "Traceback" not in err
    assert re.search(".*".join(map(re.escape, parts)), err, re.DOTALL), err
    (message,) = [line for line in err.splitlines() if line.lower().startswith("error: ")]
    assert beginning(message) in map(beginning, TROUBLESHOOTING.read_text().splitlines())


def beginning(message: str) -> str:
    """Up to what was found, a place or a hash; whatever the function of the target is called."""
    return re.sub(r"m\.py:\w+|function \w+", "m.py:", re.split(r", found| at |, sha256", message)[0])


def plan_for(target: str, cluster: str = "h100x8", budget: str = "1GiB") -> tuple[str, ...]:
    return ("plan", target, "--cluster", cluster, "--budget", budget)


# Cluster and budget


def test_an_unknown_preset_is_answered_with_those_there_are(run: CommandLine) -> None:
    parts = ("--cluster: expected a cluster: one of h100x8", "a TOML file", "found 'h100x9' (did you mean 'h100x8'?)")
    refused(run(*plan_for("m.py:build", cluster="h100x9")), 2, *parts)


def test_an_unknown_cluster_key_is_named_with_its_file(run: CommandLine, tmp_path: Path) -> None:
    text = (ROOT / "ir" / "presets" / "h100x8.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("launch =", "lunch ="))
    parts = ("one of the keys kind, memory", "found 'lunch' (did you mean 'launch'?)", "at mine.toml, key device.lunch")
    refused(run(*plan_for("m.py:build", cluster="mine.toml")), 2, *parts)


def test_an_unknown_unit_in_a_cluster_is_named_with_file_and_key(run: CommandLine, tmp_path: Path) -> None:
    text = (ROOT / "ir" / "presets" / "h100x8.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace("67TFLOP/s", "67TFLOPS"))
    parts = ("a rate with one of the units FLOP/s", "found '67TFLOPS' (did", "at mine.toml, key device.flops.f32")
    refused(run(*plan_for("m.py:build", cluster="mine.toml")), 2, *parts)


@pytest.mark.parametrize(
    ("budget", "parts"),
    [
        ("GiB", ("--budget: expected a size, found 'GiB', which has no number: write for instance 900MiB",)),
        ("70", ("--budget: expected a size with a unit, found '70' without one: write for instance 900MiB",)),
        ("1GoB", ("--budget: expected one of the units B, KB", "found 'GoB' in '1GoB' (did you mean", "write for")),
    ],
)
def test_a_budget_needs_a_number_and_a_unit(run: CommandLine, budget: str, parts: tuple[str, ...]) -> None:
    refused(run(*plan_for("m.py:build", budget=budget)), 2, *parts)


def test_a_disk_budget_needs_a_disk_and_a_host(run: CommandLine, tmp_path: Path) -> None:
    text = (ROOT / "ir" / "presets" / "h100x8.toml").read_text()
    (tmp_path / "mine.toml").write_text(text[: text.index("[disk]")])
    disk = ("--disk", "1GiB")
    parts = ("expected a disk in cluster 'mine.toml' for a disk budget of 1GiB", "found none: add a table [disk]")
    refused(run(*plan_for("m.py:build", cluster="mine.toml"), "--host", "1GiB", *disk), 1, *parts)
    host = ("expected a host budget of at least 12KiB beside the disk budget of 1GiB", "found 0B", "give the host")
    refused(run(*plan_for("m.py:build"), *disk), 1, *host)
    most = ("expected a disk budget of at most 3.49TiB a rank", "found 4TiB: lower it")
    refused(run(*plan_for("m.py:build"), "--host", "1GiB", "--disk", "4TiB"), 1, *most)


@pytest.mark.usefixtures("run")
def test_a_process_of_its_own_exits_with_2_and_prints_no_traceback(tmp_path: Path) -> None:
    arguments = ["shardwright", *plan_for("m.py:build", budget="lots")]
    code = f"import sys; sys.argv = {arguments!r}; from shardwright.planner.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    refused((done.returncode, done.stdout, done.stderr), 2, "Usage: shardwright plan", "Error: Invalid value")


# The target


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (
            "raises",
            ("expected m.py:raises to return (module, args)", "ValueError: no data", f"m.py:{line_of('no da')}"),
        ),
        ("leaves", ("expected m.py:leaves to return (module, args)", "found SystemExit: 3 at", "m.py:")),
        ("alone", ("expected m.py:alone to return (module, args) or (module, args, kwargs)", "found (Net)")),
        ("bare", ("expected m.py:bare to return", "found (Net, Tensor). Write (x,) for a single input")),
        ("number", ("expected a function number in m.py:number, found a int. There are:", "build")),
        ("absent", ("expected a function absent in m.py:absent, found no such name. There are:", "build")),
    ],
)
def test_a_target_that_raises_or_returns_the_wrong_thing(
    run: CommandLine, function: str, parts: tuple[str, ...]
) -> None:
    refused(run(*plan_for(f"m.py:{function}")), 1, *parts)


@pytest.mark.parametrize(("function", "line"), [("branch", "the branch"), ("item", ".item()")])
def test_control_flow_that_depends_on_data_is_told_with_its_line(run: CommandLine, function: str, line: str) -> None:
    parts = ("no use of a tensor's value in Python", "in module (top) at", f"m.py:{line_of(line)}", "torch.where")
    refused(run(*plan_for(f"m.py:{function}")), 1, *parts)


def test_an_operator_without_a_rule_is_told_with_what_to_write(run: CommandLine) -> None:
    parts = ("has a sharding rule for, found acme.twice.default", f"m.py:{line_of('# the operator')}")
    write = ("@register_sharding(torch.ops.acme.twice.default)", "return [([Replicate()], [Replicate()])]")
    refused(run(*plan_for("m.py:custom")), 1, *parts, *write)


def test_what_the_message_says_to_write_is_enough(run: CommandLine, tmp_path: Path) -> None:
    """In another process: the rule would stay registered in this one."""
    _, _, err = run(*plan_for("m.py:custom"))
    lines = [line.removeprefix("  ") for line in err.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("from torch.distributed"))
    code = MODELS + "\n".join(lines[start:]) + "\n"
    code += "import shardwright\n"
    code += "result = shardwright.plan(*custom(), cluster='h100x8', budget='1GiB', time_limit=5.0)\n"
    code += "print('acme.twice.default' in {node.op for node in result.graph.nodes})\n"
    (tmp_path / "ruled.py").write_text(code)
    done = subprocess.run([sys.executable, "ruled.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout == "True\n", done.stderr


def test_a_model_without_a_loss_is_told_what_it_returned(run: CommandLine) -> None:
    parts = ("one scalar loss from NoLoss.forward at", "m.py:", "found no scalar", "f32[8, 128]", "loss=", "loss_fn=")
    refused(run(*plan_for("m.py:no_loss")), 1, *parts)


# The batch


def test_a_batch_that_does_not_divide_is_planned_with_a_note(run: CommandLine) -> None:
    code, out, err = run(*plan_for("m.py:odd"), "--mesh", "dp=8", "--time-limit", "5")
    assert code == 0, err
    note = " ".join(out.split())
    assert "note expected a batch that 8 ranks divide, found x f32[7, 64]" in note
    assert "pad it to 8" in note


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of `Net` for two ranks, which splits the batch."""
    path = tmp_path_factory.mktemp("plans") / "net.plan"
    batch = (torch.zeros(BATCH, WIDTH),)
    found = shardwright.plan(Net(), batch, cluster=link_bound(2), budget="1GiB", time_limit=5.0)
    decisions = found.plan.decisions
    cut = replace(decisions, layouts={**decisions.layouts, "x": (Shard(0),)})
    save_plan(path, replace(found.plan, decisions=cut), found.graph)
    return path


def step_with(plan: str, batch: int, loader: bool) -> None:
    """On a rank: one step on another batch than the planned one, whole or cut by `shard_loader`."""
    model = shardwright.apply(Net(), plan, (torch.zeros(BATCH, WIDTH),))
    batches: list[Tensor] = [torch.zeros(batch, WIDTH)]
    for x in shardwright.shard_loader(batches, model) if loader else batches:
        model(x)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("batch", "loader", "message"),
    [
        (255, False, r"expected x of shape \[256, 64\] \(the global batch.*found \[255, 64\]; pad or cut the batch"),
        (1, False, r"expected x of shape \[256, 64\] \(the global batch.*found \[1, 64\]; pad or cut the batch"),
        (255, True, r"expected x to divide over the ranks.*found \[255, 64\]; drop the last"),
        (1, True, r"expected x to divide over the ranks.*found \[1, 64\]; drop the last"),
    ],
)
def test_a_batch_of_another_size_at_run_time(
    two_ranks: RankPool, plan_file: Path, batch: int, loader: bool, message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        two_ranks.run(step_with, str(plan_file), batch, loader)
    assert "Traceback" not in str(caught.value)


# The plan


def test_a_world_of_another_size_is_refused(plan_file: Path) -> None:
    """This process is a world of one."""
    with pytest.raises(StalePlanError, match=r"world size: planned 2 ranks, mesh \(dp=2\); found 1") as caught:
        shardwright.apply(Net(), plan_file, (torch.zeros(BATCH, WIDTH),))
    assert "plan again" in str(caught.value)


def apply_to(plan: str) -> None:
    shardwright.apply(Net(), plan, (torch.zeros(BATCH, WIDTH),))


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_more_ranks_than_the_plan_has_are_refused_on_every_rank(four_ranks: RankPool, plan_file: Path) -> None:
    with pytest.raises(StalePlanError, match=r"world size: planned 2 ranks, mesh \(dp=2\); found 4"):
        four_ranks.run(apply_to, str(plan_file))


def test_verify_with_another_number_of_ranks_is_a_usage_error(run: CommandLine, copied: Path) -> None:
    parts = ("expected the 2 ranks of the plan's mesh, found 3: plan for 3",)
    refused(run("verify", "net.plan", "--world", "3"), 2, *parts)


@pytest.fixture
def copied(run: CommandLine, plan_file: Path, tmp_path: Path) -> Path:
    """The plan, in the folder that commands run in."""
    shutil.copy(graph_path(plan_file), tmp_path / "net.graph")
    return Path(shutil.copy(plan_file, tmp_path / "net.plan"))


def test_a_truncated_plan(run: CommandLine, copied: Path) -> None:
    lines = copied.read_text().splitlines()
    copied.write_text("\n".join(lines[:-2]))
    parts = ("error: expected the last line 'end', found none: the file is cut off", "again", "at net.plan:", "^")
    refused(run("show", "net.plan"), 1, *parts)


def test_a_truncated_graph(run: CommandLine, copied: Path) -> None:
    graph = copied.with_suffix(".graph")
    graph.write_text(graph.read_text()[:-40])
    refused(run("show", "net.plan"), 1, "expected the closing '}'", "cut off", "again", "at net.graph:", "^")


def test_a_plan_of_a_newer_format(run: CommandLine, copied: Path) -> None:
    copied.write_text(copied.read_text().replace("plan 1", "plan 2", 1))
    parts = ("reads plan 1, the file is plan 2: make the plan again", "at net.plan:1:6", "  plan 2\n       ^")
    refused(run("show", "net.plan"), 1, *parts)


def test_an_unknown_name_in_a_plan(run: CommandLine, copied: Path) -> None:
    copied.write_text(copied.read_text().replace("\nend", "\nplace upp.weight R\n\nend"))
    parts = ("expected a name of the graph", "found 'upp.weight' (did you mean 'up.weight'?)", "at net.plan:", "^")
    refused(run("show", "net.plan"), 1, *parts)


def test_a_plan_without_its_graph_file(run: CommandLine, copied: Path) -> None:
    copied.with_suffix(".graph").unlink()
    parts = ("expected the graph of 'net.plan' beside it, found no 'net.graph': copy both files together",)
    refused(run("show", "net.plan"), 1, *parts)


def test_a_plan_beside_the_graph_of_another_model(run: CommandLine, copied: Path) -> None:
    graph = copied.with_suffix(".graph")
    graph.write_text(graph.read_text().replace("128", "256"))
    refused(run("check", "net.plan"), 1, "expected 'net.graph' as the graph that 'net.plan' was made for", "plan again")
