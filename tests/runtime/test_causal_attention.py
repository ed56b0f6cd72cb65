"""Decoders called without a mask are captured with causal attention, and only where that is the same function."""

import pytest
import torch
from tests.runtime.interpret import differences, graph_step
from tests.zoo.models import ZOO, Example
from transformers import LlamaForCausalLM

from shardwright.ir import Graph
from shardwright.runtime import causal_attention
from shardwright.runtime.capture import capture

ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def masks(graph: Graph) -> list[bool]:
    """For each attention of the graph: whether it reads a mask."""
    return ["attn_mask" in dict(node.kwargs) for node in graph.nodes if node.op == ATTENTION]


def is_causal(graph: Graph) -> list[bool]:
    return [len(node.args) > 4 and node.args[4] is True for node in graph.nodes if node.op == ATTENTION]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_both_ways_give_the_same_loss_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args, kwargs = example = ZOO[name]()
    plain = capture(module, args, kwargs)
    monkeypatch.setattr(causal_attention, "_says_nothing", lambda *_: False)
    explicit = capture(module, args, kwargs)
    assert masks(plain.graph) == [False, False] and is_causal(plain.graph) == [True, True]
    assert masks(explicit.graph) == [True, True]
    assert len(plain.graph.nodes) < len(explicit.graph.nodes)
    assert differences(graph_step(plain, example), graph_step(explicit, example), 1e-5) == []


def with_inputs(example: Example, **more: torch.Tensor) -> Example:
    module, args, kwargs = example
    return module, args, {**kwargs, **more}


def test_key_and_value_heads_are_not_repeated() -> None:
    graph = capture(*ZOO["llama"]()).graph
    attention = next(node for node in graph.nodes if node.op == ATTENTION)
    assert [graph.types[name].shape[1] for name in attention.operands] == [4, 2, 2]


def test_a_padding_mask_stays() -> None:
    mask = torch.ones(4, 16, dtype=torch.long)
    assert masks(capture(*with_inputs(ZOO["llama"](), attention_mask=mask)).graph) == [True, True]


def test_positions_handed_in_may_be_packed_so_the_mask_stays() -> None:
    positions = torch.arange(16).remainder(8).expand(4, 16)
    assert masks(capture(*with_inputs(ZOO["llama"](), position_ids=positions)).graph) == [True, True]


@pytest.mark.parametrize(("window", "expected"), [(8, [True, True]), (16, [False, False])])
def test_a_window_shorter_than_the_sequence_stays(window: int, expected: list[bool]) -> None:
    module, args, kwargs = ZOO["mixtral"]()
    module.config.sliding_window = window  # type: ignore[union-attr]
    assert masks(capture(module, args, kwargs).graph) == expected


def test_bidirectional_attention_without_padding_has_no_mask() -> None:
    graph = capture(*ZOO["bert"]()).graph
    assert masks(graph) == [False, False] and is_causal(graph) == [False, False]


def test_soft_capped_attention_is_left_as_it_is() -> None:
    assert masks(capture(*ZOO["gemma2"]()).graph) == []


class Mine(LlamaForCausalLM):  # type: ignore[misc]
    """A user's subclass, in a file that says nothing about attention."""


def test_a_subclass_in_another_file_is_captured_as_its_base() -> None:
    module, args, kwargs = ZOO["llama"]()
    graph = capture(Mine(module.config), args, kwargs).graph
    assert masks(graph) == [False, False] and is_causal(graph) == [True, True]


BY_NAME = "if config._attn_" + "implementation == 'sdpa': ..."  # in two parts: this file is read, too
FORBIDDEN = "allow_is_" + "causal_skip=False"


@pytest.mark.parametrize("code", [BY_NAME, FORBIDDEN, None])
def test_a_subclass_with_ways_of_its_own_keeps_the_mask(code: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: its source cannot be read."""
    module, args, kwargs = ZOO["llama"]()
    read = causal_attention._source_of
    monkeypatch.setattr(causal_attention, "_source_of", lambda name: code if name == __name__ else read(name))
    assert masks(capture(Mine(module.config), args, kwargs).graph) == [True, True]
