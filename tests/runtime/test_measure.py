"""Operators are measured on operands of exactly their types, and the figures follow the work."""

import time

import pytest
import torch

from shardwright.ir import Arg, Node, Ref, TensorType, Token
from shardwright.runtime.measure import MeasureError, measure_op, one_thread, time_call
from shardwright.runtime.operand_values import make_operands, make_tensor
from shardwright.runtime.torch_ops import tensor_type

CPU = torch.device("cpu")
x, y, z = Ref("x"), Ref("y"), Ref("z")
Types = dict[str, TensorType]


def f32(*shape: int) -> TensorType:
    return TensorType("f32", shape)


def i64(*shape: int) -> TensorType:
    return TensorType("i64", shape)


def seconds(op: str, args: tuple[Arg, ...], types: Types, *results: TensorType, **kwargs: Arg) -> float:
    node = Node(op, args, tuple(kwargs.items()), tuple(f"r{i}" for i in range(len(results))))
    return measure_op(node, tuple(types[name] for name in node.operands), results, CPU)


Q, LSE = f32(2, 4, 64, 32), f32(2, 4, 64)
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu"
CALLS: dict[str, tuple[str, tuple[Arg, ...], Types, tuple[TensorType, ...]]] = {
    "transposed operand": ("aten.mm.default", (x, y), {"x": f32(64, 32), "y": TensorType("f32", (32, 16), (1, 32))},
                           (f32(64, 16),)),
    "embedding": ("aten.embedding.default", (x, y), {"x": f32(5, 8), "y": i64(3, 4)}, (f32(3, 4, 8),)),
    "embedding backward": ("aten.embedding_dense_backward.default", (x, y, 5, -1, False),
                           {"x": f32(3, 4, 8), "y": i64(3, 4)}, (f32(5, 8),)),
    "loss": ("aten.nll_loss_forward.default", (x, y, None, 1, -100), {"x": f32(7, 3), "y": i64(7)}, (f32(), f32())),
    "loss backward": ("aten.nll_loss_backward.default", (z, x, y, None, 1, -100, Ref("w")),
                      {"z": f32(), "x": f32(7, 3), "y": i64(7), "w": f32()}, (f32(7, 3),)),
    "attention": (f"{FLASH}.default", (x, x, x, 0.0, True), {"x": Q}, (Q, LSE)),
    "attention backward": (f"{FLASH}_backward.default", (x, x, x, x, x, y, 0.0, True), {"x": Q, "y": LSE}, (Q, Q, Q)),
    "grouped matmul": ("aten._grouped_mm.default", (x, y, z),
                       {"x": TensorType("bf16", (64, 32)), "y": TensorType("bf16", (4, 32, 16)),
                        "z": TensorType("i32", (4,))}, (TensorType("bf16", (64, 16)),)),
    "index list": ("aten.index.Tensor", (x, (None, y)), {"x": f32(64, 5), "y": i64(7)}, (f32(64, 7),)),
    "gather along the last dim": ("aten.gather.default", (x, -1, y), {"x": f32(6, 3), "y": i64(6, 2)}, (f32(6, 2),)),
    "mask": ("aten.where.self", (x, y, z), {"x": TensorType("bool", (4, 5)), "y": f32(4, 5), "z": f32()}, (f32(4, 5),)),
    "own": ("mesh.own", (x, "tp", 1, 1), {"x": f32(6, 8)}, (f32(6, 2),)),
    "merge": ("mesh.merge", (x, 2, 1, 1), {"x": f32(6, 8)}, (f32(3, 16),)),
    "stack": ("mesh.stack", (x, 2, 1, 1), {"x": f32(3, 16)}, (f32(6, 8),)),
    "pack": ("mesh.pack", (x, y), {"x": f32(3, 4), "y": f32(5)}, (f32(17),)),
    "coordinate": ("mesh.coordinate", ("tp",), {}, (i64(),)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_operators_run_on_made_up_operands(call: tuple[str, tuple[Arg, ...], Types, tuple[TensorType, ...]]) -> None:
    """Indices are legal, offsets ascend, scalars and masks are there: nothing raises, and something takes time."""
    op, args, types, results = call
    assert 1e-8 < seconds(op, args, types, *results) < 0.1


def test_a_factory_takes_dtype_and_device_from_its_tokens() -> None:
    assert (
        seconds("aten.full.default", ((8, 8), 1.0), {}, f32(8, 8), dtype=Token("dtype.f32"), device=Token("device.cpu"))
        > 0
    )


@pytest.mark.parametrize("op", ["aten.t.default", "mesh.wait", "mesh.all_gather", "tier.reload"])
def test_views_and_starts_cost_nothing(op: str) -> None:
    assert seconds(op, (x,), {"x": f32(4, 4)}, f32(4, 4)) == 0


def test_eight_times_the_work_takes_longer() -> None:
    """A matmul of 384 cubed against 192 cubed; a loose bound, since other processes may run."""
    small, large = (seconds("aten.mm.default", (x, y), {"x": f32(n, n), "y": f32(n, n)}, f32(n, n)) for n in (192, 384))
    assert large > 2 * small


def test_what_cannot_run_says_so_with_operator_and_types() -> None:
    with pytest.raises(MeasureError, match=r"aten.mm.default.*f32\[3, 4\], f32\[5, 6\].*RuntimeError"):
        seconds("aten.mm.default", (x, y), {"x": f32(3, 4), "y": f32(5, 6)}, f32(3, 6))


def test_the_number_of_threads_is_restored_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError), one_thread(CPU):
            assert torch.get_num_threads() == 1
            raise RuntimeError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_waiting_for_others_is_not_the_operator_s_time() -> None:
    """A rank's neighbours are priced by contention; they must not be counted twice, nor strangers at all."""
    assert time_call(lambda: time.sleep(0.01), CPU) < 0.005


def test_the_time_of_a_call_is_its_time_and_a_slow_one_runs_twice() -> None:
    runs: list[int] = []

    def slow() -> None:
        runs.append(1)
        start = time.thread_time()
        while time.thread_time() - start < 0.08:
            pass

    assert time_call(slow, CPU) == pytest.approx(0.08, rel=0.5)
    assert len(runs) == 2


@pytest.mark.parametrize(
    "kind",
    [f32(3, 4), TensorType("f32", (3, 4), (1, 3)), TensorType("f32", (3, 4), (0, 1)),
     TensorType("bf16", (3, 4), (8, 2)), i64(), f32(0, 3), TensorType("bool", (2,)), TensorType("c64", (2, 2))],
    ids=str,
)  # fmt: skip
def test_operands_have_the_type_asked_for(kind: TensorType) -> None:
    """Strides included: a kernel's speed depends on them."""
    assert tensor_type(make_tensor(kind, torch.Generator().manual_seed(0))) == kind


def test_indices_cover_their_table_and_stay_inside() -> None:
    node = Node("aten.embedding.default", (x, y), (), ("r",))
    made = make_operands(node, (f32(50, 2), i64(2000)), CPU)
    assert sorted(set(made["y"].tolist())) == list(range(50))
