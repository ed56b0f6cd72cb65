"""A captured model with attention, norms, buffers and a loss, rewritten and emitted for one device, is that model."""

import torch
from tests.rank_graphs import expected_peak_bytes
from tests.tracker import StorageTracker
from torch import Tensor, nn

from shardwright.ir import Decisions, Fate, Graph, Mesh, Phase, Replicate
from shardwright.passes.lower import lower
from shardwright.runtime.capture import capture
from shardwright.runtime.copies import CpuCopies
from shardwright.runtime.emit import emit
from shardwright.runtime.host_pool import HostPool

ALONE = Mesh(("x",), (1,))
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.layer(self.table(ids))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decisions_of(graph: Graph, fates: dict[str, Fate]) -> Decisions:
    whole = (Replicate(),)
    reads = {node.name: (whole,) * len(node.operands) for node in graph.nodes}
    return Decisions(ALONE, dict.fromkeys(graph.types, whole), reads, fates)


def test_a_captured_model_computes_and_holds_what_its_graph_says_when_kept_recomputed_or_offloaded() -> None:
    torch.manual_seed(0)
    net = Net()
    batch = {"ids": torch.randint(0, 50, (4, 8)), "labels": torch.randint(0, 50, (4, 8))}
    captured = capture(net, (), batch)
    values = {k: v.detach().clone() for k, v in {**net.state_dict(), **batch, **captured.tensors}.items()}
    loss = net(**batch)
    loss.backward()
    relu = next(n.name for n in captured.graph.nodes if n.op == "aten.relu.default" and n.phase is Phase.FORWARD)
    found = {}
    for fate in Fate:
        graph, pool = lower(captured.graph, decisions_of(captured.graph, {relu: fate})), HostPool(1 << 20)
        program = emit(graph, ALONE, 0, {}, CPU, copies=CpuCopies(CPU, pool))
        tangent = torch.ones(())
        with StorageTracker([*(values[name] for name in program.inputs), tangent], excluded=pool.owns) as memory:
            returned, saved = program.forward([values[name] for name in program.inputs])
            gradients = program.backward(saved, tangent)
        assert memory.peak_bytes == expected_peak_bytes(graph)
        assert pool.peak_bytes == (4 * 8 * 32 * 4 if fate is Fate.OFFLOAD else 0)
        assert torch.allclose(returned[0], loss.detach(), rtol=1e-6)
        for name, gradient in zip(program.parameters, gradients, strict=True):
            assert torch.allclose(gradient, net.get_parameter(name).grad, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
        found[fate] = [returned[0], *gradients]
    for fate in (Fate.RECOMPUTE, Fate.OFFLOAD):
        assert all(torch.equal(a, b) for a, b in zip(found[fate], found[Fate.KEEP], strict=True))
