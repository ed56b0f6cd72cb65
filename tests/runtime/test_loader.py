"""`shard_loader` gives each rank its part of every global batch; training on parts is training on the global ones."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.runtime.planned_net import BATCH, Planned, batch, built, planned, planned_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from shardwright.ir import InputError
from shardwright.runtime.inputs import LocalPart
from shardwright.runtime.ranks import RankPool
from shardwright.runtime.shard_loader import shard_loader

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


class Samples(Dataset[dict[str, Tensor]]):
    """Counts what is read."""

    def __init__(self, size: int = 24) -> None:
        self.whole = batch(size=size)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.whole["ids"])

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        self.reads += 1
        return {name: value[at] for name, value in self.whole.items()}


class Once:
    """Global batches of an iterable."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for seed in range(3):
            yield batch(seed)


def trains(plan: Planned, kind: str) -> None:
    samples = Samples()
    seeded = torch.Generator().manual_seed(1)
    loader: object = Once() if kind == "iterable" else DataLoader(samples, BATCH, shuffle=True, generator=seeded)
    twin = torch.Generator().manual_seed(1)
    globals_: object = Once() if kind == "iterable" else DataLoader(Samples(), BATCH, shuffle=True, generator=twin)
    plain, net = built(), planned_net(plan)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, net)]
    count = 0
    for part, everything in zip(shard_loader(loader, net), globals_, strict=True):  # type: ignore[arg-type, call-overload]
        assert isinstance(part["ids"], LocalPart) and part["ids"].shape == (BATCH // 2,)
        found, expected = net(**part), plain(**everything)
        torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5, atol=0)
        assert type(found["loss"]) is Tensor and found["logits"].shape == (BATCH // 2, 12)
        own = expected["logits"].detach().chunk(2)[dist.get_rank()]
        torch.testing.assert_close(found["logits"], own, rtol=1e-5, atol=1e-6)
        for output, optimizer in zip((found, expected), optimizers, strict=True):
            optimizer.zero_grad()
            output["loss"].backward()
            optimizer.step()
        _evaluate(net, plain, part, everything)
        count += 1
    assert count == 3
    assert samples.reads == (0 if kind == "iterable" else 12)  # half of 24


def _evaluate(net: nn.Module, plain: nn.Module, part: dict[str, Tensor], everything: dict[str, Tensor]) -> None:
    for model in (net, plain):
        model.eval()
    with torch.no_grad():
        found, expected = net(**part), plain(**everything)
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-5, atol=0)
    own = expected["logits"].chunk(2)[dist.get_rank()]
    torch.testing.assert_close(found["logits"], own, rtol=1e-5, atol=1e-6)
    for model in (net, plain):
        model.train()


def local_by_option(plan: Planned) -> None:
    net = planned_net(plan, inputs="local")
    plain = built()
    whole = batch()
    part = {name: value.chunk(2)[dist.get_rank()] for name, value in whole.items()}
    torch.testing.assert_close(net(**part)["loss"], plain(**whole)["loss"], rtol=1e-5, atol=0)
    with pytest.raises(InputError, match="without inputs='local'"):
        net(**whole)


def before_planning(plan: Planned) -> None:
    net = built()
    shapes = []
    for number, part in enumerate(shard_loader(Once(), net)):
        shapes.append(tuple(part["ids"].shape))  # type: ignore[index]
        if number == 0:
            planned_net(plan, net)
    assert shapes == [(8,), (4,), (4,)]


def uneven(plan: Planned) -> None:
    for _ in shard_loader(DataLoader(Samples(11), BATCH), planned_net(plan)):
        pass


def unlike(plan: Planned) -> None:
    seeded = torch.Generator().manual_seed(dist.get_rank())
    for _ in shard_loader(DataLoader(Samples(), BATCH, shuffle=True, generator=seeded), planned_net(plan)):
        pass


@pytest.mark.parametrize("kind", ["data loader", "iterable"])
def test_training_on_parts_is_training_on_the_global_batch(two_ranks: RankPool, kind: str) -> None:
    two_ranks.run(trains, planned(2), kind)


def test_parts_may_be_handed_in_by_option(two_ranks: RankPool) -> None:
    two_ranks.run(local_by_option, planned(2))


def test_before_planning_batches_are_whole(two_ranks: RankPool) -> None:
    two_ranks.run(before_planning, planned(2))


def test_a_last_batch_that_does_not_divide_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(InputError, match=r"expected the batch to divide.*dim 0 by 2.*found \[3\]; drop the last"):
        two_ranks.run(uneven, planned(2))


def test_samplers_seeded_differently_are_an_error(two_ranks: RankPool) -> None:
    with pytest.raises(InputError, match="same samples.*rank 1.*generator"):
        two_ranks.run(unlike, planned(2))
