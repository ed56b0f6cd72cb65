"""A captured graph is the model: run on real tensors, it gives plain PyTorch's loss, gradients, outputs and buffers."""

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.runtime.interpret import differences, eager_step, graph_step
from tests.zoo.models import MORE, ZOO, Example
from torch import Tensor, nn
from torch.nn import functional

from shardwright.ir import CaptureError, Graph, InputError, InputKind, Phase
from shardwright.runtime.capture import Captured, capture
from shardwright.runtime.compat import FakeTensor, FakeTensorMode
from shardwright.runtime.fake_module import fake_copy

EVERY = {**ZOO, **MORE}


def check(example: Example, rtol: float = 1e-5, **options: object) -> Captured:
    module, args, kwargs = example
    captured = capture(module, args, kwargs, **options)  # type: ignore[arg-type]
    assert differences(graph_step(captured, example), eager_step(captured, example), rtol) == []
    check_form(captured.graph)
    return captured


def check_form(graph: Graph) -> None:
    """What every captured graph promises beside its numbers."""
    defined = {i.name for i in graph.inputs}
    phases = [node.phase for node in graph.nodes]
    assert phases == sorted(phases, key=[Phase.FORWARD, Phase.BACKWARD].index), "forward stands before backward"
    for node in graph.nodes:
        assert defined.issuperset(node.operands), f"{node.name} reads what is not there yet"
        assert defined.isdisjoint(node.results), f"{node.name} is there twice"
        defined.update(node.results)
        assert node.op.startswith("aten."), node.op
        assert node.op not in ("aten.detach.default", "aten.mean.dim", "aten.native_batch_norm.default")
        if node.op in ("aten.view.default", "aten.expand.default"):
            assert node.args[1] == graph.types[node.name].shape
    assert defined == set(graph.types)
    assert set(graph.gradients) == set(graph.inputs_of(InputKind.PARAM))
    assert all(name == f"grad({parameter})" for parameter, name in graph.gradients.items())
    assert all(graph.types[n] == graph.types[p] for p, n in graph.gradients.items())


@pytest.mark.parametrize("name", EVERY)
def test_captured_model_equals_plain_pytorch(name: str) -> None:
    check(EVERY[name]())


@pytest.mark.parametrize("name", ["decoder", "perceptron", "resnet"])
def test_in_float64_the_graph_equals_to_ten_digits(name: str) -> None:
    module, args, kwargs = ZOO[name]()
    floats = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    check((module.double(), floats, kwargs), rtol=1e-10)


