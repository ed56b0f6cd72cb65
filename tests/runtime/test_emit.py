"""The emitted program computes what the rank graph says, keeps what it says, and frees what it says."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from tests.rank_graphs import GraphWriter, expected_peak_bytes, mlp, mlp_values, plain_mlp
from tests.tracker import StorageTracker
from torch import Tensor

from shardwright.ir import Graph, GraphError, InputError, InputKind, Mesh, Node, Phase, Ref, TensorType, Token
from shardwright.runtime import kernels
from shardwright.runtime.copies import CpuCopies
from shardwright.runtime.emit import emit, saved_values
from shardwright.runtime.host_pool import HostPool
from shardwright.runtime.lockstep import run_lockstep
from shardwright.runtime.program import Program

CPU = torch.device("cpu")
ALONE = Mesh(("x",), (1,))


def emitted(graph: Graph, **options: object) -> Program:
    return emit(graph, ALONE, 0, {}, CPU, **options)  # type: ignore[arg-type]


def step(program: Program, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """One forward and backward; every returned value and gradient by name."""
    returned, saved = program.forward([values[name] for name in program.inputs])
    gradients = program.backward(saved, *(values[name] for name in program.tangents))
    return {
        **dict(zip(program.returned, returned, strict=True)),
        **dict(zip(program.parameters, gradients, strict=True)),
    }


def single(w: GraphWriter, values: dict[str, Tensor], **outputs: str) -> dict[str, Tensor]:
    """Emits a forward-only graph and runs it, checked against lockstep."""
    graph = w.graph(outputs=outputs or {name: name for name in w.types if name not in values})
    program = emitted(graph)
    returned, saved = program.forward([values[name] for name in program.inputs])
    assert saved == []
    found = dict(zip(program.returned, returned, strict=True))
    oracle = run_lockstep(graph, ALONE, [values])[0]
    assert all(torch.equal(value, oracle[name]) for name, value in found.items())
    return found


@pytest.mark.parametrize("kind", ["plain", "dp", "fsdp", "tp"])
def test_a_step_equals_lockstep_and_plain_torch(kind: str) -> None:
    values, graph = mlp_values(torch.float64), mlp(kind)
    found = step(emitted(graph), values)
    oracle = run_lockstep(graph, ALONE, [values])[0]
    plain = plain_mlp(values)
    assert torch.equal(found[graph.loss], oracle[graph.loss])
    assert torch.allclose(found[graph.loss], plain["loss"], rtol=1e-12)
    for param, value in graph.gradients.items():
        assert torch.equal(found[param], oracle[value])
        assert torch.allclose(found[param], plain[param], rtol=1e-12)


def test_names_say_what_goes_in_and_out() -> None:
    program = emitted(mlp("plain"))
    assert program.inputs == ("up.weight", "down.weight", "data", "target")
    assert program.returned == ("loss/div", "down/mm")
    assert program.saved == ("down.weight", "data", "act/relu", "loss/sub") == saved_values(mlp("plain"))
    assert (program.tangents, program.parameters) == (("tangent",), ("up.weight", "down.weight"))


@pytest.mark.parametrize("kind", ["plain", "dp", "fsdp", "tp", "offload"])
def test_the_peak_of_memory_is_that_of_the_graphs_lifetimes(kind: str) -> None:
    values, graph = mlp_values(), mlp(kind)
    pool = HostPool(10_000)
    program = emitted(graph, copies=CpuCopies(CPU, pool))
    held = list(values.values())
    with StorageTracker(held, excluded=pool.owns) as memory:
        returned, saved = program.forward([values[name] for name in program.inputs])
        gradients = program.backward(saved, values["tangent"])
    assert memory.peak_bytes == expected_peak_bytes(graph)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*held, *returned, *gradients)}
    assert memory.current_bytes == sum(kept.values())


def test_offload_lowers_what_is_alive_between_forward_and_backward() -> None:
    alive = {}
    for kind in ("plain", "offload"):
        pool = HostPool(10_000)
        program = emitted(mlp(kind), copies=CpuCopies(CPU, pool))
        values = mlp_values()
        with StorageTracker(values.values(), excluded=pool.owns) as memory:
            forward = program.forward([values[name] for name in program.inputs])
            alive[kind] = memory.current_bytes
        del forward
        assert pool.used_bytes == 0
    relu = mlp("plain").types["act/relu"].num_bytes
    assert alive["plain"] - alive["offload"] == relu


def test_offload_and_reload_change_no_bit() -> None:
    values = mlp_values()
    kept, moved = step(emitted(mlp("plain")), values), HostPool(10_000)
    found = step(emitted(mlp("offload"), copies=CpuCopies(CPU, moved)), values)
    assert found.keys() == kept.keys() and all(torch.equal(found[name], kept[name]) for name in kept)
    assert moved.peak_bytes == mlp("plain").types["act/relu"].num_bytes


def test_host_buffers_are_made_before_the_first_step_and_used_again() -> None:
    values, pool = mlp_values(), HostPool(10_000)
    program = emitted(mlp("offload"), copies=CpuCopies(CPU, pool))
    held = pool.held_bytes
    assert held == mlp("plain").types["act/relu"].num_bytes
    for _ in range(3):
        step(program, values)
    assert pool.held_bytes == held and pool.used_bytes == 0


def test_lists_are_emptied_and_saved_tensors_die_in_backward() -> None:
    program, values = emitted(mlp("plain")), mlp_values()
    inputs = [values[name] for name in program.inputs]
    _, saved = program.forward(inputs)
    relu = saved[program.saved.index("act/relu")]
    assert isinstance(relu, Tensor)
    watcher = weakref.ref(relu.untyped_storage())
    del relu
    assert inputs == [] and watcher() is not None
    program.backward(saved, values["tangent"])
    assert saved == [] and watcher() is None


def test_a_second_backward_is_refused_with_advice() -> None:
    program, values = emitted(mlp("plain")), mlp_values()
    _, saved = program.forward([values[name] for name in program.inputs])
    program.backward(saved, values["tangent"])
    with pytest.raises(InputError, match="expected 4 saved values.*found 0.*another forward"):
        program.backward(saved, values["tangent"])
    with pytest.raises(InputError, match="expected 4 inputs for forward of plain, found 1"):
        program.forward([values["data"]])


def test_parameters_that_require_gradients_record_nothing() -> None:
    values = {name: value.requires_grad_(name.endswith("weight")) for name, value in mlp_values().items()}
    assert not any(tensor.requires_grad for tensor in step(emitted(mlp("plain")), values).values())


def test_a_view_that_local_strides_forbid_becomes_a_copy_and_a_legal_one_stays_a_view() -> None:
    w = GraphWriter("views")
    w.given("x", InputKind.INPUT, 4, 6)
    w.call("aten.view.default", Ref("x"), (24,), to="flat", shape=(24,))
    w.call("aten._unsafe_view.default", Ref("x"), (8, 3), to="tall", shape=(8, 3))
    dense = torch.arange(24.0).view(4, 6)
    found = single(w, {"x": dense})
    assert found["flat"].data_ptr() == found["tall"].data_ptr() == dense.data_ptr()
    turned = dense.t().contiguous().t()
    assert torch.equal(single(w, {"x": turned})["flat"], dense.flatten())


def test_results_of_one_call_have_their_own_names_and_unread_ones_die_at_once() -> None:
    w = GraphWriter("many")
    w.given("x", InputKind.INPUT, 6, 256)
    norm = {"norm": (6, 256), "mean": (6, 1), "rstd": (6, 1)}
    w.calls("aten.native_layer_norm.default", Ref("x"), (256,), None, None, 1e-5, to=norm)
    w.calls("aten.split.Tensor", Ref("norm"), 3, to={"top": (3, 256), "bottom": (3, 256)})
    w.calls("aten.max.dim", Ref("bottom"), 1, to={"most": (3,), "where": (3,)})
    w.call("aten.cat.default", (Ref("top"), Ref("x")), 0, to="both", shape=(9, 256))
    x = torch.randn(6, 256)
    found = single(w, {"x": x}, both="both", where="where")
    normal = torch.nn.functional.layer_norm(x, (256,))
    assert torch.equal(found["both"], torch.cat([normal[:3], x]))
    assert torch.equal(found["where"], normal[3:].argmax(1))
    with StorageTracker([x]) as memory:
        returned, _ = emitted(w.graph(outputs={"both": "both", "where": "where"})).forward([x])
    assert memory.current_bytes == sum(t.untyped_storage().nbytes() for t in (x, *returned))


def test_constants_become_those_of_the_rank() -> None:
    w = GraphWriter("constants")
    w.given("x", InputKind.INPUT, 2)
    w.call("aten.full.default", (2,), float("-inf"), to="low", shape=(2,))
    w.call("aten.arange.default", 3, to="count", shape=(3,), dtype="i64")
    kwargs = (("dtype", Token("dtype.bf16")), ("device", Token("device.cuda")))
    w.nodes.append(Node("aten._to_copy.default", (Ref("x"),), kwargs, ("half",)))
    w.types["half"] = TensorType("bf16", (2,))
    found = single(w, {"x": torch.ones(2)})
    assert found["low"].tolist() == [float("-inf")] * 2 and found["count"].tolist() == [0, 1, 2]
    assert found["half"].dtype is torch.bfloat16 and found["half"].device == CPU


@pytest.mark.parametrize("rank", range(6))
def test_own_and_coordinate_are_those_of_the_rank(rank: int) -> None:
    mesh = Mesh(("dp", "tp"), (2, 3))
    w = GraphWriter("own")
    w.given("x", InputKind.INPUT, 12)
    w.call("mesh.own", Ref("x"), "tp", 0, 2, to="part", shape=(4,))
    w.call("mesh.coordinate", "dp", to="at", shape=(), dtype="i64")
    graph = w.graph(outputs={"part": "part", "at": "at"})
    (part, at), _ = emit(graph, mesh, rank, {}, CPU).forward([torch.arange(12.0)])
    oracle = run_lockstep(graph, mesh, [{"x": torch.arange(12.0)}] * 6)[rank]
    assert torch.equal(part, oracle["part"]) and torch.equal(at, oracle["at"]) and at.dtype is torch.int64


def test_names_that_python_cannot_have_or_that_collide_stay_apart() -> None:
    w = GraphWriter("names")
    for name in ("a.b", "a_b", "a/b", "class", "torch", "self", "0", "device", "a_b_1", "tensor~S(0).R"):
        w.given(name, InputKind.INPUT, 1)
    for name in list(w.types):
        w.call("aten.neg.default", Ref(name), to=f"neg({name})", shape=(1,))
    values = {name: torch.tensor([float(at)]) for at, name in enumerate(w.types) if not name.startswith("neg")}
    found = single(w, values)
    assert {name: float(value) for name, value in found.items()} == {f"neg({n})": -float(v) for n, v in values.items()}


def test_inputs_die_after_their_last_use_whatever_their_names() -> None:
    w = GraphWriter("dying")
    w.given("torch", InputKind.INPUT, 1000)
    w.call("aten.sum.default", Ref("torch"), to="sum", shape=())
    w.call("aten.neg.default", Ref("sum"), to="neg", shape=())
    program = emitted(w.graph(outputs={"neg": "neg"}))
    given = [torch.ones(1000)]
    with StorageTracker(given) as memory:
        _ = program.forward(given)
        assert memory.current_bytes == 4


def test_the_source_runs_with_torch_and_a_copy_of_the_kernels(tmp_path: Path) -> None:
    program, values = emitted(mlp("fsdp")), mlp_values()
    text = program.source(kernels="rank_kernels")
    (tmp_path / "rank.py").write_text(text)
    (tmp_path / "rank_kernels.py").write_text(Path(kernels.__file__).read_text())
    torch.save(values, tmp_path / "values.pt")
    script = (
        "import rank, sys, torch; v = torch.load('values.pt')\n"
        f"found = rank.forward(None, [v[n] for n in {program.inputs}])\n"
        f"found = rank.backward(None, [*found[{len(program.returned)}:], v['tangent']])\n"
        "assert not any(m.startswith('shardwright') for m in sys.modules)\n"
        "torch.save(found, 'found.pt')"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
    expected = step(program, values)
    for name, gradient in zip(program.parameters, torch.load(tmp_path / "found.pt"), strict=True):
        assert torch.equal(gradient, expected[name])
    assert "grad_down_weight_" in text and "up_mm" in text


def test_what_cannot_be_emitted_is_refused_with_what_is_missing() -> None:
    two = Mesh(("x",), (2,))
    with pytest.raises(GraphError, match="expected a process group for axis 'x' of mesh.all_reduce"):
        emit(mlp("dp", 2), two, 0, {}, CPU)
    with pytest.raises(GraphError, match="expected a copy engine for tier.offload of act/offload"):
        emitted(mlp("offload"))
    with pytest.raises(GraphError, match=r"expected an axis of \(y=1\).*found 'x'"):
        emit(mlp("dp"), Mesh(("y",), (1,)), 0, {}, CPU)


def test_a_value_that_is_read_before_it_is_made_is_named() -> None:
    graph = GraphWriter("early").graph(outputs={"y": "y"})
    with pytest.raises(GraphError, match="expected y to be made before the end reads it"):
        emitted(graph)
    w = GraphWriter("late")
    w.given("x", InputKind.INPUT, 1)
    w.phase = Phase.BACKWARD
    w.call("aten.neg.default", Ref("x"), to="y", shape=(1,))
    w.phase = Phase.FORWARD
    w.call("aten.neg.default", Ref("y"), to="z", shape=(1,))
    with pytest.raises(GraphError, match="expected y to be made before z reads it"):
        emitted(w.graph(outputs={"z": "z"}))


def test_an_unknown_operator_of_ours_is_refused() -> None:
    w = GraphWriter("odd")
    w.given("x", InputKind.INPUT, 1)
    w.call("mesh.teleport", Ref("x"), to="y", shape=(1,))
    with pytest.raises(GraphError, match="found mesh.teleport for y"):
        emitted(w.graph(outputs={"y": "y"}))
