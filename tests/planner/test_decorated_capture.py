"""A decorated class is captured as it is without the decorator: planning it from outside starts no planning inside."""

import pytest
import torch
from torch import Tensor, nn

import shardwright
from shardwright.ir import CaptureError, ShardwrightError, print_graph
from shardwright.runtime.capture import capture
from shardwright.runtime.real_values import real_example
from shardwright.runtime.target import Target

BATCH = torch.zeros(4, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.up(x).square().mean()
        return loss


def fail(*_: object) -> None:
    raise AssertionError("planned")


@shardwright.parallelize(budget="1GiB", progress=fail, on_plan=fail)
class Decorated(Net):
    pass


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(2.0 * x)  # type: ignore[no-any-return]


def test_the_graph_is_that_of_the_plain_class() -> None:
    assert print_graph(capture(Decorated(), (BATCH,), name="net").graph) == print_graph(
        capture(Net(), (BATCH,), name="net").graph
    )


def test_inside_another_module_too() -> None:
    found, expected = (capture(Outer(inner), (BATCH,)).graph for inner in (Decorated(), Net()))
    assert print_graph(found) == print_graph(expected)


def test_capturing_leaves_the_module_decorated() -> None:
    model = Decorated()
    capture(model, (BATCH,))
    with pytest.raises(ShardwrightError, match="planned"):
        model(BATCH)


def test_the_plain_model_of_verify_plans_nothing() -> None:
    model, args, _ = real_example(Target(Decorated(), (BATCH,), {}, "net.py:build"), seed=0)
    assert model(*args).requires_grad


def test_an_error_names_the_line_under_the_decorator() -> None:
    @shardwright.parallelize(budget="1GiB")
    class Branch(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.raises(CaptureError, match=r"in module \(top\) at .*test_decorated_capture\.py:\d+"):
        capture(Branch(), (BATCH,))