class Scaled(nn.Module):
    """Everything capture must take: a module called twice, one shared by two names, tied and frozen parameters,
    buffers in and out of the state, nested inputs, constants of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.also_first = self.first
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.calls: Tensor
        self.register_buffer("scale", torch.rand(6), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.table = torch.arange(6.0)

    def forward(self, x: dict[str, Tensor], pair: tuple[Tensor, Tensor], *, power: int = 1) -> dict[str, object]:
        self.calls += 1
        y = self.first(x["a"]) + self.also_first(x["b.c"].float())
        y = self.frozen(y) * self.scale + self.table * torch.tensor(2.0) + torch.tensor([1.0] * 6)
        y = self.first(self.tied(y)) ** power
        return {"loss": (y * pair[0]).sum() / pair[1].sum(), "y": y, "inputs": [x["a"], pair[1].t()], "note": "text"}


def scaled_example() -> Example:
    torch.manual_seed(0)
    x = {"a": torch.randn(4, 6), "b.c": torch.randint(0, 5, (4, 6))}
    return Scaled(), (x, (torch.randn(4, 6), torch.rand(4, 6))), {"power": 2}


def test_tied_frozen_unused_and_nested_are_ordinary() -> None:
    captured = check(scaled_example())
    kinds = {i.name: i.kind for i in captured.graph.inputs}
    assert captured.aliases["tied.weight"] == captured.aliases["also_first.weight"] == "first.weight"
    assert kinds["first.weight"] is InputKind.PARAM and "tied.weight" not in kinds
    assert kinds["frozen.weight"] is kinds["unused"] is InputKind.FROZEN
    assert kinds["scale"] is InputKind.BUFFER and set(captured.graph.updates) == {"calls"}
    assert [leaf.name for leaf in captured.inputs] == ["x.a", "x.b.c", "pair.0", "pair.1"]
    assert captured.constants == {".power": 2}
    assert len(captured.tensors) == 2 and captured.loss == ".loss"
    assert set(captured.graph.outputs) == {".y", ".inputs.0", ".inputs.1"}


def test_outputs_are_rebuilt_as_the_model_returns_them() -> None:
    captured = capture(*scaled_example())
    values = {path: torch.tensor(float(position)) for position, path in enumerate(captured.output_paths)}
    rebuilt = captured.rebuild(values)
    assert isinstance(rebuilt, dict) and list(rebuilt) == ["loss", "y", "inputs", "note"]
    assert rebuilt["note"] == "text" and rebuilt["inputs"][1] is values[".inputs.1"]


def test_hugging_face_outputs_keep_their_class() -> None:
    module, args, kwargs = ZOO["llama"]()
    captured = capture(module, args, kwargs)
    rebuilt = captured.rebuild({path: torch.zeros(()) for path in captured.output_paths})
    assert type(rebuilt).__name__ == "CausalLMOutputWithPast" and rebuilt.loss is rebuilt["loss"]  # type: ignore


def test_inputs_bind_by_position_or_keyword_and_refuse_others() -> None:
    module, args, _ = ZOO["decoder"]()
    captured = capture(module, args)
    by_keyword = captured.bind((), {"labels": args[1], "tokens": args[0]})
    assert by_keyword["tokens"] is args[0] and by_keyword["labels"] is args[1]
    with pytest.raises(InputError, match=r"expected the tensors \.tokens, \.labels, found \.tokens"):
        captured.bind((args[0],), {"labels": None})
    with pytest.raises(InputError, match="expected tokens of i64 with 2 dims, found f32"):
        captured.bind((torch.zeros(4, 16), args[1]), {})
    example = scaled_example()
    with pytest.raises(InputError, match="expected the constants"):
        capture(*example).bind(example[1], {"power": 3})


def test_the_users_module_is_only_read() -> None:
    module, args, kwargs = ZOO["llama"]()
    module.eval()
    before = copy.deepcopy(module.state_dict())
    config = module.config.to_dict()  # type: ignore[operator, union-attr]
    ids = [id(p) for p in module.parameters()]
    capture(module, args, kwargs)
    assert [id(p) for p in module.parameters()] == ids and not module.training
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert module.config.to_dict() == config  # type: ignore[operator, union-attr]
    assert module.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    assert all(p.grad is None and not type(p.data).__name__.startswith("Fake") for p in module.parameters())


def test_the_copy_has_no_weights() -> None:
    module, _, _ = ZOO["llama"]()
    copied = fake_copy(module, FakeTensorMode(allow_non_fake_inputs=True)).module
    tensors = [*copied.parameters(), *copied.buffers()]
    assert len(tensors) > 20 and all(isinstance(tensor.data, FakeTensor) for tensor in tensors)


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_a_module_on_meta_gives_the_same_graph(name: str) -> None:
    module, args, kwargs = ZOO[name]()
    assert capture(module, args, kwargs).graph == capture(copy.deepcopy(module).to("meta"), args, kwargs).graph


def test_names_say_where_a_value_comes_from() -> None:
    captured = capture(*scaled_example())
    names = {result for node in captured.graph.nodes for result in node.results}
    assert {"first/addmm", "also_first/addmm", "first#1/addmm", "frozen/addmm"} <= names
    assert "frozen/grad:mm" in names
    node = captured.graph.producers["frozen/addmm"]
    assert node.module == "frozen" and re.fullmatch(r"runtime/test_capture\.py:\d+", node.source)
    llama = capture(*ZOO["llama"]()).graph
    silu = llama.producers["model.layers.1.mlp.act_fn/silu"]
    assert silu.module == "model.layers.1.mlp.act_fn"
    assert "model.layers.1.mlp.act_fn/grad:silu_backward" in llama.producers
    layers = [{n.replace(f"layers.{i}.", "layers.*.") for n in llama.producers if f"layers.{i}." in n} for i in (0, 1)]
    assert layers[0] ^ layers[1] <= {n for n in layers[0] | layers[1] if "grad:add" in n}, "layers have equal names"


def test_results_nobody_reads_have_names_and_types() -> None:
    graph = capture(*ZOO["llama"]()).graph
    attention = next(n for n in graph.nodes if n.op == "aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert len(attention.results) == 2 and graph.types[attention.results[1]].dtype == "f32"


def test_the_text_does_not_depend_on_hashing() -> None:
    code = (
        "import hashlib, torch; from tests.zoo.transformer import Decoder;"
        "from shardwright.runtime.capture import capture; ids = torch.zeros(4, 8, dtype=torch.long);"
        "c = capture(Decoder(16, 8, 2, 16, 1, 8), (ids, ids));"
        "print(hashlib.sha256(repr((c.graph, c.aliases)).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True, text=True, check=True, timeout=120, cwd=root,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(digests) == 1


def test_an_earlier_capture_of_other_sizes_changes_nothing() -> None:
    module, args, _ = ZOO["decoder"]()
    tokens, labels = (arg for arg in args if isinstance(arg, Tensor))
    first = capture(module, (tokens, labels)).graph
    capture(module, (tokens[:2], labels[:2]))
    assert capture(module, (tokens, labels)).graph == first


class Losses(nn.Module):
    """One linear layer and a loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.linear(x), target)


