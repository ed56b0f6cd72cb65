"""The zoo captured and planned once a session, for all tests of this folder: planning is what takes time."""

from dataclasses import dataclass, field

import torch
from tests.zoo.machines import compute_bound
from tests.zoo.models import MORE, ZOO, Example
from tests.zoo.solved import MESHES, Planned, loose_and_tight
from tests.zoo.whole import Subject, subject
from torch import Tensor

from shardwright.ir import Clip, Plan
from shardwright.passes.strategies import Rules
from shardwright.runtime.rules import DTensorRules

__all__ = ["BUDGETS", "EXACT", "LONG", "PlannedZoo"]

EXACT = "perceptron", "resnet", "decoder"
"""Models that compute in float64 throughout when they are given that."""
BUDGETS = "loose", "tight"
LONG = [("t5", 1), ("t5", 2), ("gemma2", 2)]
"""Models and ranks that take the better part of a minute to plan: left to `pytest -m study`."""


@dataclass
class PlannedZoo:
    """Answers by name of the model; `name.f64` is the model in float64."""

    rules: Rules = field(default_factory=DTensorRules)
    _subjects: dict[str, Subject] = field(default_factory=dict)
    _plans: dict[tuple[str, int, int, Clip], Planned] = field(default_factory=dict)

    def subject(self, name: str) -> Subject:
        if name not in self._subjects:
            base, _, exact = name.partition(".")
            example = {**ZOO, **MORE}[base]()
            self._subjects[name] = subject(_doubled(example), rtol=1e-12) if exact else subject(example)
        return self._subjects[name]

    def plan(self, name: str, num_ranks: int, budget: str, host_bytes: int = 0, clip: Clip = Clip.UNKNOWN) -> Plan:
        """On one rank, on two, on 2x2; `budget` is loose or tight."""
        key = name, num_ranks, host_bytes, clip
        if key not in self._plans:
            target = f"tests.zoo.models:{name.partition('.')[0]}"
            captured, cluster = self.subject(name).captured, compute_bound(num_ranks)
            self._plans[key] = loose_and_tight(
                captured, MESHES[num_ranks], self.rules, target, cluster, host_bytes=host_bytes, clip=clip
            )
        found = self._plans[key]
        return found.loose if budget == "loose" else found.tight


def _doubled(example: Example) -> Example:
    module, args, kwargs = example
    return (
        module.double(),
        tuple(map(_double, args)),
        {key: _double(value) for key, value in kwargs.items()},
    )


def _double(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and torch.is_floating_point(value) else value
