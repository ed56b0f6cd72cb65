"""What ranks do in the tests of the decorator. Imports nothing of the tests: a rank reads this file alone."""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import shardwright
from shardwright.ir import Cluster, InfeasibleError, InputError, load_cluster
from shardwright.runtime.parameters import whole
from shardwright.runtime.ranks import world
from shardwright.runtime.step import local

BATCH, LENGTH, VOCABULARY, WIDTH = 4, 6, 32, 16


def machines() -> Cluster:
    """The ranks of this run, such that splitting pays even for a tiny model."""
    preset = load_cluster("h100x8")
    device = replace(preset.device, launch_seconds=0.0, flops_per_second={"f32": 1e6, "bf16": 1e6})
    return replace(preset, ranks_per_node=world().size, device=device)


class Net(nn.Module):
    """Embedding, two linears, a loss: a language model of one token."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(functional.gelu(self.up(self.table(tokens))))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


def decorated(budget: str = "1MiB") -> type[nn.Module]:
    """A fresh class each time: the decorator changes the class it is given."""
    fresh = type("Net", (Net,), {"__module__": __name__})
    return shardwright.parallelize(cluster=machines(), budget=budget)(fresh)


def train(num_steps: int = 3) -> dict[str, float]:
    """Largest differences from a plain model that is trained beside it; everything is made before the first forward."""
    torch.manual_seed(0)
    model = decorated()()
    plain = Net()
    plain.load_state_dict(model.state_dict())
    runs = [_Run(model), _Run(plain)]
    losses: list[list[float]] = [[], []]
    norms: list[list[float]] = [[], []]
    for step in range(num_steps):
        for number, run in enumerate(runs):
            loss, norm = run.step(batch(step))
            losses[number].append(loss)
            norms[number].append(norm)
    found, expected = (dict(run.model.named_parameters()) for run in runs)
    averaged, plain_average = (dict(run.average.module.named_parameters()) for run in runs)
    return {
        "loss": _largest(losses),
        "norm": _largest(norms),
        "parameters": max((whole(found[n]) - expected[n]).abs().max().item() for n in expected),
        "average": max((whole(averaged[n]) - plain_average[n]).abs().max().item() for n in expected),
        "rate": abs(float(runs[0].scheduler.get_last_lr()[0]) - float(runs[1].scheduler.get_last_lr()[0])),
        "split": float(sum(p.numel() for p in found.values()) - sum(_held(p) for p in found.values())),
    }


class _Run:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.average = AveragedModel(model)

    def step(self, given: dict[str, Tensor]) -> tuple[float, float]:
        self.optimizer.zero_grad()
        loss = self.model(**given)["loss"]
        loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return loss.item(), norm.item()


def _largest(pairs: list[list[float]]) -> float:
    return float(max(abs(a - b) for a, b in zip(*pairs, strict=True)))


def _held(parameter: Tensor) -> int:
    return int(local(parameter).numel())


def before_and_after() -> dict[str, bool]:
    """The life of an instance: plain before its first training forward, and under eval and no_grad."""
    cls = decorated()
    model = cls()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        before = model(**batch(0))["logits"]
    is_plain = all(type(p) is nn.Parameter for p in model.parameters())
    model(**batch(0))["loss"].backward()
    model.zero_grad()
    model.eval()
    with torch.inference_mode():
        after = model(**batch(0))["logits"]
    return {
        "plain before": is_plain,
        "same class": isinstance(model, cls) and isinstance(model, Net) and type(model).__name__ == "Net",
        "same names": [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == keys,
        "copy stays plain": all(type(p) is nn.Parameter for p in copied.parameters()),
        "eval gives the model's own outputs": torch.allclose(before, after, atol=1e-6),
    }


def other_shape() -> str:
    model = decorated()()
    model(**batch(0))["loss"].backward()
    try:
        model(**{name: tensor[:2] for name, tensor in batch(0).items()})
    except InputError as error:
        return str(error)
    return "no error"


def different_batches() -> str:
    model = decorated()()
    try:
        model(**batch(0))["loss"].backward()  # planned on equal shapes
        model2 = decorated()()
        model2(**batch(1 + world().rank))
    except InputError as error:
        return str(error)
    return "no error"


def infeasible() -> str:
    """Rank 0 plans and fails; every rank raises."""
    model = decorated(budget="1KiB")()
    try:
        model(**batch(0))
    except InfeasibleError as error:
        return str(error)
    return "no error"
