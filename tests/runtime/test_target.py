"""Targets: every form loads, and every mistake is a TargetError that says what was expected and where."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.ir import TargetError
from shardwright.runtime.capture import capture
from shardwright.runtime.real_values import real_example
from shardwright.runtime.target import load_target

LLAMA = Path(__file__).parents[2] / "examples" / "configs" / "llama-8b.json"

SOURCE = """
import torch
from torch import nn

def pair():
    return nn.Linear(3, 3), (torch.zeros(2, 3),)

def triple():
    return nn.Linear(3, 3), (), {"input": torch.zeros(2, 3)}

def sized(batch, seq=4):
    return nn.Linear(seq, 3), (torch.zeros(batch, seq),)

def alone():
    return nn.Linear(3, 3)

def bare():
    return nn.Linear(3, 3), torch.zeros(2, 3)

def swapped():
    return (torch.zeros(2, 3),), nn.Linear(3, 3)

def raises():
    return nn.Linear(3, 3), (torch.zeros(2, 3) @ torch.zeros(2, 3),)

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    return str(path)


def test_a_file_and_function_give_module_args_and_kwargs(file: str) -> None:
    target = load_target(f"{file}:pair")
    assert isinstance(target.module, nn.Linear) and len(target.args) == 1 and target.kwargs == {}
    assert target.name == f"{file}:pair"
    assert list(load_target(f"{file}:triple").kwargs) == ["input"]


def test_batch_and_seq_are_handed_to_functions_that_take_them(file: str) -> None:
    assert load_target(f"{file}:sized", batch=8, seq=16).args[0].shape == (8, 16)  # type: ignore[attr-defined]
    with pytest.raises(TargetError, match="to take --batch, found a function of"):
        load_target(f"{file}:pair", batch=8)
    with pytest.raises(TargetError, match="needs no arguments, found .* which needs batch"):
        load_target(f"{file}:sized")


def test_a_package_and_function() -> None:
    target = load_target("tests.zoo.models:llama")
    assert type(target.module).__name__ == "LlamaForCausalLM" and set(target.kwargs) == {"input_ids", "labels"}


def test_dtype_converts_floating_parameters_and_inputs(file: str) -> None:
    target = load_target(f"{file}:pair", dtype=torch.bfloat16)
    assert {p.dtype for p in target.module.parameters()} == {torch.bfloat16}
    assert target.args[0].dtype == torch.bfloat16  # type: ignore[attr-defined]
    tokens = load_target("tests.zoo.models:decoder", dtype=torch.float64).args[0]
    assert tokens.dtype == torch.int64  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "expected file.py:function, package.module:function or hf:CONFIG.json, found 'nothing'"),
        ("missing.py:build", "expected a Python file, found nothing at missing.py"),
        ("no_such_package.models:build", "found no module 'no_such_package.models'"),
        ("FILE:absent", r"found no such name. There are: pair, triple, sized, alone"),
        ("FILE:number", "found a int"),
        ("FILE:alone", r"expected .* to return \(module, args\) or .* found \(Linear\)"),
        ("FILE:bare", r"found \(Linear, Tensor\). Write \(x,\) for a single input"),
        ("FILE:swapped", r"found \(tuple, Linear\)"),
        ("FILE:raises", r"found RuntimeError: .* at \S*train\.py:24"),
        ("hf:missing.json", "expected --batch and --seq"),
    ],
)
def test_mistakes_are_told(file: str, text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as caught:
        load_target(text.replace("FILE", file))
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1 +\n", r"SyntaxError: invalid syntax at \S*broken\.py:1"),
        ("\nraise ValueError('no data')\n", r"ValueError: no data at \S*broken\.py:2"),
        ("import not_installed_anywhere\n", r"ModuleNotFoundError: .* at \S*broken\.py:1"),
    ],
)
def test_a_file_that_does_not_import_is_told_with_its_line(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(TargetError, match=message):
        load_target(f"{tmp_path / 'broken.py'}:build")


def small(tmp_path: Path, **changes: object) -> str:
    """A configuration file; None removes a field."""
    fields = {**json.loads(LLAMA.read_text()), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "bos_token_id": 1, **changes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return f"hf:{path}"


def test_a_configuration_becomes_a_model_on_meta_that_can_be_captured(tmp_path: Path) -> None:
    target = load_target(small(tmp_path), batch=4, seq=16)
    assert {p.device.type for p in target.module.parameters()} == {"meta"}
    captured = capture(target.module, target.args, target.kwargs)
    assert captured.dtype == torch.bfloat16 and captured.graph.types["input_ids"].shape == (4, 16)
    rotary = captured.graph.types["model.rotary_emb.inv_freq"]
    assert rotary.dtype == "f32", "what the model keeps in float32 stays so"


def test_values_for_a_bfloat16_configuration_leave_float32_buffers_alone(tmp_path: Path) -> None:
    """Rotary frequencies stay float32, as in the capture that a plan is for."""
    target = load_target(small(tmp_path), batch=4, seq=16)
    module, _, _ = real_example(target, seed=0)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    kinds = {name: buffer.dtype for name, buffer in target.module.named_buffers()}
    assert torch.float32 in kinds.values()
    assert {name: buffer.dtype for name, buffer in module.named_buffers()} == kinds


def test_dtype_overrides_the_configuration(tmp_path: Path) -> None:
    target = load_target(small(tmp_path), batch=4, seq=16, dtype=torch.float32)
    assert {p.dtype for p in target.module.parameters()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("model_type", "architecture", "inputs"),
    [
        ("llama", None, ["input_ids", "labels"]),
        ("bert", "BertForMaskedLM", ["input_ids", "labels"]),
        ("t5", "T5ForConditionalGeneration", ["input_ids", "labels"]),
        ("vit", "ViTForImageClassification", ["pixel_values", "labels"]),
    ],
)
def test_the_architecture_decides_class_and_inputs(
    tmp_path: Path, model_type: str, architecture: str | None, inputs: list[str]
) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": model_type, "num_hidden_layers": 1, "num_layers": 1, "hidden_size": 32, "d_model": 32}
    fields |= {"num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0}
    path.write_text(json.dumps({**fields, "architectures": [architecture]} if architecture else fields))
    target = load_target(f"hf:{path}", batch=2, seq=8)
    assert type(target.module).__name__ == (architecture or "LlamaForCausalLM") and list(target.kwargs) == inputs


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "expected JSON"),
        ("{}", "with a model_type, found none"),
        ('{"model_type": "no-such-model"}', "that transformers knows, found 'no-such-model'"),
        ('{"model_type": "vit"}', "expected an architecture with a loss"),
    ],
)
def test_wrong_configurations_are_told(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(TargetError, match=re.escape(message)):
        load_target(f"hf:{path}", batch=2, seq=8)
    with pytest.raises(TargetError, match="expected a readable file"):
        load_target("hf:absent.json", batch=2, seq=8)
