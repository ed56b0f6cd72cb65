"""What a planned module carries with it: the plan's facts, shared by copies, and its own counters.

Kept in the module's `__dict__` under one key, so that `parameters()`, `state_dict()` and `modules()` do not see it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from shardwright.ir import Decisions, Graph, InputKind
from shardwright.runtime.captured import Captured
from shardwright.runtime.host_steps import HostSteps
from shardwright.runtime.inputs import InputMode, PlannedInput
from shardwright.runtime.outputs import Outputs
from shardwright.runtime.parameters import Home
from shardwright.runtime.program import Program

__all__ = ["Installed", "Session", "find_session"]

_KEY = "_shardwright_session"


@dataclass(frozen=True, eq=False)
class Installed:
    """A plan on this rank. Belongs to no module: a copy of a planned module runs the same program on its own values."""

    captured: Captured
    rank_graph: Graph
    decisions: Decisions
    program: Program
    home: Home
    outputs: Outputs
    inputs: Mapping[str, PlannedInput]
    optimizer: str
    """Planned, as `--optimizer` names it; empty where nothing was said."""
    steps: HostSteps
    """Steps parameters whose state is on the host."""

    @property
    def trainable(self) -> tuple[str, ...]:
        return self.program.parameters


@dataclass(eq=False)
class Session:
    """One planned module."""

    installed: Installed
    input_mode: InputMode = "global"
    num_steps: int = 0
    """Training forwards so far."""
    _places: list[tuple[dict[str, Tensor | None], str]] = field(default_factory=list, repr=False)
    """Where the program's parameters and buffers stand: table and key, in the order of `Program.inputs`."""

    def put_on(self, module: nn.Module) -> None:
        module.__dict__[_KEY] = self

    def __deepcopy__(self, memo: object) -> "Session":
        return Session(self.installed, self.input_mode)

    def state(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameters and buffers as they are on the module now, by name, in the order the program takes them."""
        names = self._state_names()
        if not self._places:
            self._places.extend(_place(module, name) for name in names)
        found = {name: table[key] for name, (table, key) in zip(names, self._places, strict=True)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _state_names(self) -> tuple[str, ...]:
        graph, held = self.installed.rank_graph, self.installed.captured.tensors
        names = graph.inputs_of(InputKind.PARAM, InputKind.FROZEN, InputKind.BUFFER)
        return tuple(name for name in names if name not in held)


def _place(module: nn.Module, name: str) -> tuple[dict[str, Tensor | None], str]:
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    table: dict[str, Tensor | None] = holder._parameters if leaf in holder._parameters else holder._buffers  # type: ignore[assignment]
    return table, leaf


def find_session(module: nn.Module) -> Session | None:
    """The session of a planned module; None before planning."""
    found = module.__dict__.get(_KEY)
    return found if isinstance(found, Session) else None
