"""Train a Hugging Face Llama of 10 million parameters on the source code of Python's standard library.

torchrun --nproc-per-node 2 examples/train_llama.py

shardwright plan examples/train_llama.py:build --cluster cpu:2 --budget 900MiB -o net.plan
torchrun --nproc-per-node 2 examples/train_llama.py --plan net.plan
"""

import argparse
import os
import statistics
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright
from shardwright.ir import format_size
from shardwright.runtime.tracker import StepMemory, held_tensors

BATCH, SEQUENCE = 8, 256
CONFIG = LlamaConfig(vocab_size=256, hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
                     num_attention_heads=8, num_key_value_heads=4, use_cache=False)  # fmt: skip
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


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
    starts = torch.randint(len(text) - SEQUENCE, (BATCH,), generator=generator)
    tokens = torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()]).long()
    return {"input_ids": tokens, "labels": tokens}


def say(line: str) -> None:
    if RANK == 0:
        print(line, flush=True)


def report(model: nn.Module, step_seconds: float, peak_bytes: int) -> None:
    """What the plan said and what each rank measured."""
    measured = [(step_seconds, peak_bytes)] * WORLD_SIZE
    if WORLD_SIZE > 1:
        distributed.all_gather_object(measured, (step_seconds, peak_bytes))
    predicted = shardwright.plan_of(model).prediction
    rows = [("predicted", predicted.step_seconds, predicted.device_bytes)]
    rows += [(f"rank {rank}", *values) for rank, values in enumerate(measured)]
    say(f"{'':12}{'step':>8}{'peak':>12}")
    for name, seconds, num_bytes in rows:
        say(f"{name:12}{seconds:7.3f}s{format_size(num_bytes):>12}")


def main() -> None:
    options = argparse.ArgumentParser(description="Train a small Llama on the standard library's source.")
    options.add_argument("--plan", help="a plan made elsewhere; without it, planned at the first forward")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--budget", default="900MiB", help="memory of one rank")
    args = options.parse_args()
    torch.manual_seed(0)

    @shardwright.parallelize(cluster=f"cpu:{WORLD_SIZE}", budget=args.budget, optimizer="adamw", plan=args.plan)
    class Llama(LlamaForCausalLM):
        pass

    model = Llama(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train, generator = read_files(held_out=False), torch.Generator().manual_seed(0)
    model(**draw(train, generator))  # plans, and prints the plan; not a step
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
    model.eval()
    text = read_files(held_out=True)
    with torch.no_grad():
        losses = [model(**draw(text, generator)).loss.item() for _ in range(4)]
    say(f"held-out loss: {statistics.mean(losses):.4f}")
    report(model, statistics.median(seconds[1:]), max(peaks))


if __name__ == "__main__":
    main()
