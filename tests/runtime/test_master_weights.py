"""Parameters of bfloat16 with float32 masters: AdamW by hand is the oracle; checkpoints are exact."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.planned_net import Net, Planned, built, copied_state, plain_steps, planned, planned_net
from torch import Tensor
from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from shardwright.ir import PlanError
from shardwright.runtime.optimizer import TieredOptimizer, optimizer
from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import RankPool

LR, WD, BETA1, BETA2, EPS = 1e-2, 0.1, 0.9, 0.999, 1e-8
BF16 = torch.bfloat16


class ByHand:
    """AdamW as the paper has it, on float32 masters."""

    def __init__(self, net: Net) -> None:
        self.master = {n: whole(p).detach().float() for n, p in net.named_parameters() if p.requires_grad}
        self.m, self.v = ({n: torch.zeros_like(p) for n, p in self.master.items()} for _ in range(2))
        self.t = 0

    def step(self, gradients: dict[str, Tensor]) -> None:
        self.t += 1
        for name, master in self.master.items():
            g, m, v = gradients[name].float(), self.m[name], self.v[name]
            master.mul_(1 - LR * WD)
            m.mul_(BETA1).add_(g, alpha=1 - BETA1)
            v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
            step = m / (1 - BETA1**self.t) / ((v / (1 - BETA2**self.t)).sqrt() + EPS)
            master.sub_(LR * step)


def made(net: Net, **options: Any) -> torch.optim.Optimizer:
    return optimizer(net, torch.optim.AdamW, lr=LR, weight_decay=WD, **options)


def steps_like_the_oracle(plan: Planned) -> None:
    net = planned_net(plan, built(dtype=BF16), optimizer="adamw-master")
    tiered, oracle = made(net), ByHand(net)
    assert isinstance(tiered, TieredOptimizer)
    for seed in (0, 1, 2):
        plain_steps(net, tiered, [seed])
        oracle.step({n: whole(p.grad) for n, p in net.named_parameters() if p.grad is not None})
        for name, parameter in net.named_parameters():
            if not parameter.requires_grad:
                continue
            master = whole(tiered.state[parameter]["master"])
            torch.testing.assert_close(master, oracle.master[name], rtol=1e-6, atol=1e-7)
            assert torch.equal(whole(parameter), master.to(BF16))
    sizes = [p.numel() for n, p in net.named_parameters() if plan[2].tiers.get(n)]
    expected = sum(12 * size // plan[2].mesh.num_ranks + 4 for size in sizes)
    assert tiered.host_bytes == expected
    session = net.__dict__["_shardwright_session"]
    assert session.installed.steps.pool.used_bytes == expected, "staged gradients and values have gone back"


def goes_on_exactly(plan: Planned) -> None:
    """Parameters are bfloat16 and masters are not: what a checkpoint loses shows."""
    net = planned_net(plan, built(dtype=BF16), optimizer="adamw-master")
    tiered = made(net)
    plain_steps(net, tiered, [0, 1])
    values, state = copied_state(net), copy.deepcopy(tiered.state_dict())
    twin = planned_net(plan, built(seed=3, dtype=BF16), optimizer="adamw-master")
    again = made(twin)
    twin.load_state_dict(values)
    again.load_state_dict(state)
    for seed in (2, 3):
        assert plain_steps(net, tiered, [seed]) == plain_steps(twin, again, [seed])
    for one, other in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole(one), whole(other))
        if one.requires_grad:
            assert torch.equal(whole(tiered.state[one]["master"]), whole(again.state[other]["master"]))


def masters(net: Net, tiered: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {n: whole(tiered.state[p]["master"]).clone() for n, p in net.named_parameters() if p.requires_grad}


def saves(plan: Planned, path: str) -> tuple[dict[str, Tensor], list[float]]:
    net = planned_net(plan, built(dtype=BF16), optimizer="adamw-master")
    tiered = made(net)
    plain_steps(net, tiered, [0, 1])
    model, optim = get_state_dict(net, tiered)
    save({"model": model, "optim": optim}, checkpoint_id=path)
    return masters(net, tiered), plain_steps(net, tiered, [2, 3])


def loads(plan: Planned, path: str) -> tuple[dict[str, Tensor], list[float]]:
    net = planned_net(plan, built(seed=7, dtype=BF16), optimizer="adamw-master")
    tiered = made(net)
    model, optim = get_state_dict(net, tiered)
    state: dict[str, Any] = {"model": model, "optim": optim}
    load(state, checkpoint_id=path)
    set_state_dict(
        net, tiered, model_state_dict=state["model"], optim_state_dict=state["optim"], options=StateDictOptions()
    )
    return masters(net, tiered), plain_steps(net, tiered, [2, 3])


@pytest.mark.parametrize("on_host", [False, True])
def test_alone_masters_step_like_adamw_by_hand_and_go_on_from_a_checkpoint(on_host: bool) -> None:
    plan = planned(1, on_host=on_host, dtype=BF16)
    steps_like_the_oracle(plan)
    goes_on_exactly(plan)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_shards_with_masters_step_like_adamw_by_hand_and_go_on_from_a_checkpoint(two_ranks: RankPool) -> None:
    plan = planned(2, on_host=True, dtype=BF16)
    two_ranks.run(steps_like_the_oracle, plan)
    two_ranks.run(goes_on_exactly, plan)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_masters_of_two_ranks_are_sharded_again_for_one(two_ranks: RankPool, tmp_path: Path) -> None:
    """They are what they were; losses differ only by what the batch split does to bfloat16."""
    path = str(tmp_path / "step")
    (expected, losses), _ = two_ranks.run(saves, planned(2, on_host=True, dtype=BF16), path)
    for on_host in (False, True):
        found, later = loads(planned(1, on_host=on_host, dtype=BF16), path)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        assert later == pytest.approx(losses, rel=2e-2)


def test_masters_that_were_not_planned_are_refused() -> None:
    net = planned_net(planned(1, dtype=BF16), built(dtype=BF16), optimizer="adamw")
    with pytest.raises(PlanError, match="without master weights.*--optimizer adamw-master"):
        plain_steps(net, made(net, master_weights=True), [0])


def test_an_optimizer_without_the_planned_masters_says_that_it_keeps_less() -> None:
    net = planned_net(planned(1, dtype=BF16), built(dtype=BF16), optimizer="adamw-master")
    with pytest.warns(UserWarning, match="keeps memory for adamw-master.*AdamW without master weights"):
        plain_steps(net, made(net, master_weights=False), [0])


def test_float32_parameters_have_no_master() -> None:
    net = planned_net(planned(1), optimizer="adamw-master")
    found = made(net, master_weights=True)
    plain = built()
    reference = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=WD, fused=True)
    plain_steps(net, found, [0, 1])
    plain_steps(plain, reference, [0, 1])
    assert all("master" not in state for state in found.state.values())
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
