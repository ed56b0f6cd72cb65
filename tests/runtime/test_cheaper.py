"""Rewrites of autograd's formulas: the operators they replace are gone, and the gradients are those of PyTorch."""

from collections import Counter

import torch
from tests.runtime.interpret import differences, eager_step, graph_step
from tests.zoo.models import Example
from torch import Tensor, nn

from shardwright.ir import Graph
from shardwright.runtime.capture import capture

HALF = 4


class Net(nn.Module):
    """RMS norm and rotation of halves, as in most language models; the second pair of slices does not tile."""

    def __init__(self, gap: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * HALF, 2 * HALF)
        self.gap = gap

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        rotated = torch.cat((-x[..., HALF:], x[..., : HALF - self.gap]), dim=-1)
        return (rotated * torch.arange(rotated.shape[-1])).sin().sum()


def captured_ops(module: nn.Module) -> tuple[Counter[str], Graph]:
    example: Example = (module, (torch.randn(3, 5, 2 * HALF),), {})
    captured = capture(*example)
    assert differences(graph_step(captured, example), eager_step(captured, example), 1e-6) == []
    return Counter(node.op for node in captured.graph.nodes), captured.graph


def test_slices_that_tile_a_dim_are_joined_instead_of_padded_and_added() -> None:
    ops, _ = captured_ops(Net())
    assert ops["aten.slice_backward.default"] == 0
    assert ops["aten.cat.default"] == 2, "forward's and that of the gradient"


def test_slices_that_leave_a_gap_stay_as_they_are() -> None:
    ops, _ = captured_ops(Net(gap=1))
    assert ops["aten.slice_backward.default"] == 2


def test_the_gradient_of_a_mean_divides_before_it_expands() -> None:
    _, graph = captured_ops(Net())
    divided = [node.operands[0] for node in graph.nodes if node.op == "aten.div.Scalar"]
    assert len(divided) == 2, "forward's mean and its gradient"
    assert all(graph.types[name].shape == (3, 5, 1) for name in divided)


def test_a_first_power_is_its_base() -> None:
    _, graph = captured_ops(Net())
    assert [node.args[1] for node in graph.nodes if node.op == "aten.pow.Tensor_Scalar"] == [2, 3]


class Dropped(nn.Module):
    """Dropout of nothing leaves a copy in autograd's graph; a copy of an input that is handed back is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(2 * HALF, 2 * HALF), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.dropout(self.linear(x)).sin().sum(), x.clone()


def test_a_copy_of_an_intermediate_value_is_the_value() -> None:
    example: Example = (Dropped(), (torch.randn(3, 5, 2 * HALF),), {})
    captured = capture(*example, loss="0")
    assert differences(graph_step(captured, example), eager_step(captured, example), 1e-6) == []
    copied = [node.operands[0] for node in captured.graph.nodes if node.op == "aten.clone.default"]
    assert copied == ["x"]
