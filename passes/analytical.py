"""Seconds by a model of the device, for machines that are not at hand: a roofline, and alpha-beta for links.

Needs a `Cluster`. Implements `Prices`; all seconds are of one rank. An operator takes launch + the largest of matrix,
memory and special-function seconds. Matrix units reach the device's best-shape fraction less what small tiles and a
short contraction lose. The curves' constants are fitted on the operator tables that `benchmarks/cost_model.py` reports
against; the device's are the cluster's. Collectives are in `collective_model`.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final

from shardwright.ir import ClusterError, Node, TensorType, Tier
from shardwright.ir.cluster import Cluster, Device
from shardwright.passes.collective_model import collective_seconds
from shardwright.passes.work import Products, Work, numbered, work_of

__all__ = ["AnalyticalPrices", "matmul_efficiency"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """How operators of a device kind behave relative to its peaks."""

    contraction_half: int
    """Contraction length at which a matmul loses half to filling and draining its pipeline."""
    side_half: int
    """Rows (or columns) at which a matmul loses half."""
    tile: int
    """Rows and columns are padded to multiples of this."""
    tiles_half: int
    """Number of tiles at which half of the device's units are busy."""
    memory_fraction: float
    """Of the peak bandwidth, reached by elementwise operators."""
    rows_fraction: float
    """The same for softmax and normalisations, which read more than once or wait for a row."""
    attention_fraction: float
    """Rate of a flash kernel relative to the best matmul, forward."""
    attention_backward_fraction: float
    special_elements_per_second: float
    """exp, tanh and the like; infinite where they hide behind memory."""
    fault_seconds: float
    """Of one 4 KiB page of a fresh tensor that its allocator gets from the system each time."""


# cuda: fitted on A100-PCIe matmuls (simumax) and A100, MI210 (llmcompass) together: MAPE 6 % and 12 %.
# cpu: one thread of an AVX-512 core on float32, measured with torch 2.13 (64 to 2,048 cubed, and thin ones).
_KINDS: Final = {
    "cuda": _Kind(300, 0, 128, 32, 0.8, 0.5, 0.65, 0.5, math.inf, 0.0),
    "cpu": _Kind(10, 7, 1, 0, 0.8, 0.5, 0.25, 0.25, 1.8e9, 1.6e-6),
}

_PAGE_BYTES: Final = 4096
_FAULTING_BYTES: Final = 32 * 2**20
"""glibc never raises its mmap threshold past this: larger tensors are mapped, and faulted in, anew each time."""

_SPECIAL: Final = frozenset(
    ("exp", "expm1", "log", "log1p", "pow", "erf", "sin", "cos", "tanh", "tanh_backward", "sigmoid", "gelu",
     "gelu_backward", "silu", "silu_backward", "mish", "mish_backward", "elu", "softplus", "softplus_backward",
     "_softmax", "_log_softmax", "_log_softmax_backward_data", "logsumexp", "native_dropout", "bernoulli", "rand",
     "randn", "rand_like", "randn_like")
)  # fmt: skip
"""Operators that evaluate exp or its like, or draw a number, for every element."""


