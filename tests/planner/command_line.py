"""The command line inside the test's own process, and a cluster file and a target for it."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.planner.fast_host import fast_host
from tests.planner.measured_step import Size, llama
from tests.zoo.transformer import Decoder
from torch import Tensor, nn, randint

from shardwright.ir.cluster_text import print_cluster

__all__ = ["NET", "SMALL", "Command", "build_decoder", "build_llama", "command"]

Command = Callable[..., tuple[int, str, str]]
"""Arguments to exit code, stdout, stderr."""
SMALL = Size(num_layers=2)
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()

def build():
    return Net(), (torch.zeros(32, 64),)
"""
"""A file with a target that needs no measuring on a preset cluster."""


def build_llama() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    return llama(SMALL)


def build_decoder(length: int = 32, width: int = 32) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    tokens = randint(64, (8, length))
    return Decoder(64, width, 4, 64, 2, 32), (tokens, tokens)


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> Command:
    """Runs in `folder`, where `two.toml` is a cluster of two ranks."""
    monkeypatch.chdir(folder)
    Path("two.toml").write_text(print_cluster(fast_host()))

    def call(*arguments: str) -> tuple[int, str, str]:
        from shardwright.planner.cli import main

        monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
        with pytest.raises(SystemExit) as exit_info:
            main()
        out, err = capsys.readouterr()
        return int(exit_info.value.code or 0), out, err

    return call
