"""Run a captured graph on real tensors, and compare with plain eager PyTorch: the oracle of the capture tests."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tests.zoo.models import Example
from torch import Tensor

from shardwright.ir import Graph, InputKind
from shardwright.runtime.captured import Captured
from shardwright.runtime.torch_ops import TORCH_DTYPES, tensor_type, torch_arg, torch_op
from shardwright.runtime.trees import format_path, leaves

__all__ = ["StepResult", "differences", "eager_step", "graph_step", "run_graph"]


@dataclass(frozen=True)
class StepResult:
    """Everything one step hands back."""

    loss: Tensor
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def run_graph(graph: Graph, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All values, each checked against its type."""
    for node in graph.nodes:
        args = [torch_arg(arg, values, torch.device("cpu")) for arg in node.args]
        kwargs = {key: torch_arg(arg, values, torch.device("cpu")) for key, arg in node.kwargs}
        made = torch_op(node.op)(*args, **kwargs)
        results = made if isinstance(made, tuple | list) else (made,)
        for name, value in zip(node.results, results, strict=True):
            if not isinstance(value, Tensor):
                assert graph.types[name].num_bytes == 0, f"{name} of {node.op} is {value!r}"
                continue
            # Not the strides: torch's fake kernels guess some of them, and no value depends on them.
            found, expected = tensor_type(value), graph.types[name]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), f"{name} of {node.op}"
            values[name] = value
    return values


def graph_step(captured: Captured, example: Example) -> StepResult:
    """One step by the graph, with the module's weights."""
    module, args, kwargs = example
    graph = captured.graph
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    values = {name: tensor.detach().clone() for name, tensor in {**state, **captured.tensors}.items()}
    values |= captured.bind(args, kwargs)
    dtype = TORCH_DTYPES[graph.types[graph.loss].dtype]
    values |= {name: torch.ones((), dtype=dtype) for name in graph.inputs_of(InputKind.TANGENT)}
    values = run_graph(graph, {i.name: values[i.name] for i in graph.inputs})
    return StepResult(
        loss=values[graph.loss],
        outputs={path: values[name] for path, name in graph.outputs.items()},
        gradients={parameter: values[name] for parameter, name in graph.gradients.items()},
        buffers={buffer: values[name] for buffer, name in graph.updates.items()},
    )


def eager_step(captured: Captured, example: Example) -> StepResult:
    """One step of a copy of the module by plain PyTorch."""
    module, args, kwargs = example
    plain = copy.deepcopy(module)
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    output = plain(*args, **kwargs)
    found = {format_path(path): leaf for path, leaf in leaves(output) if isinstance(leaf, Tensor)}
    loss = found.pop(captured.loss)
    torch.autograd.backward(loss)
    return StepResult(
        loss=loss.detach(),
        outputs={path: value.detach() for path, value in found.items()},
        gradients={name: p.grad for name, p in plain.named_parameters() if p.grad is not None},
        buffers={name: b for name, b in plain.named_buffers() if not torch.equal(b, before[name])},
    )


def differences(found: StepResult, expected: StepResult, rtol: float) -> list[str]:
    """What does not agree, in words. A gradient that is zero but for rounding may differ by rtol x rms of all."""
    if found.gradients.keys() != expected.gradients.keys():
        return [f"gradients of {sorted(found.gradients.keys() ^ expected.gradients.keys())}"]
    if found.outputs.keys() != expected.outputs.keys() or found.buffers.keys() != expected.buffers.keys():
        return [f"outputs {list(found.outputs)} and {list(expected.outputs)}, buffers {list(found.buffers)}"]
    wrong = [] if torch.allclose(found.loss, expected.loss, rtol=rtol, atol=0) else ["loss"]
    num_elements = sum(g.numel() for g in expected.gradients.values())
    rms = math.sqrt(sum(float(g.double().square().sum()) for g in expected.gradients.values()) / num_elements)
    for name, gradient in expected.gradients.items():
        size = float(gradient.double().norm())
        error = float((found.gradients[name].double() - gradient.double()).norm())
        if error > rtol * size + rtol * math.sqrt(gradient.numel()) * rms:
            wrong.append(f"gradient of {name}: {error:.2e} of {size:.2e}")
    pairs = {**{f"output {k}": (found.outputs[k], v) for k, v in expected.outputs.items()}}
    pairs |= {f"buffer {k}": (found.buffers[k], v) for k, v in expected.buffers.items()}
    for name, (value, wanted) in pairs.items():
        error = float((value.double() - wanted.double()).norm())
        if error > rtol * float(wanted.double().norm()):
            wrong.append(f"{name}: {error:.2e}")
    return wrong
