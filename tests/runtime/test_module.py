"""The planned module trains like the plain one, under the user's own loop, and says clearly what it cannot do."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.distributed as dist
from tests.runtime.planned_net import Net, Planned, batch, built, copied_state, plain_steps, planned, planned_net
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardwright.ir import InputError, PlanError, ShardwrightError, StalePlanError
from shardwright.runtime.agreement import require_agreement
from shardwright.runtime.module import adopt
from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import RankPool

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def assert_same(found: nn.Module, expected: nn.Module, atol: float = 1e-6) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(whole(found.state_dict()[name]), value, rtol=1e-5, atol=atol, msg=name)


def gradients(plan: Planned) -> None:
    plain, net = built(), planned_net(plan)
    for seed in (0, 1):  # accumulates
        expected, found = plain(**batch(seed)), net(**batch(seed))
        assert type(found) is dict and type(found["loss"]) is torch.Tensor
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=0)
        torch.testing.assert_close(found["logits"], expected["logits"].detach(), rtol=1e-5, atol=1e-6)
        assert found["loss"].requires_grad and not found["logits"].requires_grad
        (expected["loss"] / 2).backward()
        (found["loss"] / 2).backward()  # type: ignore[no-untyped-call]
    for name, parameter in plain.named_parameters():
        mine = net.get_parameter(name)
        assert (parameter.grad is None) == (mine.grad is None), name
        if parameter.grad is not None and mine.grad is not None:
            assert isinstance(mine.grad, DTensor) and not mine.grad.requires_grad
            assert isinstance(mine, DTensor) and mine.grad.placements == mine.placements
            torch.testing.assert_close(whole(mine.grad), parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    assert_same(net, plain)  # the buffers


def made_before(plan: Planned) -> None:
    results = []
    for is_planned in (False, True):
        net = built()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        held = list(net.parameters())
        average.update_parameters(net)
        plain_steps(net, optimizer, [0])  # state from before planning moves over
        if is_planned:
            planned_net(plan, net, optimizer="adamw")
        norms = []
        for seed in (1, 2, 3):
            loss = net(**batch(seed))["loss"]
            optimizer.zero_grad()
            loss.backward()
            norms.append(float(whole(nn.utils.clip_grad_norm_(held, 0.1))))
            optimizer.step()
            scheduler.step()
            average.update_parameters(net)
        average.eval()
        with torch.no_grad():
            logits = average(batch(5)["ids"])["logits"]
        results.append((net, average, norms, optimizer.param_groups[0]["lr"], logits, optimizer))
    (plain, plain_average, *expected), (net, average, *found) = results
    assert found[0] == pytest.approx(expected[0], rel=1e-5) and found[1] == expected[1]
    torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-5)
    assert_same(net, plain, atol=1e-5)
    assert_same(average, plain_average, atol=1e-5)
    step = found[3].state[net.up.weight]
    assert isinstance(step["exp_avg"], DTensor) and step["exp_avg"].to_local().shape == (8, 8) and step["step"] == 4


def averages_by_hand(plan: Planned) -> None:
    found = []
    for is_planned in (False, True):
        net = built()
        average = copy.deepcopy(net)
        plain_steps(net, torch.optim.SGD(net.parameters(), lr=0.1), [0])
        if is_planned:
            adopt(average, planned_net(plan, net))
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), net.parameters(), strict=True):
                mean.mul_(0.5).add_(parameter, alpha=0.5)
        found.append(average)
    assert_same(found[1], found[0])


def class_stays(plan: Planned) -> None:
    net = planned_net(plan)
    assert isinstance(net, Net) and type(net).__name__ == "Net" and type(net).__qualname__ == Net.__qualname__
    assert inspect.signature(net.forward) == inspect.signature(built().forward)
    assert list(net.state_dict()) == list(built().state_dict())
    assert [n for n, _ in net.named_modules()] == [n for n, _ in built().named_modules()]
    rebuilt = net.__reduce_ex__(4)
    assert rebuilt[1][0] is Net and not [key for key in rebuilt[2] if "shardwright" in key]
    twin = copy.deepcopy(net)
    losses = plain_steps(twin, torch.optim.SGD(twin.parameters(), lr=0.1), [0, 1])
    plain = built()
    assert losses == pytest.approx(plain_steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [0, 1]), rel=1e-5)
    assert_same(net, built())  # the copy has values of its own


def other_forwards(plan: Planned) -> None:
    plain, net = built(), planned_net(plan)
    plain_steps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), [0])
    plain_steps(net, torch.optim.SGD(net.parameters(), lr=0.1), [0])
    for model in (plain, net):
        model.norm.eval()
        model.train(False)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found, expected = net(**batch(3, size=6)), plain(**batch(3, size=6))  # of any size
            for key in ("loss", "logits"):
                torch.testing.assert_close(found[key], expected[key], rtol=1e-5, atol=1e-6)
            assert net(batch(1)["ids"])["loss"] is None
    for model in (plain, net):  # fine-tuning under eval()
        model.zero_grad()
        model(**batch(4))["loss"].backward()
    for name, parameter in plain.named_parameters():
        grad = net.get_parameter(name).grad
        assert (grad is None) == (parameter.grad is None)
        if grad is not None:
            torch.testing.assert_close(whole(grad), parameter.grad, rtol=1e-5, atol=1e-6, msg=name)
    with torch.no_grad():
        net.train()
        assert not net(**batch(0))["loss"].requires_grad


def misuse(plan: Planned, kind: str) -> None:
    net = built()
    held = net.up.weight
    planned_net(plan, net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "different":
        net(**batch(dist.get_rank()))
    if kind == "shape":
        net(**batch(size=6))
    if kind == "part":
        net(**batch(size=4))
    if kind == "stale":
        held.sum()
    if kind == "replan":
        planned_net(plan, net)
    if kind == "unfrozen":
        net.mix.bias.requires_grad_(True)
        net(**batch())
    if kind == "schedule":
        require_agreement("collective schedule", ["same", f"all_reduce {dist.get_rank()}"])
    output = net(**batch())
    output["loss"].backward()
    if kind == "twice":
        output["loss"].backward()
    if kind == "dropped":
        assert "dropped" in repr(output["logits"])
        output["logits"].argmax(-1)
    if kind == "stepped":
        loss = net(**batch())["loss"]
        optimizer.step()
        loss.backward()


def optimizers(plan: Planned, kind: str) -> None:
    net = planned_net(plan, optimizer="sgd-momentum")
    if kind == "more":
        plain_steps(net, torch.optim.AdamW(net.parameters()), [0])
    if kind == "less":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.warns(UserWarning, match="sgd-momentum.*SGD keeps 0"):
            plain_steps(net, optimizer, [0])
        plain_steps(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), [0])
        plain_steps(net, optimizer, [0])


def loads_plain_optimizer_state(plan: Planned) -> None:
    plain = built()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain_steps(plain, reference, [0, 1])
    net = planned_net(plan, optimizer="adamw")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net.load_state_dict(copied_state(plain))
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    plain_steps(net, optimizer, [2])
    plain_steps(plain, reference, [2])
    assert_same(net, plain, atol=1e-5)


def test_loss_outputs_gradients_and_buffers_are_those_of_one_process(two_ranks: RankPool) -> None:
    two_ranks.run(gradients, planned(2))


def test_optimizer_scheduler_and_average_made_before_planning_go_on(two_ranks: RankPool) -> None:
    two_ranks.run(made_before, planned(2))


def test_an_average_made_by_hand_can_be_planned_with_its_model(two_ranks: RankPool) -> None:
    two_ranks.run(averages_by_hand, planned(2))


def test_class_names_signature_and_copies_stay(two_ranks: RankPool) -> None:
    two_ranks.run(class_stays, planned(2))


def test_eval_and_no_grad_run_the_models_own_forward(two_ranks: RankPool) -> None:
    two_ranks.run(other_forwards, planned(2))


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("different", InputError, "same global ids on every rank.*ranks 0 and 1.*shard_loader"),
        ("shape", InputError, r"ids of shape \[8\].*found \[6\].*pad or cut"),
        ("part", InputError, r"ids of shape \[8\].*found \[4\].*shard_loader"),
        ("stale", ShardwrightError, "before planning in sum.*model.parameters"),
        ("replan", PlanError, "found a Net that has one"),
        ("unfrozen", PlanError, "expected mix.bias frozen"),
        ("schedule", StalePlanError, "rank 1 has another.*entry 1: 'all_reduce 0' on rank 0, 'all_reduce 1' on rank 1"),
        ("twice", ShardwrightError, "one backward for each forward"),
        ("dropped", ShardwrightError, "output .logits.*drops it"),
        ("stepped", ShardwrightError, "written to before backward"),
    ],
)
def test_misuse_is_a_clear_error(two_ranks: RankPool, kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        two_ranks.run(misuse, planned(2, with_logits=kind != "dropped"), kind)


def test_an_optimizer_with_more_state_than_planned_is_refused(two_ranks: RankPool) -> None:
    with pytest.raises(PlanError, match="at most 1 state tensors.*sgd-momentum, found AdamW with 2"):
        two_ranks.run(optimizers, planned(2), "more")


def test_an_optimizer_with_less_state_than_planned_is_told_once(two_ranks: RankPool) -> None:
    two_ranks.run(optimizers, planned(2), "less")


def test_a_plain_optimizer_checkpoint_loads(two_ranks: RankPool) -> None:
    two_ranks.run(loads_plain_optimizer_state, planned(2))


def test_alone_without_a_process_group_training_is_that_of_the_plain_model() -> None:
    plain, net = built(), built()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    planned_net(planned(1), net)
    expected = plain_steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), [0, 1, 2], clip=0.1)
    assert plain_steps(net, optimizer, [0, 1, 2], clip=0.1) == pytest.approx(expected, rel=1e-5)
    assert_same(net, plain, atol=1e-5)
    assert not dist.is_initialized() and type(net.up.weight) is nn.Parameter
    copied = pickle.loads(pickle.dumps(net))
    assert type(copied) is Net
