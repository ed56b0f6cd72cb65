"""A plan of a Llama-like graph with 32 layers, made by hand: small enough to read, folded like a real one."""

from dataclasses import dataclass, field

import pytest

from shardwright.ir import (
    Decisions,
    Fate,
    Graph,
    Input,
    InputKind,
    Layout,
    Mesh,
    Node,
    Phase,
    Ref,
    TensorType,
    Tier,
    graph_hash,
    parse_layout,
)
from shardwright.ir.plan import Baseline, Budget, Certificate, Identity, InputSpec, Plan, Prediction

HIDDEN, WIDE, TOKENS, VOCABULARY = 4096, 14336, 8192, 128256
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
MESH = Mesh(("dp", "tp"), (8, 8))


@dataclass
class _Builder:
    """Writes a chain of linear layers forward, then its gradients backward."""

    inputs: list[Input] = field(default_factory=list)
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)

    def given(self, name: str, kind: InputKind, shape: tuple[int, ...], dtype: str = "bf16") -> str:
        self.inputs.append(Input(name, kind))
        self.types[name] = TensorType(dtype, shape)
        return name

    def call(self, op: str, result: str, shape: tuple[int, ...], *operands: str, phase: Phase = Phase.FORWARD) -> str:
        module = result.removeprefix("grad(").rpartition("/")[0]
        node = Node(op, tuple(map(Ref, operands)), (), (result,), phase=phase, module=module)
        (self.forward if phase is Phase.FORWARD else self.backward).append(node)
        self.types[result] = TensorType("bf16", shape)
        return result

    def linear(self, module: str, out_in: tuple[int, int], operand: str) -> str:
        weight = self.given(f"{module}.weight", InputKind.PARAM, out_in)
        transposed = self.call("aten.t.default", f"{module}/t", out_in[::-1], weight)
        result = self.call("aten.mm.default", f"{module}/mm", (TOKENS, out_in[0]), operand, transposed)
        gradient = f"grad({module}/weight)"
        self.call("aten.mm.default", gradient, out_in, operand, result, phase=Phase.BACKWARD)
        self.gradients[weight] = gradient
        return result

    def layer(self, number: int, operand: str) -> str:
        path = f"model.layers.{number}"
        norm = self.given(f"{path}.input_layernorm.weight", InputKind.PARAM, (HIDDEN,))
        value = self.call("aten.mul.Tensor", f"{path}.input_layernorm/mul", (TOKENS, HIDDEN), operand, norm)
        query = self.linear(f"{path}.self_attn.q_proj", LINEARS["self_attn.q_proj"], value)
        attended = self.call("aten.softmax.int", f"{path}.self_attn/softmax", (TOKENS, HIDDEN), query)
        value = self.linear(f"{path}.self_attn.o_proj", LINEARS["self_attn.o_proj"], attended)
        gate = self.linear(f"{path}.mlp.gate_proj", LINEARS["mlp.gate_proj"], value)
        gate = self.call("aten.silu.default", f"{path}.mlp.act_fn/silu", (TOKENS, WIDE), gate)
        up = self.linear(f"{path}.mlp.up_proj", LINEARS["mlp.up_proj"], value)
        product = self.call("aten.mul.Tensor", f"{path}.mlp/mul", (TOKENS, WIDE), gate, up)
        value = self.linear(f"{path}.mlp.down_proj", LINEARS["mlp.down_proj"], product)
        return self.call("aten.add.Tensor", f"{path}/add", (TOKENS, HIDDEN), operand, value)

    def graph(self, num_layers: int) -> Graph:
        ids = self.given("input_ids", InputKind.INPUT, (TOKENS,), "i64")
        table = self.given("model.embed_tokens.weight", InputKind.PARAM, (VOCABULARY, HIDDEN))
        value = self.call("aten.embedding.default", "model.embed_tokens/embedding", (TOKENS, HIDDEN), table, ids)
        for number in range(num_layers):
            value = self.layer(number, value)
        logits = self.linear("lm_head", (VOCABULARY, HIDDEN), value)
        loss = self.call("aten.sum.default", "loss", (), logits)
        nodes = (*self.forward, *reversed(self.backward))
        return Graph("Llama", tuple(self.inputs), nodes, self.types, loss=loss, gradients=self.gradients)


def _layouts(graph: Graph) -> dict[str, Layout]:
    layouts = {}
    for name, tensor in graph.types.items():
        if len(tensor.shape) == 1:
            text = "R, R" if name.endswith("weight") else "S(0), R"
        elif name.endswith(("down_proj.weight", "o_proj.weight")):
            text = "S(0), S(1)"
        elif name.endswith("weight"):
            text = "S(1), S(0)"
        elif name.endswith(("down_proj/mm", "o_proj/mm")):
            text = "S(0), P(sum)"
        else:
            text = "S(0), S(1)" if len(tensor.shape) == 2 else "P(sum), P(sum)"
        layouts[name] = parse_layout(text)
    return layouts


def _fates(num_layers: int) -> dict[str, Fate]:
    fates = {}
    for number in range(num_layers):
        fates[f"model.layers.{number}.mlp.act_fn/silu"] = Fate.RECOMPUTE
        fates[f"model.layers.{number}.mlp/mul"] = Fate.RECOMPUTE
        if number < 20:
            fates[f"model.layers.{number}.self_attn/softmax"] = Fate.RECOMPUTE
            fates[f"model.layers.{number}.mlp.up_proj/mm"] = Fate.RECOMPUTE
        if 20 <= number < 26:
            fates[f"model.layers.{number}.input_layernorm/mul"] = Fate.OFFLOAD
    return fates


@pytest.fixture(scope="session")
def llama_graph() -> Graph:
    return _Builder().graph(32)


@pytest.fixture(scope="session")
def llama_plan(llama_graph: Graph) -> Plan:
    decisions = Decisions(
        mesh=MESH,
        layouts=_layouts(llama_graph),
        reads={},
        fates=_fates(32),
        tiers={"model.embed_tokens.weight": Tier.HOST},
    )
    inputs = (InputSpec("input_ids", TensorType("i64", (TOKENS,))),)
    return Plan(
        target="hf:examples/configs/llama-8b.json",
        identity=Identity(graph_hash(llama_graph), "train", ".loss", "adamw", "bfloat16", 0, 1, inputs),
        cluster="h100x64",
        budget=Budget(70 * 2**30, 4 * 2**30),
        decisions=decisions,
        prediction=Prediction(0.412, 0.06, 65 * 2**30, 2**30),
        certificate=Certificate(0.401, 0.399, "1,204 choices over 3 meshes", "highs"),
        baselines=(
            Baseline("ddp", 0.455, 91 * 2**30, "over budget"),
            Baseline("fsdp+recompute", 0.4985, 40 * 2**30),
            Baseline("tp+sp", None, None, "8 key-value heads do not divide by 64"),
        ),
    )
