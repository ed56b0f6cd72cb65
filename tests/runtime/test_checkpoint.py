"""torch.distributed.checkpoint: what two ranks save, four ranks and the plain model load."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.planned_net import Net, Planned, built, plain_steps, planned, planned_net
from torch.distributed.checkpoint import load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def _adamw(net: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def saves(plan: Planned, path: str) -> list[float]:
    """Train two steps, save, and go on: the losses after."""
    net = planned_net(plan)
    optimizer = _adamw(net)
    plain_steps(net, optimizer, [0, 1])
    model, optim = get_state_dict(net, optimizer)
    save({"model": model, "optim": optim}, checkpoint_id=path)
    return plain_steps(net, optimizer, [2, 3])


def loads(plan: Planned | None, path: str) -> list[float]:
    """Go on from the checkpoint under another plan, or none."""
    net = built(seed=7)
    if plan is not None:
        planned_net(plan, net)
    optimizer = _adamw(net)
    model, optim = get_state_dict(net, optimizer)
    state: dict[str, Any] = {"model": model, "optim": optim}
    load(state, checkpoint_id=path)
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=StateDictOptions()
    )
    return plain_steps(net, optimizer, [2, 3])


def gathers_for_one_file(plan: Planned) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in planned_net(plan).state_dict().items()}


def test_a_checkpoint_of_two_ranks_goes_on_with_four_and_with_one(
    two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "step")
    plain = built()
    expected = plain_steps(plain, _adamw(plain), [0, 1, 2, 3])[2:]
    for losses in two_ranks.run(saves, planned(2), path):
        assert losses == pytest.approx(expected, rel=1e-5)
    for losses in four_ranks.run(loads, planned(4), path):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert loads(planned(1), path) == pytest.approx(expected, rel=1e-5)
    assert loads(None, path) == pytest.approx(expected, rel=1e-5)


def test_gathered_values_are_a_plain_checkpoint(two_ranks: RankPool) -> None:
    for state in two_ranks.run(gathers_for_one_file, planned(2)):
        plain = built(seed=9)
        plain.load_state_dict(state)
        assert torch.equal(plain.up.weight, built().up.weight)
