"""What passes and planner ask of a device: seconds. `runtime` answers by measuring, `passes/analytical` by a model."""

from typing import Protocol

from shardwright.ir import Node, TensorType, Tier

__all__ = ["Prices"]


class Prices(Protocol):
    """Seconds for one rank. Implementations are pure: the same question has the same answer all along."""

    def op_seconds(self, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> float:
        """One operator at *local* shapes; views cost 0. `operands` in the order of `Node.operands`."""
        ...

    def collective_seconds(self, kind: str, num_bytes: int, group_sizes: tuple[int, ...], axis: int) -> float:
        """One collective, `kind` a name of `ir.ops.COLLECTIVES` without `mesh.`; `num_bytes` is the size of the
        whole (gathered, or to be reduced) tensor on one rank; the group is axis `axis` of a mesh of `group_sizes`."""
        ...

    def copy_seconds(self, num_bytes: int, tier: Tier = Tier.HOST, back: bool = False) -> float:
        """One copy from the device to a tier or, with `back`, from there. Reading and writing a disk differ."""
        ...

    def optimizer_seconds(self, num_elements: int, state_bytes: int, on_host: bool) -> float:
        """One optimizer step of that many local parameter elements."""
        ...
