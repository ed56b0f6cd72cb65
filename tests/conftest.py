"""Shared by all tests: gloo ranks that are started once a session, and the command line."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two cores are shared by the tests and their ranks

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwright.runtime.ranks import RankPool

CommandLine = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> CommandLine:
    """`run("show", "net.plan")` is the command in an empty folder, giving exit code, stdout, stderr."""
    from shardwright.planner.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        return int(exit_info.value.code or 0), out, err

    return call


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks; they start at the first `run`."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
