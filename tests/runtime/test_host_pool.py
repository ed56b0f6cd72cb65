"""The pool hands out what fits, uses buffers again, and says what it holds."""

import threading

import pytest
import torch

from shardwright.ir import PlanError
from shardwright.runtime.host_pool import HostPool


def test_a_returned_buffer_is_the_next_one_of_its_size() -> None:
    pool = HostPool(100)
    first = pool.acquire(40)
    pool.release(first)
    assert pool.acquire(40) is first
    assert (pool.used_bytes, pool.held_bytes, pool.peak_bytes) == (40, 40, 40)


def test_beyond_the_budget_is_an_error_with_figures_and_leaves_the_pool_as_it_was() -> None:
    pool = HostPool(100)
    kept = pool.acquire(70)
    with pytest.raises(PlanError, match="within 100 bytes, found 40 more wanted with 70 in use"):
        pool.acquire(40)
    assert (pool.used_bytes, pool.held_bytes) == (70, 70)
    pool.release(kept)
    assert pool.acquire(100).num_bytes == 100


def test_free_buffers_of_other_sizes_make_room_and_peak_counts_only_use() -> None:
    pool = HostPool(100)
    for num_bytes in (60, 90, 30):
        pool.release(pool.acquire(num_bytes))
    assert pool.held_bytes <= 100 and pool.used_bytes == 0 and pool.peak_bytes == 90


def test_no_more_is_discarded_than_the_room_that_is_needed() -> None:
    pool = HostPool(100)
    pool.reserve([30, 30, 30])
    pool.acquire(40)
    assert pool.held_bytes == 100


def test_reserve_makes_what_is_missing_within_the_budget() -> None:
    pool = HostPool(100)
    pool.reserve([30, 30])
    pool.reserve([30, 30, 20])
    assert (pool.held_bytes, pool.used_bytes) == (80, 0)
    pool.reserve([50])
    assert pool.held_bytes == 80
    pool.acquire(30), pool.acquire(30)
    assert pool.held_bytes == 80


def test_owns_tells_its_buffers_and_their_views_from_other_tensors() -> None:
    pool = HostPool(100)
    buffer = pool.acquire(40)
    assert pool.owns(buffer.data.view(torch.float32)[3:])
    assert not pool.owns(torch.empty(40))


def test_buffers_may_come_back_from_other_threads() -> None:
    pool = HostPool(4000)
    buffers = [pool.acquire(10) for _ in range(400)]
    threads = [threading.Thread(target=lambda part=at: list(map(pool.release, buffers[part::4]))) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.used_bytes == 0
    assert {id(pool.acquire(10)) for _ in range(400)} == {id(buffer) for buffer in buffers}


def test_close_frees_what_is_not_in_use() -> None:
    pool = HostPool(100)
    kept = pool.acquire(40)
    pool.reserve([50])
    pool.close()
    assert pool.held_bytes == kept.num_bytes == 40


def test_adopted_memory_counts_until_it_dies_and_stays_within_the_budget() -> None:
    pool = HostPool(1000)
    state = torch.zeros(200)
    pool.adopt(state)
    pool.adopt(state.view(2, 100))
    assert pool.used_bytes == pool.held_bytes == 800 and pool.owns(state)
    with pytest.raises(PlanError, match="within 1000 bytes, found 400 more"):
        pool.adopt(torch.zeros(100))
    with pytest.raises(PlanError, match="within 1000 bytes"):
        pool.acquire(300)
    del state
    assert pool.used_bytes == 0 and pool.peak_bytes == 800
    pool.release(pool.acquire(300))
