"""A plan: what was decided, for what, on which machines, and what is known about it. Its text is in `plan_text`."""

from dataclasses import dataclass, field

from shardwright.ir.decisions import Decisions
from shardwright.ir.types import TensorType

__all__ = ["Baseline", "Budget", "Certificate", "Identity", "InputSpec", "Plan", "Prediction"]

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One tensor of the global batch."""

    name: str
    type: TensorType


@dataclass(frozen=True)
class Identity:
    """What a plan is for. Any difference at run time is refused, naming the field."""

    graph_hash: str
    """`sha256:` and the digest of the graph text; computed again from the model before the first step."""
    mode: str
    """`train`."""
    loss: str
    """Which output is differentiated: `.loss`, `0`, ... as given with --loss."""
    optimizer: str
    dtype: str
    """Of the parameters, torch's name: `float32`."""
    seed: int
    accumulate: int
    inputs: tuple[InputSpec, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes a rank may hold."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    """Of its file; 0: there is no disk to move anything to."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """By replay of the rank graph; never by the solver's objective."""

    step_seconds: float
    error_fraction: float
    """Half width of the error bar of the step time."""
    device_bytes: int
    """Peak of one rank."""
    host_bytes: int
    """The buffers through which copies go to the disk included."""
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the solver proved, in its own objective."""

    objective_seconds: float
    bound_seconds: float
    space: str
    """The space it holds for, in words: choices, meshes, classes."""
    engine: str
    interrupted: bool = False
    """Cut short by the clock: another run may give another plan."""

    @property
    def gap(self) -> float:
        """Relative distance of objective and bound."""
        if self.objective_seconds <= 0:
            return 0.0
        return max(0.0, self.objective_seconds - self.bound_seconds) / self.objective_seconds


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a person would have picked, replayed on the same machines."""

    name: str
    step_seconds: float | None
    device_bytes: int | None
    note: str = ""
    """`over budget`, or why it cannot be expressed."""


@dataclass(frozen=True)
class Plan:
    """The whole content of a plan file."""

    target: str
    """As given on the command line, or the qualified name of a decorated class."""
    identity: Identity
    cluster: str
    """Preset name or path of the cluster file."""
    budget: Budget
    decisions: Decisions
    prediction: Prediction
    certificate: Certificate | None
    """None after an edit by hand."""
    baselines: tuple[Baseline, ...] = ()
    versions: tuple[tuple[str, str], ...] = field(default=())
    """(name, version) of python, torch, ...; a difference warns."""