CLASSES = torch.tensor([0, 4, 2, -100, 1, 1])
WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0])
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "mse": (functional.mse_loss, torch.rand(6, 5)),
    "l1": (functional.l1_loss, torch.rand(6, 5)),
    "smooth l1": (functional.smooth_l1_loss, torch.rand(6, 5)),
    "huber": (functional.huber_loss, torch.rand(6, 5)),
    "binary": (lambda y, t: functional.binary_cross_entropy(y.sigmoid(), t), torch.rand(6, 5)),
    "binary with logits": (functional.binary_cross_entropy_with_logits, torch.rand(6, 5)),
    "kl": (lambda y, t: functional.kl_div(y.log_softmax(1), t, reduction="batchmean"), torch.rand(6, 5)),
    "soft margin": (functional.soft_margin_loss, torch.rand(6, 5).sign()),
    "cross entropy": (functional.cross_entropy, CLASSES),
    "weighted": (lambda y, t: functional.cross_entropy(y, t, weight=WEIGHTS), CLASSES),
    "smoothed": (lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1), CLASSES),
    "summed": (lambda y, t: functional.cross_entropy(y, t, reduction="sum") / 6, CLASSES),
    "2d": (lambda y, t: functional.cross_entropy(y.view(2, 5, 3), t.view(2, 3)), CLASSES),
    "variance": (lambda y, t: (y.var(0) + y.std() - y.var(correction=0) + t.sum() * 0).sum(), torch.rand(6, 5)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_moments_are_sums_over_the_batch(name: str) -> None:
    """Nothing that hides a division by a local count is left, but nll_loss's backward, which is told the total."""
    loss, target = LOSSES[name]
    torch.manual_seed(0)
    captured = check((Losses(loss), (torch.randn(6, 5), target), {}))
    ops = {node.op.split(".")[1] for node in captured.graph.nodes}
    hidden = {op for op in ops if re.search("loss|mean|var|std|cross_entropy", op)}
    assert hidden <= {"nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"}
    forward = [node for node in captured.graph.nodes if "loss" in node.op and "forward" in node.op]
    assert all(node.args[3] == 2 for node in forward), "reduction is sum"


def test_batch_norm_statistics_are_sums() -> None:
    ops = {node.op for node in capture(*ZOO["resnet"]()).graph.nodes}
    assert not any("batch_norm" in op or "mean" in op or "var" in op for op in ops)
    assert "aten.convolution.default" in ops, "the rest stays whole"


def test_gradients_have_storage_of_their_own() -> None:
    """Two parameters with the same gradient, and one whose gradient is an expanded view."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.rand(3)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.a + self.b) * x).sum() + self.c.sum()

    captured = check((Sums(), (torch.rand(2, 3),), {}))
    assert len(set(captured.graph.gradients.values())) == 3
    assert captured.graph.producers["grad(c)"].op == "aten.clone.default"


def test_loss_can_be_named_or_made() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = self.linear(x)
            return y, y.sum(), y.square().sum()

    x = torch.rand(2, 3)
    captured = check((Plain(), (x,), {}), loss="2")
    assert captured.loss == "2" and list(captured.graph.outputs) == ["0", "1"]
    with pytest.raises(CaptureError, match=r"several scalars among 0: f32\[2, 3\], 1: f32\[\].*loss=.*loss_fn="):
        capture(Plain(), (x,))
    with pytest.raises(CaptureError, match="expected an output 'logits' of .*, found 0: "):
        capture(Plain(), (x,), loss="logits")
    made = capture(nn.Linear(3, 3), (x,), loss_fn=lambda y: y.square().mean())
    assert made.loss == "loss_fn" and list(made.graph.outputs) == [""]
    with pytest.raises(CaptureError, match=r"found no scalar among the output: f32\[2, 3\]"):
        capture(nn.Linear(3, 3), (x,))
    with pytest.raises(CaptureError, match=r"expected loss_fn to return a scalar, found f32\[2, 3\]"):
        capture(nn.Linear(3, 3), (x,), loss_fn=lambda y: y)


class Inner(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear(x))


def branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropout": (lambda x: functional.dropout(x, 0.1), "dropout above 0 is not supported yet"),
    "noise": (lambda x: x + torch.randn_like(x), "dropout above 0 is not supported yet"),
    "item": (lambda x: x * x.sum().item(), "no use of a tensor's value in Python"),
    "branch": (branch, "no use of a tensor's value in Python"),
    "sizes": (lambda x: x[x > 0].sum() + x, "sizes known before the step"),
    "file": (lambda x: x * len(open(__file__).read()), "code that can be traced"),
    "mistake": (lambda x: x @ torch.zeros(3, 3), "expected forward to run, found RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_with_module_and_line(name: str) -> None:
    body, message = REFUSED[name]
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Inner(body)))
    with pytest.raises(CaptureError, match=message) as caught:
        capture(module, (torch.zeros(2, 4),), loss_fn=lambda y: y.sum())
    assert re.search(r"in module 1\.0 at \S*test_capture\.py:\d+", str(caught.value))
    assert "\n" not in str(caught.value) and caught.value.__cause__ is None


def test_writing_into_an_input_is_refused() -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return super().forward(x).sum()

    with pytest.raises(CaptureError, match="expected a forward that changes buffers only"):
        capture(Writes(3, 3), (torch.zeros(2, 3),))


def test_a_loss_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on a trainable parameter"):
        capture(nn.Linear(3, 3).requires_grad_(False), (torch.zeros(2, 3),), loss_fn=lambda y: y.sum())


def test_a_cache_is_not_part_of_a_training_step() -> None:
    module, args, kwargs = ZOO["llama"]()
    module.config.use_cache = True  # type: ignore[union-attr]
    assert set(capture(module, args, kwargs).graph.outputs) == {".logits"}
    assert module.config.use_cache is True  # type: ignore[union-attr]
