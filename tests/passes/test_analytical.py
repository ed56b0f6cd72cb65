"""The analytical model: what must hold of seconds on any machine, and anchors measured on real ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.ir import ClusterError, Node, Ref, TensorType, Tier
from shardwright.ir.cluster import Cluster, Device, Disk, Host, Link
from shardwright.passes.analytical import AnalyticalPrices, matmul_efficiency
from shardwright.passes.collective_model import Span, span_of
from shardwright.passes.work import Products

A100 = Cluster(
    "a100",
    num_nodes=4,
    ranks_per_node=8,
    device=Device("cuda", 80 * 10**9, 2.039e12, {"bf16": 312e12, "f32": 19.5e12}, 0.87, 5e-6, 512, False),
    intra=Link(235e9, 3.4e-6, 1.0),
    inter=Link(22.5e9, 14e-6, 1.0),
    host=Host(10**11, 25e9, 1e-5, 2**20, 5e8, 1.0),
)
PRICES = AnalyticalPrices(A100)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def mm_seconds(m: int, k: int, n: int, dtype: str = "bf16", prices: AnalyticalPrices = PRICES) -> float:
    node = Node("aten.mm.default", (Ref("a"), Ref("b")), (), ("c",))
    operands = (TensorType(dtype, (m, k)), TensorType(dtype, (k, n)))
    return prices.op_seconds(node, operands, (TensorType(dtype, (m, n)),))


def unary_seconds(op: str, kind: TensorType, prices: AnalyticalPrices = PRICES) -> float:
    return prices.op_seconds(Node(op, (Ref("a"),), (), ("b",)), (kind,), (kind,))


sides = st.integers(1, 20_000)


@given(sides, sides, sides)
def test_no_matmul_beats_the_best_shape_or_the_launch(m: int, k: int, n: int) -> None:
    efficiency = matmul_efficiency(Products(1, m, n, k), A100.device)
    assert 0 < efficiency <= A100.device.matmul_efficiency
    assert mm_seconds(m, k, n) > A100.device.launch_seconds + 2 * m * k * n / (312e12 * 0.87)


@given(sides, sides, sides)
def test_a_larger_contraction_takes_longer_but_is_more_efficient(m: int, k: int, n: int) -> None:
    assert mm_seconds(m, 2 * k, n) >= mm_seconds(m, k, n)
    larger, smaller = (matmul_efficiency(Products(1, m, n, size), A100.device) for size in (2 * k, k))
    assert larger > smaller


@pytest.mark.parametrize(
    ("m", "k", "n", "measured"),
    [(8192, 12288, 12288, 8.62e-3), (8192, 2048, 2048, 2.82e-4), (64, 12288, 12288, 1.9e-4)],
)
def test_a100_matmuls_are_within_20_percent_of_measured(m: int, k: int, n: int, measured: float) -> None:
    """Three shapes of LLMCompass: large, middling, and bound by memory."""
    assert mm_seconds(m, k, n) == pytest.approx(measured, rel=0.2)


def test_a_dtype_without_a_rate_takes_its_relative_s() -> None:
    assert mm_seconds(4096, 4096, 4096, "f16") == mm_seconds(4096, 4096, 4096, "bf16")
    f64 = mm_seconds(4096, 4096, 4096, "f64") - A100.device.launch_seconds
    assert f64 == pytest.approx(2 * (mm_seconds(4096, 4096, 4096, "f32") - A100.device.launch_seconds))


def test_views_are_free_and_small_operators_cost_a_launch() -> None:
    assert unary_seconds("aten.t.default", TensorType("f32", (2, 3))) == 0
    assert unary_seconds("aten.relu.default", TensorType("f32", (2, 3))) == pytest.approx(5e-6, rel=0.01)


def test_a_fresh_tensor_too_large_for_the_heap_faults_on_a_cpu_only() -> None:
    """Past 32 MiB glibc maps a tensor anew each time: about 1.6 us a page of 4 KiB."""
    cpu = replace(A100, device=replace(A100.device, kind="cpu"))
    small, large = (TensorType("f32", (mebibytes * 2**18,)) for mebibytes in (32, 64))
    prices = AnalyticalPrices(cpu)
    extra = unary_seconds("aten.relu.default", large, prices) - 2 * unary_seconds("aten.relu.default", small, prices)
    assert extra == pytest.approx(1.6e-6 * 64 * 2**20 / 4096, rel=0.01)
    assert unary_seconds("aten.relu.default", large) < 2.01 * unary_seconds("aten.relu.default", small)


def test_an_unknown_device_kind_is_refused() -> None:
    with pytest.raises(ClusterError, match="found 'tpu'"):
        AnalyticalPrices(replace(A100, device=replace(A100.device, kind="tpu")))
    with pytest.raises(ClusterError, match="flops_per_second"):
        AnalyticalPrices(replace(A100, device=replace(A100.device, flops_per_second={})))


@given(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3), st.sampled_from([1, 2, 4, 8]), st.data())
def test_a_group_s_span_is_what_listing_its_ranks_gives(
    sizes: list[int], ranks_per_node: int, data: st.DataObject
) -> None:
    """Brute force: number the ranks row-major, take rank 0's group, count members on its node."""
    axis = data.draw(st.integers(0, len(sizes) - 1))
    stride = 1
    for size in sizes[axis + 1 :]:
        stride *= size
    nodes = [member * stride // ranks_per_node for member in range(sizes[axis])]
    assert span_of(tuple(sizes), axis, ranks_per_node) == Span(sizes[axis], nodes.count(0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_free(kind: str) -> None:
    assert PRICES.collective_seconds(kind, 10**9, (32, 1), 1) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(8,), (32,), (2, 4)])
def test_a_collective_takes_at_least_its_bytes_over_the_fastest_link(kind: str, sizes: tuple[int, ...]) -> None:
    num_bytes, n = 2**28, sizes[0]
    rounds = 2 if kind == "all_reduce" else 1
    assert PRICES.collective_seconds(kind, num_bytes, sizes, 0) > rounds * num_bytes * (n - 1) / n / 235e9


@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_nothing_takes_no_time(kind: str) -> None:
    seconds = [PRICES.collective_seconds(kind, 2**power, (32,), 0) for power in range(2, 32)]
    assert seconds == sorted(seconds) and seconds[0] > 1e-5


def test_a_group_that_spans_nodes_uses_every_nic_of_its_members() -> None:
    """Per rank: 4 groups of one rank a node get one NIC each, one group of 8 ranks a node gets eight."""
    num_bytes = 2**30
    narrow = PRICES.collective_seconds("all_gather", num_bytes, (4, 8), 0)
    wide = PRICES.collective_seconds("all_gather", num_bytes, (32,), 0)
    assert narrow == pytest.approx(num_bytes * 3 / 4 / 22.5e9, rel=0.02)
    assert wide == pytest.approx(num_bytes * 31 / 32 / (8 * 22.5e9), rel=0.1)


def test_the_wide_ring_is_never_faster_than_the_link_inside_a_node() -> None:
    fast = replace(A100, inter=Link(200e9, 14e-6, 1.0))
    seconds = AnalyticalPrices(fast).collective_seconds("all_gather", 2**32, (32,), 0)
    assert seconds > 2**32 * 31 / 32 / 235e9


@pytest.mark.parametrize(
    ("num_bytes", "measured"), [(2**15, 44e-6), (2**20, 102e-6), (2**22, 101e-6), (2**26, 685e-6), (2**30, 8.2e-3)]
)
def test_all_reduce_of_8_a100_follows_the_measured_plateau(num_bytes: int, measured: float) -> None:
    """nccl-tests on 8 A100: within 35 % from 32 KiB to 1 GiB, where bandwidth alone is off by a factor of 100."""
    assert PRICES.collective_seconds("all_reduce", num_bytes, (8,), 0) == pytest.approx(measured, rel=0.35)


def test_on_gloo_a_reduce_scatter_costs_more_than_an_all_reduce() -> None:
    cpu = AnalyticalPrices(replace(A100, device=replace(A100.device, kind="cpu")))
    assert cpu.collective_seconds("reduce_scatter", 2**26, (2, 1), 0) > cpu.collective_seconds(
        "all_reduce", 2**26, (2, 1), 0
    )


def test_copies_and_optimizer_follow_their_rates() -> None:
    assert PRICES.copy_seconds(0) == 0
    assert PRICES.copy_seconds(25 * 10**9) == pytest.approx(1 + 1e-5)
    adam, sgd = PRICES.optimizer_seconds(10**9, 8 * 10**9, False), PRICES.optimizer_seconds(10**9, 0, False)
    assert adam / sgd == pytest.approx(28 / 12, rel=0.01)
    assert PRICES.optimizer_seconds(10**9, 8 * 10**9, True) == pytest.approx(2.0)


def test_a_disk_reads_and_writes_at_rates_of_its_own_and_must_be_there() -> None:
    prices = AnalyticalPrices(replace(A100, disk=Disk(10**12, 2e9, 5e9, 1e-4)))
    assert prices.copy_seconds(0, Tier.DISK) == 0
    assert prices.copy_seconds(10**9, Tier.DISK) == pytest.approx(0.5 + 1e-4)
    assert prices.copy_seconds(10**9, Tier.DISK, back=True) == pytest.approx(0.2 + 1e-4)
    assert prices.copy_seconds(10**9, Tier.HOST, back=True) == PRICES.copy_seconds(10**9)
    with pytest.raises(ClusterError, match="expected a disk in cluster 'a100', found none"):
        PRICES.copy_seconds(1, Tier.DISK)
