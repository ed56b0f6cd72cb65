"""Parameters that lie on the host: the same numbers bit by bit, less of the device, and what a user does with them."""

import copy
from dataclasses import replace

import pytest
import torch
from tests.runtime.chain import (
    BUCKETS,
    KINDS,
    NUM_LAYERS,
    ROOM,
    TIGHT,
    WIDTH,
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
from tests.runtime.decided import batch_split
from tests.runtime.planned_net import Planned, planned, same_when_tied

from shardwright.ir import Clip, Gather, InputKind, Mesh, PlanError, Schedule, Tier
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.capture import capture
from shardwright.runtime.engines import Room
from shardwright.runtime.module import install
from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import RankPool
from shardwright.runtime.session import find_session
from shardwright.runtime.step import local


def lying_plan(num_ranks: int, dtype: torch.dtype = torch.float32, schedule: Schedule = TIGHT) -> Planned:
    return chain_plan(num_ranks, Clip.NONE, dtype, schedule=schedule, lying=True)


@pytest.mark.parametrize(("dtype", "name"), KINDS)
def test_alone_it_is_the_same_bit_by_bit(dtype: torch.dtype, name: str) -> None:
    for schedule in (TIGHT, BUCKETS, replace(TIGHT, room_bytes=2**20)):
        same_bit_by_bit(chain_plan(1, Clip.UNKNOWN, dtype), lying_plan(1, dtype, schedule=schedule), name)


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("dtype", "name"), KINDS)
def test_on_two_ranks_it_is_the_same_bit_by_bit(two_ranks: RankPool, dtype: torch.dtype, name: str) -> None:
    lying = lying_plan(2, dtype, schedule=replace(TIGHT, room_bytes=2**20))
    two_ranks.run(same_bit_by_bit, chain_plan(2, Clip.UNKNOWN, dtype), lying, name)


def test_tied_weights_are_the_same_bit_by_bit() -> None:
    captured, late_graph, decisions = planned(1, on_host=True)
    lying = replace(decisions, clip=Clip.NONE, parameters=decisions.tiers)
    same_when_tied((captured, late_graph, decisions), (captured, rank_graph(captured.graph, lying), lying))


@pytest.mark.parametrize(("dtype", "name"), KINDS)
def test_the_first_and_the_second_step_stay_within_the_predicted_peak(dtype: torch.dtype, name: str) -> None:
    plan = lying_plan(1, dtype)
    foreseen, ((first, second), host) = predicted(plan, name), peaks(plan, name)
    assert first <= second <= foreseen.peak_bytes <= 1.01 * second + 512
    assert host <= foreseen.host_peak_bytes <= 1.01 * host + 4 * WIDTH * WIDTH


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_shards_stay_within_the_predicted_peak(two_ranks: RankPool) -> None:
    require_shards_foreseen(two_ranks, lying_plan(2))


def test_nearly_all_of_the_weights_leave_the_device() -> None:
    """All but the one that computes and, in backward, one that the step still reads."""
    there, away = (peaks(plan, "adamw-fused")[0][1] for plan in (chain_plan(1, Clip.NONE), lying_plan(1)))
    assert away <= there - (NUM_LAYERS - 2) * WIDTH * WIDTH * 4


def test_weights_are_in_the_pool_and_what_they_were() -> None:
    net, _ = installed(lying_plan(1))
    session = find_session(net)
    assert session is not None
    for (name, found), (_, plain) in zip(net.named_parameters(), chain().named_parameters(), strict=True):
        assert torch.equal(whole(found), plain)
        assert session.installed.steps.pool.owns(local(found)) == name.endswith("weight")


def test_evaluation_checkpoints_and_copies_work() -> None:
    plan = lying_plan(1)
    net, made = installed(plan)
    train(net, made, range(2))
    saved = copy.deepcopy((net.state_dict(), made.state_dict()))
    with torch.no_grad():
        evaluated = net.eval()(rows(5))["loss"]
    expected = train(net.train(), made, range(2, 4))
    other, other_made = installed(plan)
    other.load_state_dict(saved[0])
    other_made.load_state_dict(saved[1])
    with torch.no_grad():
        assert torch.equal(other.eval()(rows(5))["loss"], evaluated)
        assert torch.equal(copy.deepcopy(other)(rows(5))["loss"], evaluated)
    assert train(other.train(), other_made, range(2, 4)) == expected


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_on_two_ranks_evaluation_and_whole_checkpoints_work(two_ranks: RankPool) -> None:
    two_ranks.run(evaluates_and_loads, lying_plan(2))


def evaluates_and_loads(plan: Planned) -> None:
    net, made = installed(plan)
    train(net, made, range(2))
    plain = chain()
    plain.load_state_dict({name: whole(value) for name, value in net.state_dict().items()})
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(rows(5))["loss"], plain(rows(5))["loss"])
    net.load_state_dict(chain().state_dict())
    assert all(torch.equal(whole(a), b) for a, b in zip(net.parameters(), chain().parameters(), strict=True))


def test_a_copy_kept_for_backward_is_fetched_once() -> None:
    captured, graph, decisions = lying_plan(1)
    kept = replace(decisions, gathers=dict.fromkeys(decisions.parameters, Gather.KEEP))
    once = rank_graph(captured.graph, kept)
    assert [sum(n.op == "tier.reload" for n in g.nodes) for g in (graph, once)] == [2 * NUM_LAYERS - 1, NUM_LAYERS]
    same_bit_by_bit((captured, graph, decisions), (captured, once, kept), "adamw-fused")


def test_frozen_weights_lie_there_whatever_becomes_of_gradients() -> None:
    net = chain()
    net.layers[:4].requires_grad_(False)
    captured = capture(net, (rows(0),), {})
    frozen = captured.graph.inputs_of(InputKind.FROZEN)
    assert frozen
    decisions = batch_split(captured.graph, Mesh(("dp",), (1,)))
    decisions = replace(decisions, parameters=dict.fromkeys(frozen, Tier.HOST))
    losses = []
    for parameters in ({}, decisions.parameters):
        there, chosen = copy.deepcopy(net), replace(decisions, parameters=parameters)
        install(there, captured, rank_graph(captured.graph, chosen), chosen, room=ROOM)
        losses.append(train(there, torch.optim.AdamW(there.parameters(), lr=1e-2), range(3)))
    assert losses[0] == losses[1]


def test_what_backward_does_not_step_there_is_refused() -> None:
    captured, _, decisions = lying_plan(1)
    with pytest.raises(PlanError, match="expected clip none for `parameter layers.0.weight host`, found clip unknown"):
        rank_graph(captured.graph, replace(decisions, clip=Clip.UNKNOWN))
    with pytest.raises(PlanError, match="optimizer state of layers.0.weight on the host.*add `state layers.0.weight"):
        rank_graph(captured.graph, replace(decisions, tiers={}))


def test_a_host_without_room_for_the_weights_is_refused() -> None:
    with pytest.raises(PlanError, match="expected the host pool to stay within"):
        install(chain(), *lying_plan(1), room=Room(NUM_LAYERS * WIDTH * WIDTH * 4 - 1))
