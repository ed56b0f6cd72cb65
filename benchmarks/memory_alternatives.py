"""What joint planning is compared with: the same program, search and replay, with a part decided beforehand.

Needs a problem and the search that plans it jointly: alternatives use its formulations, so all see the same choices,
prices and memory rows. Gives a candidate per alternative, or the reason why there is none under the budget.

(a) `sequence`: layouts first, then fates (`best_sharding`, `best_fates`)
(b) `torch`: the layouts of (a), the fates of torch's partitioner
(c) `fsdp+selective`, `fsdp+recompute`: the planner's baselines
(d) `greedy offload`: the layouts of (a), the largest storages moved to the host until it fits
(e) `offload all`: the planner's baseline, with and without optimizer state on the host
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from fx_joint import JointProgram, joint_program
from torch_fates import fates_of, partition

from shardwright.ir import Budget, Decisions, Fate, InfeasibleError, InputKind, Mesh, Schedule, Tier
from shardwright.planner.candidates import Candidate, best, evaluate, judge, polish, refitted
from shardwright.planner.decode import decode
from shardwright.planner.formulation import Formulation
from shardwright.planner.linear import Bounds
from shardwright.planner.module_classes import local_bytes, saved_storages
from shardwright.planner.search import Request, Search
from shardwright.planner.sequence import layouts_alone, with_layouts

__all__ = ["ALPHAS", "Outcome", "Rivals", "Sharding"]

ALPHAS: Final = (1.0, 0.5, 0.3, 0.15)
"""Shares of the budget that parameters, gradients and optimizer state may take when layouts are chosen alone."""
TORCH_BUDGETS: Final = tuple(n / 10 for n in range(10, -1, -1))
SHARDING_SECONDS: Final = 30.0
"""Per mesh, to choose layouts alone."""
HOLDS_LEAST: Final = Schedule(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Outcome:
    """What an alternative comes to under a budget."""

    name: str
    candidate: Candidate | None
    """None where nothing fits."""
    note: str = ""


@dataclass(frozen=True)
class Sharding:
    """Layouts chosen before fates: the fastest with everything kept, whatever activations need."""

    formulation: Formulation
    fixed: Bounds
    """Bounds that leave these layouts only."""
    decisions: Decisions
    """With everything kept."""


@dataclass
class Rivals:
    """All alternatives to a joint search."""

    joint: Search
    _shardings: dict[tuple[Mesh, tuple[float, ...]], Sharding] = field(default_factory=dict)
    """By chosen layouts: budgets and alphas often choose the same."""
    _searches: dict[int, Search] = field(default_factory=dict)
    _programs: dict[int, JointProgram] = field(default_factory=dict)
    _torch: dict[tuple[int, float], dict[str, Fate]] = field(default_factory=dict)
    _least: dict[tuple[int, float, bool], Candidate] = field(default_factory=dict)
    """Torch's fates under the schedule that holds least, with parameters gathered once or twice."""

    @property
    def request(self) -> Request:
        return self.joint.request

    def under(self, device_bytes: int) -> Iterator[Outcome]:
        """Each alternative's best; the joint search must have been `under` a budget before."""
        budget = Budget(device_bytes, self.request.budget.host_bytes)
        chosen = {alpha: self.best_sharding(device_bytes, alpha) for alpha in ALPHAS}
        yield self._sequence("sequence", [chosen[1.0]], budget)
        yield self._sequence("sequence, best alpha", list(chosen.values()), budget)
        yield self._torch_fates(chosen[1.0], budget)
        for name in ("fsdp+selective", "fsdp+recompute"):
            yield self._baseline(name, budget)
        yield self._greedy(chosen[1.0], budget)
        yield self._offload_all(budget)

    def best_sharding(self, device_bytes: int, alpha: float) -> Sharding | None:
        """The layouts of the fastest program over all meshes with everything kept, of which parameters, gradients and
        optimizer state take at most `alpha` of the budget; None where no layouts do."""
        found = []
        for formulation in self.joint.formulations.values():
            solution = layouts_alone(
                formulation,
                alpha * device_bytes,
                time_limit_seconds=SHARDING_SECONDS,
                relative_gap=self.request.gap,
            )
            if solution.values:
                found.append((solution.objective, formulation, solution.values))
        if not found:
            return None
        _, formulation, values = min(found, key=lambda item: item[0])
        return self._remembered(formulation, values)

    def _remembered(self, formulation: Formulation, values: Sequence[float]) -> Sharding:
        fixed = with_layouts(formulation, values)
        key = (formulation.space.mesh, tuple(share for share, _ in fixed.values()))
        if key not in self._shardings:
            self._shardings[key] = Sharding(formulation, fixed, decode(formulation, values))
        return self._shardings[key]

    def _sequence(self, name: str, shardings: Sequence[Sharding | None], budget: Budget) -> Outcome:
        distinct = {id(sharding): sharding for sharding in shardings if sharding is not None}
        if not distinct:
            return Outcome(name, None, "parameters, gradients and state alone are over budget")
        found = [c for sharding in distinct.values() if (c := self._best_fates(sharding, budget)) is not None]
        if not found:
            return Outcome(name, None, "its layouts fit with no fates")
        return Outcome(name, best(found))

    def _best_fates(self, sharding: Sharding, budget: Budget) -> Candidate | None:
        """The whole search on a program whose layouts are fixed; recompute, offload and tiers are free."""
        mesh = sharding.decisions.mesh
        if id(sharding) not in self._searches:
            fixed = replace(sharding.formulation, model=sharding.formulation.model.with_bounds(sharding.fixed))
            kept = self._evaluated("everything kept", sharding.decisions, budget)
            # What was found already stands for the baselines, which have layouts of their own.
            self._searches[id(sharding)] = Search(replace(self.request, meshes=(mesh,)), {mesh: fixed}, [kept])
        try:
            return self._searches[id(sharding)].under(budget.device_bytes).chosen
        except InfeasibleError:
            return None

    def _torch_fates(self, sharding: Sharding | None, budget: Budget) -> Outcome:
        """The largest of torch's budgets that fits; gathered parameters are kept only beside its fastest."""
        if sharding is None:
            return Outcome("torch", None, "parameters, gradients and state alone are over budget")
        for torch_budget, once in ((1.0, True), *((b, False) for b in TORCH_BUDGETS)):
            key = (id(sharding), torch_budget, once)
            if key not in self._least:
                fates = self._fates_under(sharding, torch_budget)
                gathers = sharding.decisions.gathers if once else {}
                self._least[key] = self._holding_least(
                    replace(sharding.decisions, fates=fates, gathers=gathers), budget
                )
            least = refitted(self._least[key], budget)
            if least.fits:
                return Outcome("torch", self._evaluated("torch", least.decisions, budget), f"budget {torch_budget:.1f}")
        return Outcome("torch", None, "no activation_memory_budget fits")

    def _fates_under(self, sharding: Sharding, torch_budget: float) -> dict[str, Fate]:
        key, graph = id(sharding), self.request.graph
        if key not in self._programs:
            self._programs[key] = joint_program(graph, sharding.decisions)
        if (key, torch_budget) not in self._torch:
            found = partition(self._programs[key], graph, torch_budget)
            self._torch[key, torch_budget] = dict(fates_of(found, graph))
        return self._torch[key, torch_budget]

    def _baseline(self, name: str, budget: Budget) -> Outcome:
        decisions = self._baseline_decisions(name)
        if decisions is None:
            return Outcome(name, None, dict(self.joint.unavailable).get(name, "not tried"))
        found = self._evaluated(name, decisions, budget)
        return Outcome(name, found) if found.fits else Outcome(name, None, "over budget")

    def _baseline_decisions(self, name: str) -> Decisions | None:
        return next((c.decisions for c in self.joint.pool if c.name == name), None)

    def _greedy(self, sharding: Sharding | None, budget: Budget) -> Outcome:
        """Activations first, the largest first, then optimizer states; as few as make it fit."""
        name = "greedy offload"
        if not budget.host_bytes:
            return Outcome(name, None, "no host memory")
        if sharding is None:
            return Outcome(name, None, "parameters, gradients and state alone are over budget")
        plain = replace(sharding.decisions, gathers={})
        activations, states = self._movable(plain), self._states(plain)

        def moved(number: int) -> Decisions:
            fates = dict.fromkeys(activations[:number], Fate.OFFLOAD)
            return replace(
                plain, fates=fates, tiers=dict.fromkeys(states[: max(0, number - len(activations))], Tier.HOST)
            )

        enough, too_few = len(activations) + len(states), -1
        if not self._holding_least(moved(enough), budget).fits:
            return Outcome(name, None, "over budget with everything moved")
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            if self._holding_least(moved(middle), budget).fits:
                enough = middle
            else:
                too_few = middle
        return Outcome(name, self._evaluated(name, moved(enough), budget), f"{enough} moved")

    def _movable(self, decisions: Decisions) -> list[str]:
        """Saved storages that are worth a copy, the largest first."""
        graph, smallest = self.request.graph, self.request.machine.cluster.host.smallest_offload_bytes
        returned = set(graph.returned)
        sizes = {
            name: local_bytes(graph, decisions, name)
            for name in saved_storages(graph)
            if name in graph.producers and name not in returned
        }
        return sorted((n for n, size in sizes.items() if size >= smallest), key=lambda n: -sizes[n])

    def _states(self, decisions: Decisions) -> list[str]:
        graph = self.request.graph
        trained = [name for name in graph.inputs_of(InputKind.PARAM) if name in graph.gradients]
        return sorted(trained, key=lambda n: -local_bytes(graph, decisions, n))

    def _offload_all(self, budget: Budget) -> Outcome:
        name = "offload all"
        if not budget.host_bytes:
            return Outcome(name, None, "no host memory")
        decisions = self._baseline_decisions("offload-all")
        if decisions is None:
            return Outcome(name, None, dict(self.joint.unavailable).get("offload-all", "not tried"))
        on_host = replace(decisions, tiers=dict.fromkeys(self._states(decisions), Tier.HOST))
        found = best([self._evaluated(name, which, budget) for which in (decisions, on_host)])
        return Outcome(name, found) if found.fits else Outcome(name, None, "over budget")

    def _evaluated(self, name: str, decisions: Decisions, budget: Budget) -> Candidate:
        """Under the best of all schedules, as the joint plan."""
        graph, machine = self.request.graph, self.request.machine
        return polish(evaluate(name, graph, decisions, machine, budget), graph, machine, budget)

    def _holding_least(self, decisions: Decisions, budget: Budget) -> Candidate:
        tight = replace(decisions, schedule=HOLDS_LEAST)
        return judge("", self.request.graph, tight, self.request.machine, budget)
