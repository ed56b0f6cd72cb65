"""Ranks start, compute together, report failures with their number, and leave nothing behind."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from shardwright.ir import InputError, Mesh, PlanError, TargetError
from shardwright.runtime.ranks import RankError, RankPool, device_mesh, group_names, run_ranks, world

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


def total_of(start: int) -> tuple[int, int, str]:
    number = torch.tensor(start + dist.get_rank())
    dist.all_reduce(number)
    return int(number), world().size, os.environ["OMP_NUM_THREADS"]


def fail_on_one(kind: str) -> None:
    if dist.get_rank() == 1 and kind == "hang others":
        raise ValueError("seven is not eight")
    if kind == "ours":
        raise InputError("expected a batch")
    if kind == "die" and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep_long() -> None:
    time.sleep(600)


def process_id() -> int:
    return os.getpid()


def axis_sums() -> dict[str, float]:
    devices = device_mesh(Mesh(("dp", "tp"), (2, 2)))
    found = {}
    for axis, name in group_names(devices).items():
        value = torch.ops._c10d_functional.all_reduce(torch.tensor(float(dist.get_rank())), "sum", name)
        found[axis] = float(torch.ops._c10d_functional.wait_tensor(value))
    return found


def wrong_mesh() -> None:
    device_mesh(Mesh(("dp",), (3,)))


def test_one_process_without_a_launcher_is_a_world_of_one() -> None:
    ranks = world()
    assert (ranks.rank, ranks.size) == (0, 1) and not dist.is_initialized()


def test_ranks_reduce_together_with_one_thread_each(two_ranks: RankPool) -> None:
    assert two_ranks.run(total_of, 10) == [(21, 2, "1"), (21, 2, "1")]


def test_an_error_of_one_rank_is_raised_with_its_number_and_traceback_and_the_pool_goes_on() -> None:
    with RankPool(2, grace_seconds=0.5) as pool:
        with pytest.raises(RankError, match=r"rank 1: ValueError: seven is not eight(.|\n)*fail_on_one"):
            pool.run(fail_on_one, "hang others")
        with pytest.raises(RankError, match=r"rank 1: the process ended with exit status 3"):
            pool.run(fail_on_one, "die")
        assert pool.run(total_of, 0)[0][0] == 1


def test_an_error_of_ours_on_all_ranks_keeps_its_class_and_the_processes(two_ranks: RankPool) -> None:
    before = two_ranks.run(process_id)
    with pytest.raises(InputError, match=r"rank \d: expected a batch"):
        two_ranks.run(fail_on_one, "ours")
    assert two_ranks.run(process_id) == before


def test_after_the_time_limit_every_rank_is_gone() -> None:
    with RankPool(2) as pool:
        numbers = pool.run(process_id)
        with pytest.raises(RankError, match="within 0.5 s, rank 0, 1 did not"):
            pool.run(sleep_long, timeout_seconds=0.5)
        for number in numbers:
            with pytest.raises(ProcessLookupError):
                os.kill(number, 0)


def test_a_nested_function_is_refused() -> None:
    with pytest.raises(TargetError, match="top level"):
        run_ranks(2, lambda: None)


def test_groups_of_a_mesh_are_found_by_axis(four_ranks: RankPool) -> None:
    rows = four_ranks.run(axis_sums)
    assert rows == [
        {"dp": 2.0, "tp": 1.0},
        {"dp": 4.0, "tp": 1.0},
        {"dp": 2.0, "tp": 5.0},
        {"dp": 4.0, "tp": 5.0},
    ]


def test_a_mesh_of_another_size_is_refused(two_ranks: RankPool) -> None:
    with pytest.raises(PlanError, match=r"expected 3 ranks.*found 2"):
        two_ranks.run(wrong_mesh)
