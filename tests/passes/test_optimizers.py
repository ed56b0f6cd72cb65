"""The optimizer table says what torch really keeps and allocates, seen by a tracker of storages."""

import pytest
import torch

from shardwright.ir import PlanError
from shardwright.passes.optimizers import OPTIMIZERS, OptimizerSpec, StepKind, optimizer_spec
from shardwright.runtime.tracker import StepMemory

NUM_ELEMENTS = 20_000
NUM_PARAMETERS = 4
SLACK_BYTES = 4_096
"""Scalars that a step makes."""


def build(
    spec: OptimizerSpec, kind: StepKind, sizes: tuple[int, ...] = (NUM_ELEMENTS,) * NUM_PARAMETERS
) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    """The optimizer after one step, and every tensor that lives on."""
    parameters = [torch.nn.Parameter(torch.rand(size)) for size in sizes]
    options: dict[str, object] = dict(spec.options)
    if kind is not StepKind.LOOP:
        options[kind.value] = True
    optimizer: torch.optim.Optimizer = getattr(torch.optim, spec.torch_name)(parameters, lr=0.1, **options)
    for parameter in parameters:
        parameter.grad = torch.rand(parameter.numel())
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return optimizer, [*parameters, *(p.grad for p in parameters if p.grad is not None), *states]


TORCH = {name: spec for name, spec in OPTIMIZERS.items() if not spec.has_master}
MASTERS = {name: spec for name, spec in OPTIMIZERS.items() if spec.has_master}
CASES = [
    (spec, kind)
    for spec in TORCH.values()
    for kind in StepKind
    if kind is StepKind.FUSED and spec.has_fused or kind is not StepKind.FUSED and not spec.is_fused
]


SIZES = {
    "equal": (NUM_ELEMENTS,) * NUM_PARAMETERS,
    "growing": (5_000, 10_000, 20_000),
    "apart": (20_000, 1_000, 20_000),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("spec", "kind"), CASES, ids=lambda part: getattr(part, "name", str(part)))
def test_temporaries_are_those_of_torch(spec: OptimizerSpec, kind: StepKind, sizes: tuple[int, ...]) -> None:
    """The peak of what a step allocates equals the table, but for scalars."""
    optimizer, known = build(spec, kind, sizes)
    with StepMemory(known) as memory:
        held_bytes = memory.current_bytes
        optimizer.step()
    allocated = memory.peak_bytes - held_bytes
    expected = spec.temporary_bytes(sizes, 4, kind)
    assert expected <= allocated <= expected + SLACK_BYTES


@pytest.mark.parametrize("spec", TORCH.values(), ids=TORCH)
def test_state_is_that_of_torch(spec: OptimizerSpec) -> None:
    """State bytes of a parameter, scalars included, equal what torch keeps."""
    optimizer, _ = build(spec, StepKind.LOOP)
    kept: dict[str, object] = next(iter(optimizer.state.values()), {})
    tensors = [value for value in kept.values() if isinstance(value, torch.Tensor)]
    assert sum(t.numel() * t.element_size() for t in tensors) == spec.state_bytes(NUM_ELEMENTS, 4)


@pytest.mark.parametrize("spec", MASTERS.values(), ids=MASTERS)
def test_masters_are_those_of_mixed_precision_by_hand(spec: OptimizerSpec) -> None:
    """State and peak of stepping bfloat16 parameters by their float32 masters, one by one, equal the table."""
    sizes = SIZES["growing"]
    parameters = [torch.rand(size, dtype=torch.bfloat16) for size in sizes]
    gradients = [torch.rand(size, dtype=torch.bfloat16) for size in sizes]
    masters = [torch.nn.Parameter(parameter.float()) for parameter in parameters]
    kind = getattr(torch.optim, spec.torch_name)
    optimizers = [kind([master], lr=0.1, **dict(spec.options)) for master in masters]

    def step() -> None:
        for parameter, gradient, master, optimizer in zip(parameters, gradients, masters, optimizers, strict=True):
            master.grad = gradient.float()
            optimizer.step()
            master.grad = None
            parameter.copy_(master.detach())

    step()
    states = [[v for s in o.state.values() for v in s.values() if torch.is_tensor(v)] for o in optimizers]
    for size, master, state in zip(sizes, masters, states, strict=True):
        kept = sum(t.numel() * t.element_size() for t in (master, *state))
        assert kept == spec.state_bytes(size, 2)
    with StepMemory([*parameters, *gradients, *masters, *(t for state in states for t in state)]) as memory:
        held_bytes = memory.current_bytes
        step()
    expected = spec.temporary_bytes(sizes, 2, StepKind.LOOP)
    assert expected <= memory.peak_bytes - held_bytes <= expected + SLACK_BYTES


def test_a_master_of_adam_makes_twelve_bytes_an_element_and_none_for_float32() -> None:
    master, plain = optimizer_spec("adamw-master"), optimizer_spec("adamw-fused")
    assert master.state_bytes(1000, 2) == 12 * 1000 + 4
    assert master.host_temporary_bytes(1000, 2) == 4 * 1000
    for element_bytes in (4, 8):
        for figure in ("state_bytes", "host_temporary_bytes"):
            assert getattr(master, figure)(1000, element_bytes) == getattr(plain, figure)(1000, element_bytes)
    assert master.temporary_bytes([1000], 4, StepKind.LOOP) == 0


def test_an_unknown_optimizer_names_the_known() -> None:
    with pytest.raises(PlanError, match="adamw.*found 'lion'"):
        optimizer_spec("lion")


def test_fused_holds_nothing_and_loop_only_the_largest() -> None:
    spec = optimizer_spec("adamw")
    assert spec.temporary_bytes([10, 30], 4, StepKind.FUSED) == 0
    assert spec.temporary_bytes([10, 30], 4, StepKind.LOOP) == (2 * 30 + 10) * 4
    assert spec.temporary_bytes([30, 10], 4, StepKind.LOOP) == 2 * 30 * 4
    assert spec.temporary_bytes([10, 30], 4, StepKind.FOREACH) == 40 * 4
