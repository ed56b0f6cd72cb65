"""Error of the analytical prices against measured operator and collective tables.

    python benchmarks/cost_model.py --data DIR

DIR holds llmcompass_ops.csv, op_efficiency_simumax.csv, nccl_measured.csv and nccl_allreduce_intranode_vtrain.csv (any
may be missing: then it says so). The curves of the model were fitted on parts of these tables, so the figures say how
well the model's *form* fits, not how well it predicts an unseen machine. Prints, by table, device and operator: rows,
mean absolute percentage error, median and 90th percentile of the absolute error, and the median signed error.
"""

import argparse
import csv
import math
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwright.ir import Node, Ref, TensorType
from shardwright.ir.cluster import Cluster, Device, Host, Link
from shardwright.passes.analytical import AnalyticalPrices


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement and what the model says."""

    group: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def cluster(
    peak: float, bandwidth: float, efficiency: float, launch: float, intra: Link, ranks: int = 8
) -> AnalyticalPrices:
    """Public peaks of a device (vendor), its best-shape matmul fraction (ml-engineering's search), its link."""
    device = Device("cuda", 80 * 10**9, bandwidth, {"bf16": peak}, efficiency, launch, 512, False)
    host = Host(10**12, 25e9, 1e-5, 2**20, 1e9, 1.0)
    return AnalyticalPrices(Cluster("", 4, ranks, device, intra, Link(45e9, 14e-6, 1.0), host))


RING = 3.4e-6  # NCCL's hop over NVLink with the Simple protocol
NO_LINK = Link(1e11, RING, 1.0)
DEVICES = {
    # LLMCompass times calls from Python one by one, so its launch floor is larger than inside a step.
    "A100": cluster(312e12, 2.039e12, 0.87, 20e-6, NO_LINK),
    "MI210": cluster(181e12, 1.638e12, 0.6, 20e-6, NO_LINK),
    "A100-PCIe-80GB": cluster(312e12, 1.935e12, 0.81, 5e-6, NO_LINK),
    "B200-SXM": cluster(2250e12, 8e12, 0.78, 5e-6, NO_LINK),
}
# Large-message ring bandwidth a rank, from the same machines' largest all-reduce.
SYSTEMS = {
    "8xA100 SXM NVLink3": cluster(312e12, 2e12, 0.87, 5e-6, Link(235e9, RING, 1.0)),
    "8xH200 NVLink4 ring": cluster(989e12, 4.8e12, 0.8, 5e-6, Link(367e9, RING, 1.0)),
    "8xH200 NVLink4 NVLS": cluster(989e12, 4.8e12, 0.8, 5e-6, Link(482e9, RING, 1.0)),
    "8xB200 NVLink5 NVLS": cluster(2250e12, 8e12, 0.78, 5e-6, Link(846e9, RING, 1.0)),
    "a100": cluster(312e12, 2e12, 0.87, 5e-6, Link(235e9, RING, 1.0)),
    "v100": cluster(125e12, 0.9e12, 0.8, 5e-6, Link(130e9, RING, 1.0)),
}


def table(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def op_seconds(prices: AnalyticalPrices, op: str, inputs: list[tuple[int, ...]], output: tuple[int, ...]) -> float:
    names = tuple(f"x{position}" for position in range(len(inputs)))
    node = Node(op, tuple(map(Ref, names)), (), ("y",))
    return prices.op_seconds(node, tuple(TensorType("bf16", shape) for shape in inputs), (TensorType("bf16", output),))


def matmul_seconds(prices: AnalyticalPrices, m: int, k: int, n: int) -> float:
    return op_seconds(prices, "aten.mm.default", [(m, k), (k, n)], (m, n))


LLMCOMPASS_OPS = {
    "softmax": "aten._softmax.default",
    "layernorm": "aten.native_layer_norm.default",
    "gelu": "aten.gelu.default",
}
LARGE_ELEMENTS = 2**24
"""Below, calls from Python cost as much as the operator: 47 us on the A100."""


def llmcompass(path: Path) -> Iterator[Row]:
    for line in table(path):
        prices, shape = DEVICES[line["device"]], tuple(map(int, line["shape"].split("x")))
        group = f"{line['device']} {line['op']}"
        if line["op"] == "matmul":
            m, k, n = shape
            measured = 2 * m * k * n / (float(line["throughput"]) * 1e12)
            yield Row(group, measured, matmul_seconds(prices, m, k, n))
        else:
            elements = math.prod(shape)
            measured = elements / (float(line["throughput"]) * 1e9)
            size = "large" if elements >= LARGE_ELEMENTS else "small"
            yield Row(f"{group}, {size}", measured, op_seconds(prices, LLMCOMPASS_OPS[line["op"]], [shape], shape))


def fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)\b", text)}


def simumax(path: Path) -> Iterator[Row]:
    for line in table(path):
        prices, size, rate = DEVICES[line["device"]], fields(line["shape"]), float(line["achieved_tflops"]) * 1e12
        group = f"{line['device']} {line['op']}"
        if line["op"] == "matmul":
            layout = re.findall(r"layout=(\w+)", line["shape"])[0]
            m, k, n = size["m"], size["k"], size["n"]
            yield Row(f"{group} {layout}", 2 * m * k * n / rate, matmul_seconds(prices, m, k, n))
        elif line["op"] == "group_matmul":
            groups, m, k, n = size["ng"], size["M"], size["K"], size["N"]
            predicted = op_seconds(prices, "aten.bmm.default", [(groups, m, k), (groups, k, n)], (groups, m, n))
            yield Row(group, 2 * groups * m * k * n / rate, predicted)
        else:
            yield attention_row(group, prices, size, rate, backward=line["op"] == "sdp_bwd")


def attention_row(group: str, prices: AnalyticalPrices, size: dict[str, int], rate: float, *, backward: bool) -> Row:
    """The table counts the whole square of a causal kernel: forward two products, backward five."""
    batch, length, heads = size["batch"], size["seq_len"], size["head_num"]
    deep, wide = size["qk_head_dim"], size["v_head_dim"]
    query, value = (TensorType("bf16", (batch, heads, length, depth)) for depth in (deep, wide))
    sums = TensorType("f32", (batch, heads, length))
    op = "aten._scaled_dot_product_flash_attention"
    inputs, refs = (query, query, value), tuple(map(Ref, "qkv"))
    if backward:
        args = (Ref("g"), *refs, Ref("o"), Ref("l"), None, None, length, length, 0.0, True)
        node = Node(f"{op}_backward.default", args, (), ("dq", "dk", "dv"))
        predicted = prices.op_seconds(node, (value, *inputs, value, sums), inputs)
    else:
        node = Node(f"{op}.default", (*refs, 0.0, True), (), ("o", "l"))
        predicted = prices.op_seconds(node, inputs, (value, sums))
    depth = 3 * deep + 2 * wide if backward else deep + wide
    return Row(group, 2 * batch * heads * length**2 * depth / rate, predicted)


def nccl_measured(path: Path) -> Iterator[Row]:
    for line in table(path):
        prices, nodes, ranks = SYSTEMS.get(line["system"]), int(line["nodes"]), int(line["ranks"])
        if prices is None or nodes > 1 or not line["time_us"]:
            continue
        kind = line["collective"].replace("alltoall", "all_to_all")
        predicted = prices.collective_seconds(kind, int(line["size_bytes"]), (ranks,), 0)
        yield Row(f"{line['system']} {kind}", float(line["time_us"]) * 1e-6, predicted)


def vtrain(path: Path) -> Iterator[Row]:
    for line in table(path):
        prices = SYSTEMS[line["gpu"]]
        predicted = prices.collective_seconds("all_reduce", int(line["size_bytes"]), (int(line["ranks"]),), 0)
        yield Row(f"{line['gpu']} all_reduce, 2 to 8 ranks", float(line["time_ns"]) * 1e-9, predicted)


TABLES: dict[str, Callable[[Path], Iterator[Row]]] = {
    "llmcompass_ops.csv": llmcompass,
    "op_efficiency_simumax.csv": simumax,
    "nccl_measured.csv": nccl_measured,
    "nccl_allreduce_intranode_vtrain.csv": vtrain,
}


def summary(rows: list[Row]) -> str:
    errors = sorted(abs(row.error) for row in rows)
    p90 = errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)]
    signed = statistics.median(row.error for row in rows)
    return (f"{len(rows):5d} {statistics.fmean(errors):8.1%} {statistics.median(errors):8.1%} {p90:8.1%} "
            f"{signed:+8.1%}")  # fmt: skip


def report(name: str, rows: list[Row]) -> None:
    print(f"{name:48s} {'rows':>5s} {'MAPE':>8s} {'median':>8s} {'p90':>8s} {'bias':>8s}")
    for group in dict.fromkeys(row.group for row in rows):
        print(f"  {group:46s} {summary([row for row in rows if row.group == group])}")
    print(f"  {'all':46s} {summary(rows)}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Error of the analytical prices against measured tables.")
    parser.add_argument("--data", type=Path, required=True, help="folder with the tables")
    folder: Path = parser.parse_args().data
    for name, read in TABLES.items():
        path = folder / name
        rows = list(read(path)) if path.exists() else []
        if rows:
            report(name, rows)
        else:
            print(f"{name}: no rows for the devices known here\n" if path.exists() else f"{name}: not in {folder}\n")


if __name__ == "__main__":
    main()
