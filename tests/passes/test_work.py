"""Operations and bytes of a call, against torch's own flop counter and a naive count."""

import pytest
import torch
from torch.utils import flop_counter

from shardwright.ir import Arg, Node, Ref, TensorType
from shardwright.passes.work import Work, work_of
from shardwright.runtime.torch_ops import tensor_type, torch_arg, torch_op

Shapes = dict[str, tuple[int, ...]]
x, y, z = Ref("x"), Ref("y"), Ref("z")


def run_and_count(op: str, args: tuple[Arg, ...], shapes: Shapes) -> tuple[Work, int]:
    """Our work of a call, and torch's flops of it when it runs."""
    values = {name: torch.rand(shape) for name, shape in shapes.items()}
    with flop_counter.FlopCounterMode(display=False) as counter:
        outputs = torch_op(op)(*(torch_arg(arg, values, torch.device("cpu")) for arg in args))
    tensors = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
    node = Node(op, args, (), tuple(f"r{i}" for i in range(len(tensors))))
    operands = tuple(tensor_type(values[name]) for name in node.operands)
    return work_of(node, operands, tuple(map(tensor_type, tensors))), counter.get_total_flops()


CONV = {"x": (2, 4, 9, 7), "y": (6, 2, 3, 3), "z": (6,)}
CALLS: dict[str, tuple[str, tuple[Arg, ...], Shapes]] = {
    "mm": ("aten.mm.default", (x, y), {"x": (5, 7), "y": (7, 3)}),
    "addmm": ("aten.addmm.default", (z, x, y), {"x": (5, 7), "y": (7, 3), "z": (3,)}),
    "bmm": ("aten.bmm.default", (x, y), {"x": (4, 5, 7), "y": (4, 7, 3)}),
    "baddbmm": ("aten.baddbmm.default", (z, x, y), {"x": (4, 5, 7), "y": (4, 7, 3), "z": (4, 5, 3)}),
    "grouped convolution": (
        "aten.convolution.default", (x, y, z, (2, 2), (1, 1), (1, 1), False, (0, 0), 2), CONV),
    "transposed convolution": (
        "aten.convolution.default", (x, y, None, (2, 2), (1, 1), (1, 1), True, (0, 0), 1),
        {"x": (2, 6, 9, 7), "y": (6, 4, 3, 3)}),
    "convolution backward": (
        "aten.convolution_backward.default",
        (z, x, y, (6,), (2, 2), (1, 1), (1, 1), False, (0, 0), 1, (True, True, True)),
        {"x": (2, 4, 9, 7), "y": (6, 4, 3, 3), "z": (2, 6, 5, 4)}),
    "convolution backward, weight only": (
        "aten.convolution_backward.default",
        (z, x, y, (6,), (2, 2), (1, 1), (1, 1), False, (0, 0), 1, (False, True, True)),
        {"x": (2, 4, 9, 7), "y": (6, 4, 3, 3), "z": (2, 6, 5, 4)}),
    "elementwise": ("aten.mul.Tensor", (x, y), {"x": (5, 7), "y": (5, 7)}),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_flops_are_those_torch_counts(call: tuple[str, tuple[Arg, ...], Shapes]) -> None:
    ours, torchs = run_and_count(*call)
    assert ours.flops == torchs
    assert sum(product.flops for product in ours.products) == torchs


def test_linear_counts_as_the_product_it_is() -> None:
    node = Node("aten.linear.default", (x, y, z), (), ("r",))
    kinds = tuple(TensorType("f32", shape) for shape in ((2, 5, 7), (3, 7), (3,)))
    assert work_of(node, kinds, (TensorType("f32", (2, 5, 3)),)).flops == 2 * 10 * 7 * 3


GROUPED = [((24, 8), (3, 8, 5), (24, 5)), ((8, 24), (24, 5), (3, 8, 5)), ((3, 8, 6), (6, 9), (8, 9)),
           ((3, 8, 6), (3, 6, 5), (3, 8, 5))]  # fmt: skip
GROUPED_FLOPS = [2 * 24 * 8 * 5, 2 * 8 * 24 * 5, 2 * 8 * 6 * 9, 2 * 3 * 8 * 6 * 5]


@pytest.mark.parametrize(("shapes", "flops"), [*zip(GROUPED, GROUPED_FLOPS, strict=True)])
def test_grouped_products_count_every_row_once(shapes: tuple[tuple[int, ...], ...], flops: int) -> None:
    """However many groups share the rows, the columns or the contracted dim."""
    node = Node("aten._grouped_mm.default", (x, y, z), (), ("r",))
    left, right, out = (TensorType("bf16", shape) for shape in shapes)
    assert work_of(node, (left, right, TensorType("i32", (3,))), (out,)).flops == flops


QUERY, KEY, VALUE = (2, 4, 24, 8), (2, 4, 40, 8), (2, 4, 40, 16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_counts_what_its_mask_leaves(causal: bool, backward: bool) -> None:
    """Torch counts the whole square; we count the pairs that a causal mask lets through."""
    kinds = [TensorType("f32", shape) for shape in (QUERY, KEY, VALUE)]
    out, sums = TensorType("f32", (2, 4, 24, 16)), TensorType("f32", (2, 4, 24))
    refs = (Ref("q"), Ref("k"), Ref("v"))
    op = "aten._scaled_dot_product_flash_attention_for_cpu"
    node, operands = Node(f"{op}.default", (*refs, 0.0, causal), (), ("o", "l")), tuple(kinds)
    if backward:
        args: tuple[Arg, ...] = (Ref("g"), *refs, Ref("o"), Ref("l"), 0.0, causal)
        node, operands = Node(f"{op}_backward.default", args, (), ("a", "b", "c")), (out, *kinds, out, sums)
    results = tuple(kinds) if backward else (out, sums)
    whole = int(flop_counter.sdpa_flop_count(QUERY, KEY, VALUE))  # type: ignore[no-untyped-call]
    if backward:
        whole = int(flop_counter.sdpa_backward_flop_count(out.shape, QUERY, KEY, VALUE))  # type: ignore[no-untyped-call]
    pairs = sum(1 for row in range(24) for column in range(40) if column <= row)
    share = pairs / (24 * 40) if causal else 1.0
    assert work_of(node, operands, results).flops == whole * share


def call_bytes(op: str, args: tuple[Arg, ...], operands: list[TensorType], result: TensorType) -> int:
    return work_of(Node(op, args, (), ("r",)), tuple(operands), (result,)).num_bytes


def test_bytes_are_read_once_and_written_once() -> None:
    kind = TensorType("f32", (10, 20))
    assert call_bytes("aten.mul.Tensor", (x, y), [kind, kind], kind) == 3 * 800
    assert call_bytes("aten.mul.Tensor", (x, x), [kind, kind], kind) == 2 * 800, "one tensor read twice is read once"


def test_an_expanded_operand_is_as_small_as_its_storage() -> None:
    kind, row = TensorType("f32", (10, 20)), TensorType("f32", (10, 20), (0, 1))
    assert call_bytes("aten.mul.Tensor", (x, y), [kind, row], kind) == 800 + 80 + 800


def test_a_lookup_reads_the_rows_it_needs_not_the_table() -> None:
    table, index = TensorType("f32", (1000, 20)), TensorType("i64", (3,))
    result = TensorType("f32", (3, 20))
    assert call_bytes("aten.embedding.default", (x, y), [table, index], result) == 240 + 24 + 240


@pytest.mark.parametrize("op", ["aten.t.default", "mesh.wait", "mesh.all_gather", "tier.offload"])
def test_views_waits_and_starts_do_no_work(op: str) -> None:
    kind = TensorType("f32", (10, 20))
    assert work_of(Node(op, (x,), (), ("r",)), (kind,), (kind,)) == Work(0, 0, "f32")
