"""A planned step whose activations go to disk: the same numbers, less of the host, and whole again after an error."""

import errno
import os
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.runtime.decided import batch_split
from torch import Tensor, nn

from shardwright.ir import DiskError, Fate, Mesh, PlanError, Schedule, Tier
from shardwright.passes.copies import buffer_bytes
from shardwright.passes.pipeline import rank_graph
from shardwright.runtime.agreement import raise_everywhere
from shardwright.runtime.capture import capture
from shardwright.runtime.captured import Captured
from shardwright.runtime.copies import Copies
from shardwright.runtime.disk_copies import DiskCopies
from shardwright.runtime.engines import Room
from shardwright.runtime.module import install
from shardwright.runtime.ranks import RankPool, world
from shardwright.runtime.session import find_session

MIB = 2**20
ROWS, WIDTH, DEPTH = 256, 128, 6
RELU_BYTES = ROWS * WIDTH * 4


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).relu()
        return {"loss": x.square().mean()}


def data(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


@cache
def captured_deep() -> Captured:
    return capture(Deep(), (data(),), {})


def planned(moved: Tier | None, room: Room) -> Deep:
    """Every relu kept, or moved to a tier."""
    captured = captured_deep()
    relus = [n.name for n in captured.graph.nodes if n.op == "aten.relu.default"]
    decisions = batch_split(captured.graph, Mesh(("dp",), (1,)))
    schedule = Schedule(room_bytes=2**30)
    decisions = replace(decisions, schedule=schedule)
    if moved is not None:
        tiers = dict.fromkeys(relus, moved) if moved is Tier.DISK else {}
        decisions = replace(decisions, fates=dict.fromkeys(relus, Fate.OFFLOAD), tiers=tiers)
    net = Deep()
    install(net, captured, rank_graph(captured.graph, decisions), decisions, room=room)
    return net


def steps(net: Deep, optimizer: torch.optim.Optimizer, seeds: tuple[int, ...]) -> list[Tensor]:
    """The user's loop: losses, then parameters."""
    losses = []
    for seed in seeds:
        optimizer.zero_grad()
        loss = net(data(seed))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in net.parameters())]


def adam(net: Deep) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def engines_of(net: Deep) -> tuple[Copies, DiskCopies | None]:
    session = find_session(net)
    assert session is not None
    module = session.installed.program.forward_module
    return getattr(module, "copies", None), getattr(module, "disk", None)  # type: ignore[return-value]


def test_moved_to_disk_or_host_it_trains_bitwise_as_kept_and_the_disk_spares_the_host(tmp_path: Path) -> None:
    room = Room(4 * MIB, 4 * MIB, disk_path=tmp_path)
    nets = {moved: planned(moved, room) for moved in (None, Tier.HOST, Tier.DISK)}
    found = {moved: steps(net, adam(net), (0, 1, 2)) for moved, net in nets.items()}
    for moved in (Tier.HOST, Tier.DISK):
        assert all(torch.equal(a, b) for a, b in zip(found[moved], found[None], strict=True))
    host, disk = engines_of(nets[Tier.HOST])[0], engines_of(nets[Tier.DISK])[1]
    assert disk is not None and list(tmp_path.iterdir()) == []
    assert host.pool.peak_bytes == DEPTH * RELU_BYTES
    assert disk.pool.peak_bytes == buffer_bytes([RELU_BYTES]) < host.pool.peak_bytes / 2
    assert disk.file.peak_bytes == disk.file.held_bytes == DEPTH * RELU_BYTES
    assert disk.file.used_bytes == 0 and disk.file.is_direct


@pytest.mark.parametrize("broken", ["pwrite", "preadv"])
@pytest.mark.parametrize("number", [0, 3])
def test_an_error_in_mid_step_leaves_the_training_state_and_the_next_step_works(
    broken: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In forward (a write) or in backward (a read), at the first copy or later; then the disk is well again."""
    net = planned(Tier.DISK, Room(MIB, 4 * MIB, disk_path=tmp_path))
    twin = planned(None, Room())
    optimizer, twins = adam(net), adam(twin)
    steps(net, optimizer, (0,)), steps(twin, twins, (0,))
    before = [p.detach().clone() for p in net.parameters()]
    state = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
    calls, real = [0], getattr(os, broken)

    def fails(*call: object) -> int:
        calls[0] += 1
        if calls[0] > number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*call)  # type: ignore[no-any-return]

    optimizer.zero_grad()
    with monkeypatch.context() as ill:
        ill.setattr(os, broken, fails)
        with pytest.raises(DiskError, match=f"{tmp_path}, found: Input/output error"):
            net(data(1))["loss"].backward()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    after = [value for entry in optimizer.state.values() for value in entry.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    again, expected = steps(net, optimizer, (1, 2)), steps(twin, twins, (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    _, disk = engines_of(net)
    assert disk is not None and disk.file.used_bytes == 0


def test_no_directory_no_room_or_no_budget_is_refused_when_the_plan_is_put_on(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(DiskError, match="expected a directory for the disk tier at .*/nowhere, found none"):
        planned(Tier.DISK, Room(MIB, 4 * MIB, disk_path=tmp_path / "nowhere"))
    with pytest.raises(PlanError, match="disk tier to stay within 0 bytes"):
        planned(Tier.DISK, Room(MIB, 0, disk_path=tmp_path))
    with pytest.raises(PlanError, match="host pool to stay within 100 bytes"):
        planned(Tier.DISK, Room(100, 4 * MIB, disk_path=tmp_path))
    assert set(threading.enumerate()) <= before


def test_by_default_the_file_is_where_the_cluster_says_or_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, disk = engines_of(planned(Tier.DISK, Room(MIB, 4 * MIB, cluster="cpu:1")))
    assert disk is not None and disk.file.directory == tmp_path / "cache" / "shardwright" / "disk"
    with pytest.warns(UserWarning, match="cluster 'gone.toml' cannot be read here"):
        _, disk = engines_of(planned(Tier.DISK, Room(MIB, 4 * MIB, cluster="gone.toml")))
    assert disk is not None and disk.file.directory == tmp_path / "cache" / "shardwright" / "disk"


def full_on_the_second() -> str:
    try:
        raise_everywhere(DiskError("the disk is full") if world().rank == 1 else None)
    except DiskError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_a_full_disk_on_one_rank_is_told_to_all(two_ranks: RankPool) -> None:
    assert two_ranks.run(full_on_the_second) == ["on rank 1: the disk is full", "the disk is full"]
