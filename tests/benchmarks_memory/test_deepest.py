"""The benchmark of depth: bisection finds the limit, and what is on the host does not count as device memory."""

import pytest
import torch
from deepest_llama import deepest, deepest_linear
from depth_runs import DeviceMemory

from shardwright.runtime.host_pool import HostPool


@pytest.mark.parametrize("limit", range(20))
def test_bisection_finds_the_last_depth_that_fits_and_asks_few(limit: int) -> None:
    asked: list[int] = []

    def fits(depth: int) -> bool:
        asked.append(depth)
        return depth <= limit

    assert deepest(fits, 8, 20) == limit
    assert len(asked) <= 8 and len(set(asked)) == len(asked)


@pytest.mark.parametrize("budget", [0, 99, 100, 199, 200, 1234, 2050])
def test_extrapolation_finds_it_too_where_layers_are_nearly_alike(budget: int) -> None:
    def peak_bytes(depth: int) -> int:
        return 100 * depth + (40 if depth > 7 else 0)

    found = deepest_linear(peak_bytes, budget)
    assert found == max(depth for depth in range(30) if peak_bytes(depth) <= budget)


def test_only_storages_of_the_device_are_counted_resized_ones_too() -> None:
    pool = HostPool(1 << 20)
    buffer, state, held = pool.acquire(400), torch.zeros(100), torch.zeros(50)
    with DeviceMemory([held, state, buffer.data], {state.untyped_storage()._cdata}, pool.owns) as memory:
        assert memory.current_bytes == 200
        state.add_(1)
        buffer.data.fill_(0)
        assert memory.current_bytes == 200
        made = torch.zeros(25)
        assert memory.current_bytes == 300
        made.untyped_storage().resize_(1000)
        assert memory.current_bytes == 1200
        made.untyped_storage().resize_(0)
    assert memory.peak_bytes == 1200
