"""The folder written for a GPU runs with torch alone, computes what plain PyTorch does, and holds what is planned."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gpu_folder_writer import Planned, write_folder
from tests.zoo.drawn import drawn_decisions
from tests.zoo.machines import compute_bound
from tests.zoo.models import ZOO, Example
from torch import Tensor

from shardwright.ir import Budget, Fate, InputKind, Mesh, PlanError, Tier
from shardwright.ir import verify as ir_verify
from shardwright.planner.candidates import judge
from shardwright.planner.problem import Problem, pose
from shardwright.runtime import copies, kernels
from shardwright.runtime import verify as runtime_verify
from shardwright.runtime.standalone import standalone

HOST_BYTES = 1 << 30
FORBIDDEN = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('shardwright', 'transformers', 'ortools'):
            raise ImportError(f'{name} must not be needed here')

sys.meta_path.insert(0, Forbidden())
sys.argv[0] = 'run.py'
sys.path.insert(0, '.')
exec(compile(open('run.py').read(), 'run.py', 'exec'), {'__name__': '__main__', '__file__': 'run.py'})
"""


def planned(problem: Problem) -> list[Planned]:
    """Everything kept; fates drawn at random; optimizer state on the host, too."""
    request = problem.request
    drawn = drawn_decisions(request.graph, Mesh((), ()), request.rules, seed=1, offload=True)
    kept = replace(drawn, fates={}, gathers={})
    parameters = [p for p in request.graph.inputs_of(InputKind.PARAM) if p in request.graph.gradients]
    on_host = replace(drawn, tiers=dict.fromkeys(parameters[::2], Tier.HOST))
    found = []
    for name, decisions in {"kept": kept, "drawn": drawn, "on_host": on_host}.items():
        judged = judge(name, request.graph, decisions, request.machine, Budget(1 << 40, HOST_BYTES))
        found.append(Planned(name, judged.decisions, judged.replay))
    assert {Fate.RECOMPUTE, Fate.OFFLOAD} == set(drawn.fates.values())
    return found


def plain(problem: Problem, example: Example) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the model is given, and loss and gradients, by name."""
    module, args, kwargs = example
    state = {**dict(module.named_parameters()), **dict(module.named_buffers()), **problem.captured.bind(args, kwargs)}
    given = {name: tensor.detach().clone() for name, tensor in state.items()}
    output = module(*args, **kwargs)
    loss = output["loss"] if isinstance(output, dict) else output[0]
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return given, {**gradients, "loss": loss.detach()}


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_the_folder_runs_alone_and_gives_the_models_loss_and_gradients(name: str, tmp_path: Path) -> None:
    module, args, kwargs = ZOO[name]()
    problem = pose(
        module, args, kwargs, cluster=compute_bound(1), budget=1 << 40, host=HOST_BYTES, optimizer="adamw-fused"
    )
    given, expected = plain(problem, (module, args, kwargs))
    write_folder(tmp_path, name, problem, planned(problem), torch.device("cpu"), HOST_BYTES)
    torch.save(given, tmp_path / "values.pt")
    options = ["--steps", "1", "--rounds", "1", "--values", "values.pt", "--gradients", "gradients.pt"]
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    printed, found = json.loads(done.stdout), torch.load(tmp_path / "gradients.pt")
    scale = max(float(gradient.abs().max()) for key, gradient in expected.items() if key != "loss")
    for program, values in found.items():
        assert values.keys() == expected.keys()
        for key, value in values.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5 * scale, msg=f"{program} {key}")
            assert torch.equal(value, found["kept"][key]), f"{program} {key}"
    for program, measured in printed["programs"].items():
        assert measured["max_memory_allocated"] == "not measured"
        # Predicted in blocks of 64 bytes, tracked to the byte.
        assert measured["tracked_bytes"] <= measured["predicted_peak_bytes"] <= 1.1 * measured["tracked_bytes"], program
        assert measured["loss"] == printed["programs"]["kept"]["loss"] and measured["step_seconds"] > 0
    assert printed["programs"]["drawn"]["host_pool_bytes"] > 0 and set(printed["step_over_kept"]) == {
        "drawn",
        "on_host",
    }


def test_a_folder_for_cuda_says_what_it_needs_where_there_is_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    module, args, kwargs = ZOO["perceptron"]()
    problem = pose(module, args, kwargs, cluster=compute_bound(1), budget=1 << 40, host=HOST_BYTES)
    write_folder(tmp_path, "perceptron", problem, planned(problem), torch.device("cuda"), HOST_BYTES)
    done = subprocess.run([sys.executable, "run.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "expected a CUDA device" in done.stderr


def test_files_that_go_along_import_each_other_and_nothing_of_ours() -> None:
    found = standalone([kernels, copies])
    assert {"kernels.py", "copies.py", "host_pool.py", "errors.py"} <= found.keys()
    assert not any("import shardwright" in text or "from shardwright" in text for text in found.values())
    assert "from errors import PlanError" in found["host_pool.py"]
    for name, text in found.items():
        compile(text, name, "exec")


def test_two_modules_of_one_name_are_refused() -> None:
    with pytest.raises(PlanError, match="expected modules of different names"):
        standalone([ir_verify, runtime_verify])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_cuda_takes_and_gives_the_shapes_of_the_cpus_operator(dtype: torch.dtype, masked: bool) -> None:
    """By torch's own shape functions of the CUDA operators: no device is needed for these."""
    attention = importlib.import_module("gpu_folder.attention")
    query, key, value = (torch.empty(2, 4, 64, 32, dtype=dtype, device="meta") for _ in range(3))
    mask = torch.empty(1, 1, 64, 64, dtype=dtype, device="meta") if masked else None
    out, logs = attention._forward(query, key, value, 0.0, not masked, attn_mask=mask, scale=0.5)
    assert (out.shape, out.dtype, logs.shape, logs.dtype) == (query.shape, dtype, (2, 4, 64), torch.float32)
    found = attention._backward(out, query, key, value, out, logs, 0.0, not masked, attn_mask=mask, scale=0.5)
    assert [(g.shape, g.dtype) for g in found] == [(x.shape, dtype) for x in (query, key, value)]
    with pytest.raises(ValueError, match="without dropout"):
        attention._forward(query, key, value, 0.1)
