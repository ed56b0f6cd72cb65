"""What capture gives: the graph, and how the module's own inputs and outputs map to its values."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from shardwright.ir import Graph, InputError, TensorType
from shardwright.passes.dead_code import without_dead_code
from shardwright.runtime.torch_ops import dtype_name
from shardwright.runtime.trees import KeyPath, Leaf, format_path, leaves, map_leaves

__all__ = ["Captured", "InputLeaf", "bound_inputs", "call_arguments"]


@dataclass(frozen=True, slots=True)
class InputLeaf:
    """One tensor of the batch."""

    name: str
    """Its value in the graph: `input_ids`, `batch.0`."""
    path: KeyPath
    """Where it is among the bound arguments."""
    type: TensorType
    """Global."""


@dataclass(frozen=True)
class Captured:
    """One training step of a module on a global batch."""

    graph: Graph
    inputs: tuple[InputLeaf, ...]
    signature: inspect.Signature
    """Of the module's forward: the same batch may be handed in by position or by keyword."""
    constants: Mapping[str, object]
    """Inputs that are not tensors, by readable path: they are part of what was captured."""
    output: object
    """The module's output with `Leaf` for every tensor; other leaves as they were."""
    output_paths: tuple[str, ...]
    """Readable path of each `Leaf`, `.logits`; keys of `Graph.outputs`, but for the loss."""
    loss: str
    """Path of the output that is differentiated; `loss_fn` where that made it."""
    aliases: Mapping[str, str]
    """Every parameter and buffer name, tied ones too, to the canonical name, which is the one in the graph."""
    dtype: torch.dtype
    """Of the parameters (of most of them)."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Inputs of kind buffer that no `named_buffers` holds: tensors that the module made from constants."""

    def keeping(self, outputs: Collection[str]) -> "Captured":
        """With only these of the outputs beside the loss: what nobody reads is not computed, gathered or held."""
        kept = {path: value for path, value in self.graph.outputs.items() if path in outputs}
        return replace(self, graph=without_dead_code(replace(self.graph, outputs=kept)))

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, torch.Tensor]:
        """The batch by value name. Raises InputError for other structure, dtype or constants; sizes are not checked,
        since a rank may be handed its part only."""
        given = bound_inputs(self.signature, args, kwargs)
        found = {format_path(path): leaf for path, leaf in leaves(given) if isinstance(leaf, torch.Tensor)}
        expected = {format_path(leaf.path): leaf for leaf in self.inputs}
        if found.keys() != expected.keys():
            raise InputError(
                f"expected the tensors {', '.join(expected) or 'none'}, found {', '.join(found) or 'none'}. "
                "Hand in the inputs that were planned, or plan again"
            )
        others = {format_path(p): leaf for p, leaf in leaves(given) if not isinstance(leaf, torch.Tensor)}
        if others != self.constants:
            raise InputError(
                f"expected the constants {dict(self.constants)}, found {others}. They are part of the plan: plan again"
            )
        tensors = {leaf.name: found[path] for path, leaf in expected.items()}
        for leaf in self.inputs:
            self._check(leaf, tensors[leaf.name])
        return tensors

    def rebuild(self, values: Mapping[str, torch.Tensor]) -> object:
        """The module's output from its tensors, by output path."""
        return map_leaves(
            self.output,
            lambda _, leaf: values[self.output_paths[leaf.number]] if isinstance(leaf, Leaf) else leaf,
        )

    def _check(self, leaf: InputLeaf, tensor: torch.Tensor) -> None:
        found = f"{dtype_name(tensor.dtype)} with {tensor.dim()} dims"
        expected = f"{leaf.type.dtype} with {len(leaf.type.shape)} dims"
        if found != expected:
            raise InputError(f"expected {leaf.name} of {expected}, found {found}. Convert it, or plan again")


def bound_inputs(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Arguments by parameter name, whichever way they were handed in; what equals its default is left out."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"expected arguments of forward{signature}, found others: {error}") from error
    result: dict[str, object] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            result.update(value)
        elif not _is_default(value, signature.parameters[name].default):
            result[name] = value
    return result


def _is_default(value: object, default: object) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    return value is default or (isinstance(value, bool | int | float | str) and value == default)


def call_arguments(
    signature: inspect.Signature, bound: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Inverse of `bound_inputs`: by keyword what can be, by position what must."""
    positional: list[object] = []
    keyword = dict(bound)
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    rest = kinds.get(inspect.Parameter.VAR_POSITIONAL)
    for name, parameter in signature.parameters.items():
        before_rest = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and rest in keyword
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY or before_rest:
            positional.append(keyword.pop(name, parameter.default))
    items = keyword.pop(rest, ()) if rest is not None else ()
    return (*positional, *(items if isinstance(items, tuple) else ())), keyword
