"""The first step, whose optimizer has no state yet, and the second stay within the predicted peak, for torch's own too.

Storages are counted by the tests' tracker. Predicted bytes are those of the CPU's allocator, in blocks of 64.
"""

from functools import partial
from typing import Any

import pytest
import torch
from tests.runtime.chain import Chain, chain, chain_plan, rows
from tests.runtime.planned_net import batch, planned, planned_net
from tests.tracker import StorageTracker
from torch import Tensor, nn

from shardwright.ir import Clip
from shardwright.passes.footprint import footprint
from shardwright.passes.optimizers import StepKind, optimizer_spec
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.module import install
from shardwright.runtime.optimizer import optimizer

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"foreach": False}),
    ("adamw-fused", {"fused": True}),
    ("sgd-momentum", {"momentum": 0.9, "foreach": False}),
    ("adagrad", {"foreach": False}),
    ("rmsprop", {"foreach": False}),
    ("nadam", {"foreach": False}),
]
SLACK_BYTES = 2_048
"""Scalars that a step makes, and what it copies of the batch."""


def peaks(net: nn.Module, made: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[int]:
    found = []
    for inputs in batches:
        made.zero_grad()
        state = [value for kept in made.state.values() for value in kept.values() if isinstance(value, Tensor)]
        theirs = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
        held = [*net.parameters(), *net.buffers(), *state]
        with StorageTracker(held, excluded=partial(_elsewhere, theirs)) as tracker:
            loss = net(**inputs)["loss"]
            loss.backward()
            del loss
            made.step()
        found.append(tracker.peak_bytes)
    return found


def _elsewhere(theirs: set[int], found: Tensor) -> bool:
    """The batch is the script's; the program has its own part."""
    return found.is_meta or found.untyped_storage().data_ptr() in theirs


def made_for(net: nn.Module, name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, optimizer_spec(name).torch_name)
    found: torch.optim.Optimizer = kind([p for p in net.parameters() if p.requires_grad], lr=1e-2, **options)
    return found


@pytest.mark.parametrize(("name", "options"), KINDS, ids=[name for name, _ in KINDS])
@pytest.mark.parametrize("model", ["chain", "net"])
def test_torchs_own_optimizers_stay_within_it(model: str, name: str, options: dict[str, Any]) -> None:
    if model == "chain":
        plan = chain_plan(1, Clip.UNKNOWN, on_host=False)
        net: nn.Module = install(chain(), *plan, optimizer=name)
        batches = [{"x": rows(seed)} for seed in range(3)]
    else:
        captured, _, decisions = planned(1)
        plan = captured, rank_graph(captured.graph, decisions), decisions
        net, batches = planned_net(plan, optimizer=name), [batch(seed) for seed in range(3)]
    foreseen = footprint(plan[1], optimizer_spec(name), StepKind.LOOP, {}, block_bytes=64)
    first, second, third = peaks(net, made_for(net, name, options), batches)
    assert first <= foreseen.peak_bytes + SLACK_BYTES
    assert second <= foreseen.peak_bytes + SLACK_BYTES and third == second
    assert isinstance(net, Chain) or model == "net"


def test_the_first_step_peaks_without_the_state_that_is_not_there_yet() -> None:
    """Where backward is the peak, the first step needs less, by the state; where the optimizer's step is, as much."""
    plan = chain_plan(1, Clip.UNKNOWN, on_host=False)
    net = install(chain(), *plan, optimizer="adamw-fused")
    first, second, _ = peaks(net, optimizer(net, torch.optim.AdamW, lr=1e-2), [{"x": rows(seed)} for seed in range(3)])
    state = sum(2 * p.numel() * 4 for p in net.parameters())
    foreseen = footprint(plan[1], optimizer_spec("adamw-fused"), StepKind.FUSED, {}, block_bytes=1)
    at_the_step = foreseen.curve_bytes[-1]
    assert second <= foreseen.peak_bytes
    assert max(second - state, at_the_step - SLACK_BYTES) <= first <= max(foreseen.peak_bytes - state, at_the_step)
