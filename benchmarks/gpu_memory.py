"""Peak of memory and cost of offloading on one GPU: writes a folder that runs there with torch alone.

    python benchmarks/gpu_memory.py -o DIR                      # for an H100: a Llama of 1.1 billion parameters
    python benchmarks/gpu_memory.py --device cpu -o DIR --run   # the same, small, on this machine's CPU
    python DIR/run.py                                           # where the GPU is: torch >= 2.11, nothing of ours

Plans one training step for one device three times: `kept`, everything on the device; `offloaded`, within `--budget` of
what that takes and without recomputation, so that it has to move things to host memory; `planned`, within the same
budget by whatever is best. `run.py` in the folder compares `max_memory_allocated` with each plan's peak, and a step's
seconds with those of `kept`.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from gpu_folder_writer import Planned, write_folder
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.ir import Budget, Cluster, Fate, InfeasibleError, UserRules, format_size, load_cluster, parse_size
from shardwright.ir.rules_text import FateRule
from shardwright.planner.candidates import evaluate
from shardwright.planner.problem import Problem, pose
from shardwright.planner.search import Search

PLENTY: Final = 2**50
NO_RECOMPUTE: Final = UserRules(fates=(FateRule("*", Fate.RECOMPUTE, pinned=False, line=1),))


@dataclass(frozen=True)
class Model:
    """A Llama and its batch."""

    width: int
    layers: int
    vocabulary: int
    batch: int
    tokens: int
    dtype: str

    def build(self) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        """On `meta`; the batch has values, so that it is known what token numbers there are."""
        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=self.width * 11 // 4,
            num_hidden_layers=self.layers, num_attention_heads=self.width // 64, num_key_value_heads=self.width // 64,
            use_cache=False,
        )  # fmt: skip
        with torch.device("meta"):
            module = LlamaForCausalLM(config).to(getattr(torch, self.dtype)).train()
        tokens = torch.arange(self.batch * self.tokens).view(self.batch, self.tokens) % self.vocabulary
        return module, {"input_ids": tokens, "labels": tokens}

    def __str__(self) -> str:
        size = f"width {self.width}, {self.layers} layers, vocabulary {self.vocabulary}, {self.dtype}"
        return f"Llama, {size}, batch {self.batch} x {self.tokens}"


LARGE: Final = Model(2048, 20, 32000, 8, 2048, "bfloat16")
SMALL: Final = Model(256, 4, 1024, 8, 256, "float32")


def one_device(device: str) -> Cluster:
    """A cluster of one rank."""
    if device == "cpu":
        return load_cluster("cpu:1")
    return replace(load_cluster("h100x8"), name="one of h100x8", ranks_per_node=1)


def plan_all(model: Model, cluster: Cluster, share: float, host_bytes: int) -> tuple[Problem, list[Planned]]:
    """Everything kept, and two plans within `share` of what that takes. Raises InfeasibleError where no plan fits."""
    module, batch = model.build()
    problem = pose(module, (), batch, cluster=cluster, budget=PLENTY, host=host_bytes, optimizer="adamw-fused")
    request = problem.request
    loose = Search(request).under(PLENTY).chosen.decisions
    kept = evaluate("kept", request.graph, replace(loose, fates={}, tiers={}), request.machine, Budget(PLENTY, 0))
    budget_bytes = int(share * kept.replay.peak_bytes)
    found = [Planned("kept", kept.decisions, kept.replay)]
    for name, rules in (("offloaded", NO_RECOMPUTE), ("planned", request.user_rules)):
        chosen = Search(replace(request, user_rules=rules)).under(budget_bytes).chosen
        found.append(Planned(name, chosen.decisions, chosen.replay))
    return problem, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=0.75, help="share of what everything kept takes")
    parser.add_argument("--host", default="64GiB")
    for name, kind in (("width", int), ("layers", int), ("batch", int), ("tokens", int), ("dtype", str)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--run", action="store_true", help="run the folder here, by itself")
    given = parser.parse_args()
    changed = {name: getattr(given, name) for name in ("width", "layers", "batch", "tokens", "dtype")}
    model = replace(LARGE if given.device == "cuda" else SMALL, **{k: v for k, v in changed.items() if v is not None})
    host_bytes = parse_size(given.host)
    try:
        problem, planned = plan_all(model, one_device(given.device), given.budget, host_bytes)
    except InfeasibleError as error:
        sys.exit(str(error))
    write_folder(given.output, str(model), problem, planned, torch.device(given.device), host_bytes)
    for one in planned:
        judged = one.replay
        print(
            f"{one.name:10} predicted {judged.step_seconds * 1e3:8.1f} ms, peak {format_size(judged.peak_bytes)},"
            f" host {format_size(judged.host_peak_bytes)}, exposed copies {judged.exposed_copy_seconds * 1e3:.1f} ms"
        )
    print(f"wrote {given.output}: run `python run.py` there, where a {given.device} device is")
    if given.run:
        sys.exit(subprocess.run([sys.executable, "run.py"], cwd=given.output).returncode)


if __name__ == "__main__":
    main()