def matmul_efficiency(product: Products, device: Device) -> float:
    """Fraction of the peak that a product of this shape reaches: `device.matmul_efficiency` for large ones."""
    kind = _KINDS[device.kind]
    rows, columns = (-(-side // kind.tile) * kind.tile for side in (product.m, product.n))
    if not rows or not columns or not product.k or not product.batch:
        return device.matmul_efficiency
    tiles = product.batch * (rows // kind.tile) * (columns // kind.tile)
    filled = product.m * product.n / (rows * columns)
    busy = tiles / (tiles + kind.tiles_half)
    deep = product.k / (product.k + kind.contraction_half)
    wide = product.m / (product.m + kind.side_half) * product.n / (product.n + kind.side_half)
    return device.matmul_efficiency * filled * busy * deep * wide


@dataclass(frozen=True)
class AnalyticalPrices:
    """Implements `Prices` for any cluster, at hand or not."""

    cluster: Cluster
    _known: dict[tuple[object, ...], float] = field(default_factory=dict, repr=False, compare=False)
    """Answers already given; the model is pure, so this only saves time."""

    def __post_init__(self) -> None:
        device = self.cluster.device
        if device.kind not in _KINDS:
            raise ClusterError(f"expected a device kind of {', '.join(_KINDS)}, found {device.kind!r} in cluster "
                               f"{self.cluster.name!r}: describe the device as one of them")  # fmt: skip
        if not device.flops_per_second:
            raise ClusterError(f"expected at least one dtype in flops_per_second of cluster {self.cluster.name!r}, "
                               "found none: add one, for instance f32")  # fmt: skip

    def op_seconds(self, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> float:
        call = numbered(node)
        key = (call.op, call.args, call.kwargs, operands, results)
        if key not in self._known:
            self._known[key] = self._op_seconds(node, operands, results)
        return self._known[key]

    def _op_seconds(self, node: Node, operands: tuple[TensorType, ...], results: tuple[TensorType, ...]) -> float:
        work = work_of(node, operands, results)
        if not work.num_bytes and not work.flops:
            return 0.0
        device, kind = self.cluster.device, _KINDS[self.cluster.device.kind]
        name = node.op.split(".")[1]
        fraction = kind.rows_fraction if "softmax" in name or "norm" in name else kind.memory_fraction
        memory_seconds = work.num_bytes / (device.memory_bytes_per_second * fraction)
        num_special = max(result.num_elements for result in results) if name in _SPECIAL else 0
        special_seconds = num_special / kind.special_elements_per_second
        busy_seconds = max(_matrix_seconds(work, device, kind, "backward" in name), memory_seconds, special_seconds)
        return device.launch_seconds + busy_seconds + _fault_seconds(results, kind)

    def collective_seconds(self, kind: str, num_bytes: int, group_sizes: tuple[int, ...], axis: int) -> float:
        return collective_seconds(self.cluster, kind, num_bytes, group_sizes, axis)

    def copy_seconds(self, num_bytes: int, tier: Tier = Tier.HOST, back: bool = False) -> float:
        """The way to the disk is as fast as the disk: the host's part of it goes on at the same time."""
        if not num_bytes:
            return 0.0
        if tier is Tier.DISK:
            return self._disk_seconds(num_bytes, back)
        host = self.cluster.host
        return host.copy_latency_seconds + num_bytes / host.copy_bytes_per_second

    def _disk_seconds(self, num_bytes: int, back: bool) -> float:
        disk = self.cluster.disk
        if disk is None:
            raise ClusterError(f"expected a disk in cluster {self.cluster.name!r}, found none: add a table [disk]")
        rate = disk.read_bytes_per_second if back else disk.write_bytes_per_second
        return disk.latency_seconds + num_bytes / rate

    def optimizer_seconds(self, num_elements: int, state_bytes: int, on_host: bool) -> float:
        """Parameters and gradients count as float32: read both, write one, read and write the state."""
        if not num_elements:
            return 0.0
        moved_bytes = 12 * num_elements + 2 * state_bytes
        if on_host:
            adam_bytes = 28 * num_elements
            return num_elements / self.cluster.host.optimizer_elements_per_second * moved_bytes / adam_bytes
        device = self.cluster.device
        bandwidth = device.memory_bytes_per_second * _KINDS[device.kind].memory_fraction
        return device.launch_seconds + moved_bytes / bandwidth

    def with_device(self, device: Device) -> "AnalyticalPrices":
        """The same model on another device, as calibration does."""
        return AnalyticalPrices(replace(self.cluster, device=device))


def _matrix_seconds(work: Work, device: Device, kind: _Kind, backward: bool) -> float:
    if not work.flops:
        return 0.0
    peak = _peak(device, work.dtype)
    if not work.products:
        fraction = kind.attention_backward_fraction if backward else kind.attention_fraction
        return work.flops / (peak * device.matmul_efficiency * fraction)
    return sum(p.flops / (peak * matmul_efficiency(p, device)) for p in work.products)


# A dtype the cluster does not name runs at the rate of the first of these that it does; f64 at half of f32.
_STAND_INS: Final = {"bf16": ("f16",), "f16": ("bf16",), "f8e4m3": ("f8e5m2", "bf16", "f16"), "f8e5m2": ("f8e4m3",)}


def _peak(device: Device, dtype: str) -> float:
    peaks = device.flops_per_second
    for name in (dtype, *_STAND_INS.get(dtype, ()), "f32"):
        if name in peaks:
            return peaks[name] / (2 if dtype == "f64" and name == "f32" else 1)
    return min(peaks.values())


def _fault_seconds(results: tuple[TensorType, ...], kind: _Kind) -> float:
    mapped_bytes = sum(r.num_bytes for r in results if r.num_bytes > _FAULTING_BYTES)
    return mapped_bytes / _PAGE_BYTES * kind.fault_seconds
