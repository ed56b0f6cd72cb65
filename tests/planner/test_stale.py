"""A plan for something else is refused before anything is installed, and the message names the fields that differ."""

from functools import cache

import pytest
import torch
from tests.planner.command_line import build_decoder
from tests.planner.fast_host import fast_host
from torch import nn

from shardwright.ir import Mesh, StalePlanError, StoredPlan
from shardwright.planner.api import apply, plan


@cache
def planned(num_ranks: int) -> StoredPlan:
    module, args = build_decoder()
    cluster, mesh = fast_host(num_ranks), Mesh(("dp",), (num_ranks,))
    return plan(module, args, cluster=cluster, budget="1GiB", mesh=mesh, time_limit=20)


def refused(module: nn.Module, args: tuple[torch.Tensor, ...], num_ranks: int = 1) -> str:
    """The message; the module must be as it was."""
    before = dict(module.named_parameters())
    with pytest.raises(StalePlanError) as found:
        apply(module, planned(num_ranks), args)
    after = dict(module.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    return str(found.value)


def test_the_model_it_was_made_for_is_accepted() -> None:
    module, args = build_decoder()
    loss = apply(module, planned(1), args)(*args)
    assert loss.isfinite()


def test_another_sequence_length_names_the_input() -> None:
    text = refused(*build_decoder(length=16))
    assert "input tokens: planned i64[8, 32], found i64[8, 16]" in text


def test_another_dtype_names_it() -> None:
    module, args = build_decoder()
    assert "dtype: planned float32, found float64" in refused(module.double(), args)


def test_another_world_names_its_size() -> None:
    assert "world size: planned 2 ranks, mesh (dp=2); found 1" in refused(*build_decoder(), num_ranks=2)


def test_another_width_names_parameters() -> None:
    text = refused(*build_decoder(width=64))
    assert "parameter tokens.weight: planned f32[64, 32], found f32[64, 64]" in text


def test_other_code_with_the_same_parameters_names_the_first_line_of_the_graph_that_differs() -> None:
    module, args = build_decoder()
    module.layers[0].norm1.eps = 1e-3  # type: ignore[union-attr, index]
    text = refused(module, args)
    assert "graph line" in text
    assert "0.001" in text
