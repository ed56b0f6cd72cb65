"""Parameters stepped on the host while backward goes on: the same numbers bit by bit, less memory, what is refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.chain import (
    BUCKETS,
    KINDS,
    NUM_LAYERS,
    ROOM,
    TIGHT,
    WIDTH,
    Chain,
    backward,
    chain,
    chain_plan,
    installed,
    peaks,
    predicted,
    require_shards_foreseen,
    rows,
    same_bit_by_bit,
    train,
)
from tests.runtime.planned_net import Planned, planned, same_when_tied
from torch import Tensor, nn

from shardwright.ir import Clip, PlanError, ShardwrightError
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.engines import Room
from shardwright.runtime.module import install
from shardwright.runtime.optimizer import TieredOptimizer, optimizer
from shardwright.runtime.ranks import RankPool


@pytest.mark.parametrize(("dtype", "name"), KINDS)
def test_alone_it_is_the_same_bit_by_bit(dtype: torch.dtype, name: str) -> None:
    for schedule in (TIGHT, BUCKETS):
        late, early = (chain_plan(1, clip, dtype, schedule=schedule) for clip in Clip)
        same_bit_by_bit(late, early, name)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("dtype", "name"), KINDS)
def test_on_two_ranks_it_is_the_same_bit_by_bit(two_ranks: RankPool, dtype: torch.dtype, name: str) -> None:
    for schedule in (TIGHT, BUCKETS):
        two_ranks.run(same_bit_by_bit, *(chain_plan(2, clip, dtype, schedule=schedule) for clip in Clip), name)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("clip", list(Clip))
@pytest.mark.parametrize(("dtype", "name"), KINDS)
def test_the_first_and_the_second_step_stay_within_the_predicted_peak(
    dtype: torch.dtype, name: str, clip: Clip, on_host: bool
) -> None:
    plan = chain_plan(1, clip, dtype, on_host)
    foreseen, ((first, second), host) = predicted(plan, name), peaks(plan, name)
    assert first <= second <= foreseen.peak_bytes <= 1.01 * second + 512
    assert host <= foreseen.host_peak_bytes
    if on_host:
        assert foreseen.host_peak_bytes <= 1.01 * host + 4 * WIDTH * WIDTH


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_shards_stay_within_the_predicted_peak(two_ranks: RankPool) -> None:
    for clip in Clip:
        require_shards_foreseen(two_ranks, chain_plan(2, clip))


def test_gradients_that_die_early_lower_the_peak() -> None:
    """Of eight gradients, all but four are gone when the last is made: two are on their way, one is being reduced."""
    late, early = (peaks(chain_plan(1, clip), "adamw-fused")[0][1] for clip in (Clip.UNKNOWN, Clip.NONE))
    assert early <= late - (NUM_LAYERS - 4) * WIDTH * WIDTH * 4


def declared(**options: Any) -> tuple[Chain, TieredOptimizer]:
    return installed(chain_plan(1, Clip.NONE), **options)


def test_clipping_although_none_was_declared_is_refused() -> None:
    net, _ = declared()
    backward(net)
    with pytest.raises(ShardwrightError, match="clip none.*that of layers.0.weight.*without --clip none"):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_clipping_shards_is_refused(two_ranks: RankPool) -> None:
    with pytest.raises(ShardwrightError, match="clip none.*found .* on that of layers.0.weight"):
        two_ranks.run(clips, chain_plan(2, Clip.NONE))


def clips(plan: Planned) -> None:
    net, _ = installed(plan)
    backward(net)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def test_reading_or_scaling_a_gradient_that_is_gone_is_refused() -> None:
    net, _ = declared()
    backward(net)
    gradient = next(net.parameters()).grad
    assert gradient is not None and gradient.shape == (WIDTH, WIDTH) and "stepped in backward" in repr(gradient)
    uses: list[Callable[[Tensor], Tensor]] = [Tensor.norm, Tensor.clone, lambda g: g.mul_(2), lambda g: g + 1]
    for use in uses:
        with pytest.raises(ShardwrightError, match="which backward has used and freed"):
            use(gradient)


def test_accumulating_is_refused() -> None:
    net, made = declared()
    backward(net)
    with pytest.raises(ShardwrightError, match="optimizer.step.. between backward and the next forward, found none"):
        net(rows(1))
    made.step()
    with pytest.raises(ShardwrightError, match="one backward between zero_grad.. and step.*there already"):
        backward(net, 1)


def test_two_forwards_before_a_backward_are_refused_at_the_second_backward() -> None:
    net, _ = declared()
    first, second = net(rows(0))["loss"], net(rows(1))["loss"]
    first.backward()
    with pytest.raises(ShardwrightError, match="expected parameters as they were in forward"):
        second.backward()


def test_a_step_that_is_not_the_one_begun_is_refused() -> None:
    net, made = declared()
    backward(net)
    made.param_groups[0]["lr"] = 0.5
    with pytest.raises(ShardwrightError, match="options that backward stepped layers.0.weight with.*lr changed"):
        made.step()
    net, made = declared()
    backward(net)
    made.step()
    with pytest.raises(ShardwrightError, match="one step.. for each backward, found a second one"):
        made.step()
    net, made = declared()
    backward(net)
    made.zero_grad()
    with pytest.raises(ShardwrightError, match="that of layers.0.weight cleared"):
        made.step()


def test_closures_are_refused() -> None:
    net, made = declared()
    with pytest.raises(ShardwrightError, match="step.. without a closure"):
        made.step(lambda: backward(net))


def test_an_optimizer_of_another_making_is_refused() -> None:
    net = chain()
    install(net, *chain_plan(1, Clip.NONE), room=ROOM)
    torch.optim.AdamW(net.parameters())
    with pytest.raises(PlanError, match="expected an optimizer made by shardwright.optimizer"):
        backward(net)


def test_an_optimizer_of_some_parameters_only_is_refused() -> None:
    net = chain()
    install(net, *chain_plan(1, Clip.NONE), room=ROOM)
    kept = optimizer(net, torch.optim.AdamW, list(net.layers[1:].parameters()))
    with pytest.raises(PlanError, match="layers.0.weight among the parameters of the optimizer"):
        backward(net)
    assert kept.param_groups


def test_an_optimizer_with_more_state_than_planned_is_refused_before_it_steps() -> None:
    net = chain()
    install(net, *chain_plan(1, Clip.NONE), room=ROOM, optimizer="adamw-fused")
    made, before = optimizer(net, torch.optim.AdamW, amsgrad=True), copy.deepcopy(net.state_dict())
    with pytest.raises(PlanError, match="at most 2 state tensors.*AdamW with 3"):
        backward(net)
    assert made.param_groups and all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_an_optimizer_made_before_planning_steps_in_backward_too() -> None:
    net, early = chain(), chain()
    made = optimizer(net, torch.optim.AdamW, lr=1e-2)
    install(net, *chain_plan(1, Clip.NONE), room=ROOM, optimizer="adamw-fused")
    install(early, *chain_plan(1, Clip.NONE), room=ROOM, optimizer="adamw-fused")
    assert train(net, made, range(2)) == train(early, optimizer(early, torch.optim.AdamW, lr=1e-2), range(2))


def test_zeroing_gradients_in_place_and_schedulers_go_on_working() -> None:
    losses = []
    for set_to_none in (True, False):
        net, made = declared()
        scheduler = torch.optim.lr_scheduler.StepLR(made, 1, 0.5)
        for seed in range(3):
            backward(net, seed)
            made.step()
            scheduler.step()
            made.zero_grad(set_to_none=set_to_none)
        losses.append(backward(net, 3))
    assert losses[0] == losses[1]


def test_without_host_memory_for_what_is_staged_the_step_says_so() -> None:
    net = chain()
    install(net, *chain_plan(1, Clip.NONE), room=Room(WIDTH * WIDTH * 4))
    made = optimizer(net, torch.optim.AdamW)
    with pytest.raises(PlanError, match="expected the host pool to stay within"):
        backward(net)
    assert made.param_groups


def test_tied_weights_step_the_same_bit_by_bit() -> None:
    captured, _, decisions = planned(1, on_host=True)
    plans = [
        (captured, rank_graph(captured.graph, replace(decisions, clip=clip)), replace(decisions, clip=clip))
        for clip in Clip
    ]
    same_when_tied(*plans)
