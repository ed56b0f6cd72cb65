"""One training step of a module as a graph: forward, loss and backward, with global shapes and human names.

Needs a module and example inputs of the global batch (shapes and dtypes count, values do not). Gives `Captured`.
The module is copied onto fake tensors (`fake_module`), run once to see what it returns (`step`), traced by dynamo and
differentiated by AOTAutograd with `decompositions`; then the fx graph becomes IR (`convert`, `simplify`, `naming`).
"""

import contextlib
import inspect
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx, nn

from shardwright.ir import CaptureError, Graph, Input, InputKind
from shardwright.runtime.blame import blame
from shardwright.runtime.captured import Captured, InputLeaf, bound_inputs
from shardwright.runtime.causal_attention import recorded_masks
from shardwright.runtime.compat import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    FakeTensorMode,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    aot_export_joint_with_descriptors,
    dynamo_graph_capture_for_export,
    tracing_rules,
)
from shardwright.runtime.convert import Converted, convert
from shardwright.runtime.decompositions import decomposition_table
from shardwright.runtime.fake_module import FakeModule, fake_copy
from shardwright.runtime.grouped_experts import with_grouped_products
from shardwright.runtime.hf_copies import fakeable_experts, hf_models, without_cache
from shardwright.runtime.loss import LossFunction
from shardwright.runtime.naming import ROOT, named
from shardwright.runtime.simplify import simplified
from shardwright.runtime.torch_ops import tensor_type
from shardwright.runtime.traced_step import Batch, OutputShape, TracedStep, fake_batch, run_once
from shardwright.runtime.trees import format_path

__all__ = ["Captured", "capture"]

TANGENT = "grad(loss)"
"""Input of backward: 1.0 for the plain loss."""


def capture(
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: str | None = None,
    loss_fn: LossFunction | None = None,
    name: str | None = None,
) -> Captured:
    """Capture one step. The module is only read; its weights may be real, on `meta` or on any device.

    `loss` names the output to differentiate; `loss_fn(output)` or `loss_fn(output, *args, **kwargs)` makes it where
    the model returns none. Raises CaptureError.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    signature = inspect.signature(module.forward)
    bound = bound_inputs(signature, args, kwargs or {})
    fake = fake_copy(module, mode)
    batch = fake_batch(signature, bound, fake.aliases, mode)
    shape = _tried(module, fake.module, batch, mode, loss, loss_fn, positions_given="position_ids" in bound)
    graph, tensors = _traced(
        TracedStep(fake.module, batch, shape, loss_fn), fake, batch, shape, name or type(module).__name__
    )
    return Captured(
        graph=graph,
        inputs=tuple(
            InputLeaf(name, path, tensor_type(tensor))
            for name, path, tensor in zip(batch.names, batch.paths, batch.tensors, strict=True)
        ),
        signature=signature,
        constants=batch.constants,
        output=shape.template,
        output_paths=tuple(map(format_path, shape.paths)),
        loss="loss_fn" if shape.loss is None else format_path(shape.loss),
        aliases=fake.aliases,
        dtype=_main_dtype(module),
        tensors=tensors,
    )


def _tried(
    original: nn.Module,
    copied: nn.Module,
    batch: Batch,
    mode: FakeTensorMode,
    loss: str | None,
    loss_fn: LossFunction | None,
    positions_given: bool,
) -> OutputShape:
    """Run once on fake tensors, and leave `copied` ready to be traced."""
    if not hf_models(copied):
        # Another copy runs: what forward makes at its first call (caches, lazy masks) must be traced, not found made.
        return run_once(fake_copy(original, mode).module, batch, mode, loss, loss_fn)
    # The first call of these installs hooks under a lock, which cannot be traced.
    without_cache(copied)
    with fakeable_experts(copied), recorded_masks(copied, positions_given):
        return run_once(copied, batch, mode, loss, loss_fn)


def _traced(
    step: TracedStep, fake: FakeModule, batch: Batch, shape: OutputShape, name: str
) -> tuple[Graph, Mapping[str, torch.Tensor]]:
    with contextlib.ExitStack() as stack, warnings.catch_warnings(), tracing_rules():
        warnings.simplefilter("ignore")
        try:
            traced = dynamo_graph_capture_for_export(step)(*batch.tensors)
            joint = aot_export_joint_with_descriptors(
                stack, traced, batch.tensors, decompositions=decomposition_table()
            ).graph_module
        except Exception as error:
            raise blame(error, fake.module) from None
    # After the stack is closed: until then its fake mode makes every tensor fake, constants too.
    names = _Names(fake, batch, traced)
    converted = convert(joint, names.describe)
    outputs = _output_node(joint).meta["desc"]
    graph = with_grouped_products(_assembled(converted, outputs, names, fake, shape, name))
    return named(simplified(graph)), converted.tensors


class _Names:
    """From AOTAutograd's descriptors to names."""

    def __init__(self, fake: FakeModule, batch: Batch, traced: fx.GraphModule) -> None:
        self._batch = batch
        named_tensors = (
            *traced.named_parameters(remove_duplicate=False),
            *traced.named_buffers(remove_duplicate=False),
        )
        # The traced module names tensors as the step does; where tracing made up a name, the tensor itself tells.
        self._tensors = {
            target: fake.aliases.get(target.removeprefix(f"{ROOT}."), fake.names.get(id(tensor), ""))
            for target, tensor in named_tensors
        }
        self._trainable = {target for target, tensor in named_tensors if tensor.requires_grad}

    def describe(self, node: fx.Node) -> Input:
        desc: AOTInput = node.meta["desc"]
        if isinstance(desc, TangentAOTInput):
            return Input(TANGENT, InputKind.TANGENT)
        if isinstance(desc, ParamAOTInput):
            trainable = desc.target in self._trainable
            return Input(self.of(desc), InputKind.PARAM if trainable else InputKind.FROZEN)
        return Input(self.of(desc), InputKind.BUFFER if isinstance(desc, BufferAOTInput) else InputKind.INPUT)

    def of(self, desc: AOTInput) -> str:
        """Name of a parameter, buffer or input. Raises CaptureError for anything else."""
        if isinstance(desc, PlainAOTInput):
            return self._batch.names[desc.idx]
        if isinstance(desc, ParamAOTInput | BufferAOTInput) and self._tensors.get(desc.target):
            return self._tensors[desc.target]
        raise CaptureError(
            f"expected parameters, buffers and inputs, found {desc.expr()}. "
            "Register tensors that forward uses as parameters or buffers of the module"
        )


