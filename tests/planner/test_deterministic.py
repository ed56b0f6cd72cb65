"""The same question has the same answer, to the byte: whatever the hash seed of the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.planner.fast_host import fast_host

from shardwright.ir.cluster_text import print_cluster

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import sys
from tests.planner.command_line import build_llama
from tests.zoo.small import Perceptron
import torch
from shardwright.planner.api import plan

folder = sys.argv[1]
module, args, kwargs = build_llama()
plan(module, args, kwargs, cluster="two.toml", budget=2_600_000, target="llama").save(f"{folder}/llama.plan")
module, args = Perceptron(16, 32, 2), (torch.zeros(8, 16), torch.zeros(8, 16))
plan(module, args, cluster="two.toml", budget="1MiB", host="1MiB", target="mlp").save(f"{folder}/mlp.plan")
"""


@pytest.mark.processes
@pytest.mark.timeout(280)
def test_plan_and_graph_are_equal_bytes_over_three_hash_seeds(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(print_cluster(fast_host()))
    processes = []
    for seed in ("0", "1", "4242"):
        (tmp_path / seed).mkdir()
        environment = {
            **os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(entry for entry in (str(REPOSITORY), *sys.path) if entry),
        }  # fmt: skip
        command = [sys.executable, "-c", SCRIPT, seed]
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True))
    for process in processes:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    files = ("llama.plan", "llama.graph", "mlp.plan", "mlp.graph")
    first, *others = ({name: (tmp_path / seed / name).read_bytes() for name in files} for seed in ("0", "1", "4242"))
    assert all(first.values())
    assert b"recompute" in first["llama.plan"], "a plan without choices proves little"
    assert others == [first, first]
