"""What an optimizer holds and moves, by name: state per parameter, temporaries of a step.

Needs no torch: the figures are those of torch 2.13 on CPU, checked against it by a storage tracker in the tests.
Bytes are of local (sharded) elements. Names are those of `--optimizer`; a plain name means the class as torch runs it
by default, `-fused` the class with `fused=True`, as `shardwright.optimizer` makes it: nothing temporary.

`-master` is mixed precision: a parameter of less than float32, bfloat16 say, has a float32 master beside float32 state.
Such parameters are stepped one by one: the gradient is cast, the master stepped (fused where torch can), the parameter
written from it. All others have state of their own dtype, as under the plain name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from shardwright.ir import PlanError

__all__ = ["MASTER_BYTES", "OPTIMIZERS", "OptimizerSpec", "StepKind", "optimizer_spec"]

MASTER_BYTES: Final = 4
"""An element of a master weight, float32, and of the state and gradient that go with it."""


class StepKind(StrEnum):
    """How torch runs the step."""

    LOOP = "loop"
    """One parameter after another: torch's default on CPU."""
    FOREACH = "foreach"
    """All parameters at once: torch's default on CUDA."""
    FUSED = "fused"
    """One kernel, nothing temporary."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """State and temporaries of one optimizer with its default options."""

    name: str
    torch_name: str
    """Class in `torch.optim`."""
    num_state_tensors: int
    """Tensors of the parameter's shape and dtype that it keeps for each parameter, a master aside."""
    num_scalars: int
    """float32 scalar tensors that it keeps for each parameter (`step`), 4 bytes each."""
    loop_temporaries: int
    """Temporaries of a parameter's size alive at once in a loop."""
    loop_carried: int
    """Temporaries of the parameter before that are still alive then."""
    foreach_temporaries: int
    """Copies of all parameters alive at once in a foreach step."""
    has_fused: bool
    options: tuple[tuple[str, float], ...] = ()
    """Keyword arguments that make the class this optimizer."""
    has_master: bool = False
    """Whether parameters of less than float32 have a float32 master."""

    @property
    def is_fused(self) -> bool:
        """Whether it is planned to run as one kernel, whatever torch would do by default."""
        return ("fused", True) in self.options

    def keeps_master(self, element_bytes: int) -> bool:
        """Whether a parameter with elements of that size has a master."""
        return self.has_master and element_bytes < MASTER_BYTES

    def num_tensors(self, element_bytes: int) -> int:
        """Tensors of the parameter's shape that are kept for it, the master included."""
        return self.num_state_tensors + self.keeps_master(element_bytes)

    def state_element_bytes(self, element_bytes: int) -> int:
        """An element of each of these."""
        return MASTER_BYTES if self.keeps_master(element_bytes) else element_bytes

    def state_bytes(self, num_elements: int, element_bytes: int) -> int:
        """Kept for one parameter of that many local elements, the master included."""
        tensor_bytes = num_elements * self.state_element_bytes(element_bytes)
        return self.num_tensors(element_bytes) * tensor_bytes + 4 * self.num_scalars

    def temporary_bytes(self, sizes: Sequence[int], element_bytes: int, kind: StepKind) -> int:
        """What a step over parameters of these local element counts, in order, allocates at once; scalars aside."""
        if self.keeps_master(element_bytes):
            return max((n * MASTER_BYTES + self._torch_temporaries((n,), MASTER_BYTES, kind) for n in sizes), default=0)
        return self._torch_temporaries(sizes, element_bytes, kind)

    def _torch_temporaries(self, sizes: Sequence[int], element_bytes: int, kind: StepKind) -> int:
        if self.is_fused:
            return 0
        if kind is StepKind.FOREACH:
            return self.foreach_temporaries * sum(sizes) * element_bytes
        if kind is StepKind.LOOP or not self.has_fused:
            pairs = zip(sizes, (0, *sizes), strict=False)
            return max((self.loop_temporaries * n + self.loop_carried * m for n, m in pairs), default=0) * element_bytes
        return 0

    def host_temporary_bytes(self, num_elements: int, element_bytes: int) -> int:
        """Temporaries of stepping one parameter on the host, beside its gradient and value there."""
        return self.temporary_bytes((num_elements,), element_bytes, StepKind.LOOP)

    def host_staged_bytes(self, num_elements: int, element_bytes: int) -> int:
        """What a parameter that is stepped behind backward takes there: temporaries, its gradient and its value."""
        return 2 * num_elements * element_bytes + self.host_temporary_bytes(num_elements, element_bytes)


def _with_master(spec: OptimizerSpec) -> OptimizerSpec:
    options = (*spec.options, ("fused", True)) if spec.has_fused else spec.options
    return replace(spec, name=f"{spec.name}-master", options=options, has_master=True)


_TORCH: Final = (
    OptimizerSpec("sgd", "SGD", 0, 0, 0, 0, 0, True),
    OptimizerSpec("sgd-momentum", "SGD", 1, 0, 0, 0, 0, True, (("momentum", 0.9),)),
    OptimizerSpec("adam", "Adam", 2, 1, 2, 1, 1, True),
    OptimizerSpec("adam-fused", "Adam", 2, 1, 0, 0, 0, True, (("fused", True),)),
    OptimizerSpec("adamw", "AdamW", 2, 1, 2, 1, 1, True),
    OptimizerSpec("adamw-fused", "AdamW", 2, 1, 0, 0, 0, True, (("fused", True),)),
    OptimizerSpec("adagrad", "Adagrad", 1, 1, 1, 1, 2, True),
    OptimizerSpec("adagrad-fused", "Adagrad", 1, 1, 0, 0, 0, True, (("fused", True),)),
    OptimizerSpec("rmsprop", "RMSprop", 1, 1, 1, 1, 1, False),
    OptimizerSpec("adamax", "Adamax", 2, 1, 1, 0, 1, False),
    OptimizerSpec("nadam", "NAdam", 2, 2, 2, 1, 1, False),
    OptimizerSpec("radam", "RAdam", 2, 1, 2, 0, 1, False),
    OptimizerSpec("adadelta", "Adadelta", 2, 1, 2, 1, 2, False),
)

OPTIMIZERS: Final = {
    spec.name: spec for spec in (*_TORCH, *(_with_master(spec) for spec in _TORCH if not spec.is_fused))
}


def optimizer_spec(name: str) -> OptimizerSpec:
    """The optimizer of that name. Raises PlanError for one that is not known."""
    if name not in OPTIMIZERS:
        raise PlanError(
            f"expected an optimizer of {', '.join(OPTIMIZERS)}, found {name!r}: "
            "name one with at least as much state as yours"
        )
    return OPTIMIZERS[name]
