"""`optimizer()` steps like the ordinary optimizer, with the state of some parameters on the host."""

import copy
from typing import Any

import pytest
import torch
from tests.runtime.planned_net import Net, Planned, built, copied_state, plain_steps, planned, planned_net
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.ir import PlanError
from shardwright.runtime.optimizer import TieredOptimizer, optimizer
from shardwright.runtime.optimizer_state import num_state_tensors
from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import RankPool

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(whole(found.state_dict()[name]), value, rtol=1e-5, atol=1e-5, msg=name)


def trains(plan: Planned, first: str) -> None:
    """Plain AdamW with a scheduler, against tiers; halfway the state goes through a checkpoint."""
    plain, net = built(), built()
    reference = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    if first == "plan":
        planned_net(plan, net)
    tiered = optimizer(net, torch.optim.AdamW, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(tiered, 2, 0.5)
    other = torch.optim.lr_scheduler.StepLR(reference, 2, 0.5)
    if first == "optimizer":
        planned_net(plan, net)
    for seed in (0, 1, 2):
        plain_steps(plain, reference, [seed])
        plain_steps(net, tiered, [seed])
        scheduler.step()
        other.step()
    assert_same(net, plain)
    assert isinstance(tiered, TieredOptimizer)
    split = plan[2].mesh.num_ranks
    on_host = net.up.weight.numel() + net.embed.weight.numel()
    assert tiered.host_bytes == on_host * 2 * 4 // split + 2 * 4  # two moments and a step number each
    _checkpoint(plan, net, tiered, reference)


def _checkpoint(plan: Planned, net: Net, tiered: torch.optim.Optimizer, reference: torch.optim.Optimizer) -> None:
    saved = tiered.state_dict()
    assert saved["state"].keys() == reference.state_dict()["state"].keys()
    for key, values in reference.state_dict()["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(whole(saved["state"][key][name]), value, rtol=1e-5, atol=1e-6)
    state = {name: whole(value) for name, value in copied_state(net).items()}
    for source in (copy.deepcopy(saved), copy.deepcopy(reference.state_dict())):
        plain, twin = built(), planned_net(plan)
        plain.load_state_dict(state)
        twin.load_state_dict(state)
        again = optimizer(twin, torch.optim.AdamW, **OPTIONS)
        again.load_state_dict(source)
        ordinary = torch.optim.AdamW(plain.parameters(), **OPTIONS)
        ordinary.load_state_dict(copy.deepcopy(reference.state_dict()))
        plain_steps(plain, ordinary, [5])
        plain_steps(twin, again, [5])
        assert_same(twin, plain)


def without_host_state(plan: Planned) -> None:
    net = planned_net(plan)
    found = optimizer(net, torch.optim.AdamW, [{"params": [net.up.weight], "lr": 0.5}], lr=0.1)
    assert type(found) is torch.optim.AdamW and found.param_groups[0]["fused"] and found.param_groups[0]["lr"] == 0.5
    plain = built()
    plain_steps(plain, torch.optim.AdamW([plain.up.weight], lr=0.5), [0])
    plain_steps(net, found, [0])
    assert isinstance(net.up.weight, DTensor)
    torch.testing.assert_close(whole(net.up.weight), plain.up.weight, rtol=1e-5, atol=1e-5)


class RowNorm(torch.optim.SGD):
    """Not element by element."""


def test_alone_state_on_the_host_steps_like_adamw() -> None:
    trains(planned(1, on_host=True), "plan")


def test_an_optimizer_that_is_not_element_by_element_is_refused_on_the_host() -> None:
    net = planned_net(planned(1, on_host=True))
    with pytest.raises(PlanError, match="element by element.*RowNorm"):
        plain_steps(net, optimizer(net, RowNorm, lr=0.1), [0])


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", ["plan", "optimizer"])
def test_shards_with_state_on_the_host_step_like_adamw(two_ranks: RankPool, first: str) -> None:
    two_ranks.run(trains, planned(2, on_host=True), first)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_with_no_state_on_the_host_it_is_the_ordinary_fused_optimizer(two_ranks: RankPool) -> None:
    two_ranks.run(without_host_state, planned(2))


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
        (torch.optim.AdamW, {}, 2),
        (torch.optim.Adam, {"amsgrad": True}, 3),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, 3),
        (torch.optim.Adagrad, {}, 1),
    ],
)
def test_state_is_counted_by_trying(kind: type[torch.optim.Optimizer], options: dict[str, Any], expected: int) -> None:
    parameter = nn.Parameter(torch.ones(3))
    tried = kind([parameter], lr=0.1, **options)  # type: ignore[call-arg]
    torch.optim.lr_scheduler.StepLR(tried, 1)
    before = {**tried.state}
    assert num_state_tensors(tried) == expected
    assert tried.state == before and torch.equal(parameter, torch.ones(3))
