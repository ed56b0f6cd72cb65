"""Train a Llama of 10 million parameters on Python's own source: torchrun --nproc-per-node 2 examples/train_llama.py

Or plan first:  shardwright plan examples/train_llama.py:build --cluster cpu:2 --budget 200MiB -o net.plan
and run that:   torchrun --nproc-per-node 2 examples/train_llama.py --plan net.plan
"""

import argparse
import os
import statistics
import sysconfig
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.ir import format_size
from shardwright.planner.progress import print_progress
from shardwright.planner.summary import print_summary
from shardwright.runtime.tracker import StepMemory, held_tensors

BATCH, SEQUENCE = 8, 256
CONFIG = LlamaConfig(vocab_size=256, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
                     num_attention_heads=8, num_key_value_heads=4, use_cache=False)  # fmt: skip
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
say = partial(print, flush=True) if RANK == 0 else lambda line: None


def build() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """What `shardwright plan` asks for: the module and example arguments of the global batch."""
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)
    return LlamaForCausalLM(CONFIG), (), {"input_ids": tokens, "labels": tokens}


def read_files(held_out: bool) -> Tensor:
    """Bytes of the standard library's files; every tenth is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for i, file in enumerate(files) if (i % 10 == 0) == held_out)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(text: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """A global batch, the same on every rank because the generator is."""
    starts = torch.randint(len(text) - SEQUENCE, (BATCH, 1), generator=generator)
    tokens = text[starts + torch.arange(SEQUENCE)].long()
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--plan", help="made elsewhere; without it the first forward plans")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--budget", default="200MiB", help="memory of one rank")
    args, plans = options.parse_args(), []

    @shardwright.parallelize(budget=args.budget, plan=args.plan, progress=print_progress(),
                             on_plan=lambda *plan: plans.append(plan))  # fmt: skip
    class Llama(LlamaForCausalLM):
        """Knows nothing of ranks."""

    torch.manual_seed(0)
    model = Llama(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train, generator = read_files(held_out=False), torch.Generator().manual_seed(0)
    model(**draw(train, generator))  # the first forward plans; not a step
    for plan in plans:  # rank 0 has it
        print_summary(*plan)
    seconds, peaks = [], []
    for step in range(1, args.steps + 1):
        batch, began, logged = draw(train, generator), time.perf_counter(), step == 1 or step % 5 == 0
        with StepMemory([*held_tensors(model, optimizer), *batch.values()]) if logged else nullcontext() as memory:
            loss = model(**batch).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        if memory:
            peaks.append(memory.peak_bytes)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            say(f"step: {step}  loss: {loss.item():.4f}  grad_norm: {norm.item():.2f}  "
                f"memory: {peaks[-1] / 2**20:.1f}MiB  tps: {BATCH * SEQUENCE / seconds[-1]:,.0f}")  # fmt: skip
    with torch.no_grad():
        loss = model.eval()(**draw(read_files(held_out=True), generator)).loss
    say(f"held-out loss: {loss.item():.4f}")
    measured = [(statistics.median(seconds[1:]), max(peaks))] * WORLD_SIZE
    if WORLD_SIZE > 1:
        distributed.all_gather_object(measured, measured[0])
    rows = [("predicted", plan.prediction.step_seconds, plan.prediction.device_bytes) for plan, _ in plans]
    rows += [(f"rank {rank}", *row) for rank, row in enumerate(measured)]
    say(f"{'':12}{'step time':>12}{'peak memory':>14}")
    for name, step_seconds, num_bytes in rows:
        say(f"{name:12}{step_seconds:>11.3f}s{format_size(num_bytes):>14}")


if __name__ == "__main__":
    main()
