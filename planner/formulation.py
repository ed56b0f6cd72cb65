"""What the formulation is about and what it gives: the machine, the program, and the meaning of its variables."""

from dataclasses import dataclass, field

from shardwright.ir import Clip, Cluster, Layout, TensorType, local_shape
from shardwright.passes.optimizers import OptimizerSpec
from shardwright.passes.prices import Prices
from shardwright.planner.fates import FateChoice
from shardwright.planner.flows import Flows
from shardwright.planner.linear import LinearModel
from shardwright.planner.space import Space
from shardwright.planner.storages import Storages

__all__ = ["Formulation", "Machine"]


@dataclass(frozen=True)
class Machine:
    """What the formulation asks about the world."""

    cluster: Cluster
    prices: Prices
    optimizer: OptimizerSpec
    host_bytes: int
    """Budget of the host tier of one rank; 0: none."""
    disk_bytes: int = 0
    """Budget of the disk tier of one rank; 0: none."""
    accumulate: int = 1
    """Micro-batches a step: how often forward and backward run before the optimizer does."""
    clip: Clip = Clip.UNKNOWN
    """What the script declares about gradients."""


@dataclass
class Formulation:
    """The program and the meaning of its variables."""

    space: Space
    machine: Machine
    model: LinearModel
    flows: Flows
    storages: Storages
    fates: dict[str, FateChoice]
    peak: int
    """Variable: bytes of the fullest position, in `unit_bytes`."""
    unit_bytes: float
    """Of memory rows and of `peak`: the solver's tolerances are absolute, and small models must not vanish in them."""
    host: dict[str, int] = field(default_factory=dict)
    """Parameter to the integer variable: layers whose optimizer state lives on the host."""
    host_parameters: dict[str, int] = field(default_factory=dict)
    """Parameter to the integer variable: layers that lie on the host themselves."""
    fetched: dict[str, dict[int, float]] = field(default_factory=dict)
    """Parameter to the GB that one layer's copy takes on the device, over the layers' shares that lie on the host."""
    sent_gradients: dict[str, dict[int, float]] = field(default_factory=dict)
    """Parameter to the GB of its gradient, over the layers' shares, that leave the device within backward."""
    kept_copies: dict[str, int] = field(default_factory=dict)
    """Value to the integer variable: layers whose redistributed copy is kept for backward."""
    kept_shares: dict[tuple[str, Layout, Layout], int] = field(default_factory=dict)
    """(value, as it is made, as it is read) to the share of layers that keep that copy."""
    _local_types: dict[tuple[str, Layout], TensorType] = field(default_factory=dict, repr=False)

    @property
    def hosted(self) -> tuple[int, ...]:
        """Variables that put optimizer state and parameters on the host."""
        return (*self.host.values(), *self.host_parameters.values())

    def local(self, value: str, layout: Layout) -> TensorType:
        """What one rank holds of a value."""
        if (value, layout) not in self._local_types:
            whole = self.space.graph.types[value]
            local = TensorType(whole.dtype, local_shape(whole.shape, layout, self.space.mesh))
            self._local_types[value, layout] = local
        return self._local_types[value, layout]
