"""Seconds of the optimizer's step, on the device and on the host; needs `Prices` and the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.ir import DTYPE_BYTES, TensorType
from shardwright.passes.optimizers import OptimizerSpec
from shardwright.passes.prices import Prices

__all__ = ["HostSeconds", "StepPrices"]


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Of one parameter that is stepped on the host."""

    gradient_out: float
    value_out: float
    """0 where a master stands for the value, or the value lies on the host."""
    step: float
    value_in: float
    """0 where the value lies on the host."""

    @property
    def total(self) -> float:
        return self.gradient_out + self.value_out + self.step + self.value_in

    @property
    def busy(self) -> float:
        """Of the thread that steps: all but the gradient's copy, which is under way by then."""
        return self.total - self.gradient_out


@dataclass(frozen=True, slots=True)
class StepPrices:
    """For one optimizer."""

    prices: Prices
    optimizer: OptimizerSpec

    def device_seconds(self, parameters: Sequence[TensorType]) -> float:
        """All of them, local, at once."""
        return self._seconds(parameters, False)

    def host_seconds(self, parameter: TensorType, *, lies_there: bool = False) -> HostSeconds:
        """Of one whose state is on the host; whether the parameter itself is, too."""
        gradient = self.prices.copy_seconds(parameter.num_bytes)
        has_master = self.optimizer.keeps_master(DTYPE_BYTES[parameter.dtype])
        value = 0.0 if lies_there else gradient
        return HostSeconds(gradient, 0.0 if has_master else value, self._seconds((parameter,), True), value)

    def _seconds(self, parameters: Sequence[TensorType], on_host: bool) -> float:
        sizes = ((kind.num_elements, DTYPE_BYTES[kind.dtype]) for kind in parameters)
        state_bytes = sum(self.optimizer.state_bytes(*size) for size in sizes)
        num_elements = sum(kind.num_elements for kind in parameters)
        return self.prices.optimizer_seconds(num_elements, state_bytes, on_host)
