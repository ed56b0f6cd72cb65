"""Parameters stepped on the host while backward goes on: the same numbers bit by bit, less memory, what is refused."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from tests.runtime.decided import batch_split
from tests.runtime.planned_net import Planned, batch, built, plain_steps, planned, planned_net
from tests.tracker import StorageTracker
from torch import Tensor, nn

from shardwright.ir import Clip, Mesh, PlanError, Schedule, Shard, ShardwrightError, Tier
from shardwright.passes.footprint import Footprint, footprint
from shardwright.passes.optimizers import StepKind, optimizer_spec
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.capture import capture
from shardwright.runtime.engines import Room
from shardwright.runtime.host_pool import HostPool
from shardwright.runtime.module import install
from shardwright.runtime.optimizer import TieredOptimizer, optimizer
from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import RankPool
from shardwright.runtime.session import find_session

WIDTH, NUM_LAYERS, ROWS = 64, 8, 4
ROOM = Room(2**22)
TIGHT = Schedule(bucket_bytes=0, reduce_bytes=WIDTH * WIDTH * 4)
"""No buckets; one gradient on its way at a time."""
BUCKETS = Schedule(bucket_bytes=3 * WIDTH * WIDTH * 4)


class Chain(nn.Module):
    """Weights larger than activations; a few small parameters whose state stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return {"loss": x.square().mean()}


def chain(dtype: torch.dtype = torch.float32) -> Chain:
    torch.manual_seed(0)
    return Chain().to(dtype)


def rows(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def chain_plan(
    num_ranks: int,
    clip: Clip,
    dtype: torch.dtype = torch.float32,
    on_host: bool = True,
    schedule: Schedule = TIGHT,
) -> Planned:
    captured = capture(chain(dtype), (rows(0, dtype),), {})
    weights = [f"layers.{i}.weight" for i in range(NUM_LAYERS)]
    at_rest = dict.fromkeys(weights, (Shard(0),)) if num_ranks > 1 else {}
    tiers = dict.fromkeys(weights, Tier.HOST) if on_host else {}
    decisions = batch_split(captured.graph, Mesh(("dp",), (num_ranks,)), at_rest, tiers)
    decisions = replace(decisions, clip=clip, schedule=schedule)
    return captured, rank_graph(captured.graph, decisions), decisions


def installed(plan: Planned, name: str = "adamw-fused") -> tuple[Chain, TieredOptimizer]:
    net = chain(plan[0].dtype)
    install(net, *plan, room=ROOM, optimizer=name)
    made = optimizer(net, torch.optim.AdamW, lr=1e-2)
    assert isinstance(made, TieredOptimizer)
    return net, made


def backward(net: nn.Module, seed: int = 0) -> float:
    loss = net(rows(seed, next(net.parameters()).dtype))["loss"]
    loss.backward()
    return float(loss.detach())


def train(net: nn.Module, made: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        made.zero_grad()
        losses.append(backward(net, seed))
        made.step()
    return losses


def same_bit_by_bit(late_plan: Planned, early_plan: Planned, name: str) -> None:
    late, early = (installed(plan, name) for plan in (late_plan, early_plan))
    for seeds in (range(3), range(3, 5)):
        assert train(*late, seeds) == train(*early, seeds)
        for one, other in zip(late[0].parameters(), early[0].parameters(), strict=True):
            assert torch.equal(whole(one), whole(other))
        # In between the state goes through a checkpoint, on both sides.
        for _, made in (late, early):
            made.load_state_dict(copy.deepcopy(made.state_dict()))
    one, other = (made.state_dict()["state"] for _, made in (late, early))
    assert one.keys() == other.keys()
    for index, state in one.items():
        assert state.keys() == other[index].keys()
        assert all(torch.equal(whole(value), whole(other[index][key])) for key, value in state.items())


def peaks(plan: Planned, name: str, num_steps: int = 2) -> tuple[list[int], int]:
    """Device bytes at most in each step, the first without state; and the most that the host pool had in use."""
    net, made = installed(plan, name) if plan[2].tiers else device_only(plan, name)
    session = find_session(net)
    assert session is not None
    pool = session.installed.steps.pool
    found = []
    for seed in range(num_steps):
        made.zero_grad()
        batch = rows(seed, plan[0].dtype)
        state = [v for s in made.state.values() for v in s.values() if isinstance(v, Tensor)]
        held = [getattr(t, "_local_tensor", t) for t in (*net.parameters(), *state)]
        with StorageTracker(held, excluded=partial(_not_on_device, pool, batch)) as tracker:
            loss = net(batch)["loss"]
            loss.backward()
            del loss
            made.step()
        found.append(tracker.peak_bytes)
    return found, pool.peak_bytes


def _not_on_device(pool: HostPool, batch: Tensor, found: Tensor) -> bool:
    """The batch is the script's; the program has its own part."""
    storages = (found.untyped_storage(), batch.untyped_storage())
    return found.is_meta or pool.owns(found) or storages[0].data_ptr() == storages[1].data_ptr()


def device_only(plan: Planned, name: str) -> tuple[Chain, torch.optim.Optimizer]:
    net = chain(plan[0].dtype)
    install(net, *plan, room=ROOM, optimizer=name)
    return net, optimizer(net, torch.optim.AdamW, lr=1e-2)


def predicted(plan: Planned, name: str) -> Footprint:
    _, graph, decisions = plan
    return footprint(graph, optimizer_spec(name), StepKind.FUSED, decisions.tiers, block_bytes=1)


KINDS = [(torch.float32, "adamw-fused"), (torch.bfloat16, "adamw-master")]


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
    """Of later steps the least: gloo's threads sometimes hold what they have sent a moment longer."""
    for clip in Clip:
        plan = chain_plan(2, clip)
        foreseen = predicted(plan, "adamw-fused")
        for (_, *later), host in two_ranks.run(peaks, plan, "adamw-fused", 4):
            assert min(later) <= foreseen.peak_bytes <= 1.01 * min(later)
            assert host <= foreseen.host_peak_bytes


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


def tied_and_buffered(late_plan: Planned, early_plan: Planned) -> None:
    """Tied weights, whose gradient is final at the end, and a net that evaluates between steps."""
    nets = [planned_net(plan, built(), optimizer="adamw-fused") for plan in (late_plan, early_plan)]
    mades = [optimizer(net, torch.optim.AdamW, lr=1e-2) for net in nets]
    for seed in range(3):
        assert plain_steps(nets[0], mades[0], [seed]) == plain_steps(nets[1], mades[1], [seed])
        outputs = []
        for net in nets:
            net.eval()
            with torch.no_grad():
                outputs.append(net(**batch(seed))["logits"])
            net.train()
        assert torch.equal(*outputs)


def test_tied_weights_step_the_same_bit_by_bit() -> None:
    captured, _, decisions = planned(1, on_host=True)
    plans = [
        (captured, rank_graph(captured.graph, replace(decisions, clip=clip)), replace(decisions, clip=clip))
        for clip in Clip
    ]
    tied_and_buffered(*plans)