def _assembled(
    converted: Converted, outputs: list[AOTOutput], names: _Names, fake: FakeModule, shape: OutputShape, name: str
) -> Graph:
    producers = {result: node for node in converted.nodes for result in node.results}
    plain: dict[int, str] = {}
    gradients: dict[str, str] = {}
    updates: dict[str, str] = {}
    for desc, value in zip(outputs, converted.returned, strict=True):
        if value is None:
            continue
        if isinstance(desc, GradAOTOutput) and isinstance(desc.grad_of, ParamAOTInput):
            gradients[names.of(desc.grad_of)] = value
        elif isinstance(desc, InputMutationAOTOutput) and isinstance(desc.mutated_input, BufferAOTInput):
            updates[names.of(desc.mutated_input)] = value
        elif isinstance(desc, PlainAOTOutput):
            plain[desc.idx] = producers[value].operands[0] if value in producers else value
        else:
            raise CaptureError(
                f"expected a forward that changes buffers only, found {desc.expr()}. "
                "Do not write into inputs or parameters in place"
            )
    order = {name: position for position, name in enumerate(fake.names.values())}
    graph = converted.graph(name, plain[0])
    graph = replace(
        graph,
        outputs={format_path(path): plain[number + 1] for number, path in enumerate(shape.others)},
        updates=dict(sorted(updates.items(), key=lambda item: order[item[0]])),
        gradients=dict(sorted(gradients.items(), key=lambda item: order[item[0]])),
    )
    return _with_all_held(graph, fake, order)


def _with_all_held(graph: Graph, fake: FakeModule, order: Mapping[str, int]) -> Graph:
    """Parameters and buffers that forward does not use are held too; a parameter without a gradient is frozen."""
    kinds = {i.name: i.kind for i in graph.inputs}
    types = dict(graph.types)
    for name, type_ in fake.parameters.items():
        kinds[name] = InputKind.PARAM if name in graph.gradients else InputKind.FROZEN
        types[name] = type_
    for name, type_ in fake.buffers.items():
        kinds.setdefault(name, InputKind.BUFFER)
        types.setdefault(name, type_)
    read = {name for node in graph.nodes for name in node.operands} | set(graph.updates) | set(graph.returned)
    held = read | fake.buffers.keys()
    inputs = [Input(name, kind) for name, kind in kinds.items() if kind is not InputKind.BUFFER or name in held]
    inputs.sort(key=lambda i: (list(InputKind).index(i.kind) // 2, order.get(i.name, len(order))))
    return replace(graph, inputs=tuple(inputs), types=types)


def _output_node(graph_module: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(node for node in reversed(graph_module.graph.nodes) if node.op == "output")
    return found


def _main_dtype(module: nn.Module) -> torch.dtype:
    sizes: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()
