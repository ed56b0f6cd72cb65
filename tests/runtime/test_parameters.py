"""Parameters become shards; names, order, ties and checkpoints stay."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright.ir import Layout, Mesh, PlanError, Replicate, Shard, Strided
from shardwright.runtime.materialize import init_by_reset, materialize
from shardwright.runtime.parameters import Home, distribute, whole
from shardwright.runtime.ranks import RankPool, device_mesh, world

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

MESH = Mesh(("dp",), (2,))
SPLIT: dict[str, Layout] = {
    "embed.weight": (Shard(0),),
    "first.weight": (Shard(1),),
    "first.bias": (Shard(0),),
    "norm.weight": (Strided(0, 4),),
}


class Tied(nn.Module):
    """A tied pair, a frozen parameter, persistent and other buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.first = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.first.bias.requires_grad_(False)
        self.scale = Scale()


class Scale(nn.Module):
    ramp: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ramp", torch.arange(4.0), persistent=False)

    def reset_parameters(self) -> None:
        self.ramp.copy_(torch.arange(4.0))


def home(layouts: dict[str, Layout] = SPLIT, mesh: Mesh = MESH) -> Home:
    ranks = world()
    return Home(mesh, ranks.rank, ranks.device, device_mesh(mesh), layouts)


def built(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def shards() -> None:
    plain = built()
    module = built(seed=dist.get_rank())  # only rank 0's values count
    old = dict(module.named_parameters())
    replaced = distribute(module, home())
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert module.head.weight is module.embed.weight and not module.first.bias.requires_grad
    for name, expected in plain.named_parameters():
        found = module.get_parameter(name)
        assert isinstance(found, DTensor) and isinstance(found, nn.Parameter)
        assert replaced[old[name]] is found and old[name].numel() == 0
        local = found.to_local()
        parts = 2 if name in SPLIT else 1
        assert local.untyped_storage().nbytes() == expected.numel() * 4 // parts, name
        assert torch.equal(whole(found), expected), name


def loads_plain() -> None:
    module = built(1)
    distribute(module, home())
    expected = built(2).state_dict()
    module.load_state_dict(expected)
    twin = copy.deepcopy(module)
    for name, value in module.state_dict().items():
        assert torch.equal(whole(value), expected[name]), name
    twin.load_state_dict(built(3).state_dict())
    assert torch.equal(whole(twin.embed.weight), built(3).embed.weight)
    assert torch.equal(whole(module.embed.weight), expected["embed.weight"])


def from_meta(kind: str) -> None:
    expected = built(5)
    with torch.device("meta"):
        module = Tied()
    if kind == "init":
        materialize(module, home(), seed=5)
        torch.manual_seed(5)
        plain = Tied()
        torch.manual_seed(5)
        plain.apply(init_by_reset)
        expected = plain
    else:
        materialize(module, home(), state_dict=expected.state_dict())
    assert module.head.weight is module.embed.weight
    assert isinstance(module.embed.weight, DTensor) and module.embed.weight.to_local().shape == (8, 8)
    for name, value in expected.state_dict().items():
        assert torch.equal(whole(module.state_dict()[name]), value), name
    assert torch.equal(module.scale.ramp, torch.arange(4.0))


def unfilled() -> None:
    with torch.device("meta"):
        module = Tied()
    materialize(module, home(), init=lambda module: None)


def uneven() -> None:
    distribute(nn.Linear(3, 5), home({"weight": (Shard(0),)}))


def strided_under_split() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2))
    value = torch.arange(16.0 * 3).view(16, 3)
    for layout in ((Strided(0, 2), Shard(0)), (Shard(0), Strided(0, 4)), (Shard(0), Shard(0)), (Shard(0), Replicate())):
        module = nn.Linear(3, 16, bias=False)
        with torch.no_grad():
            module.weight.copy_(value)
        distribute(module, home({"weight": layout}, mesh))
        assert torch.equal(whole(module.weight), value), layout


def test_each_rank_holds_only_its_shard_of_rank_zeros_values(two_ranks: RankPool) -> None:
    two_ranks.run(shards)


def test_a_plain_checkpoint_loads_also_into_a_copy(two_ranks: RankPool) -> None:
    two_ranks.run(loads_plain)


@pytest.mark.parametrize("kind", ["init", "state dict"])
def test_from_meta_the_values_are_those_of_one_process(two_ranks: RankPool, kind: str) -> None:
    two_ranks.run(from_meta, kind)


def test_what_init_leaves_out_is_named(two_ranks: RankPool) -> None:
    with pytest.raises(PlanError, match="expected `init` to fill first.weight"):
        two_ranks.run(unfilled)


def test_an_uneven_split_is_refused(two_ranks: RankPool) -> None:
    with pytest.raises(PlanError, match=r"divides, found \[5, 3\] of weight"):
        two_ranks.run(uneven)


def test_strided_and_nested_splits_are_those_of_dtensor(four_ranks: RankPool) -> None:
    four_ranks.run(strided_under_split)
