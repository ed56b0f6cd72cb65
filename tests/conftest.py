"""Shared by all tests: gloo ranks that are started once a session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores are shared by the tests and their ranks

from collections.abc import Iterator

import pytest

from shardwright.runtime.ranks import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks; they start at the first `run`."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
