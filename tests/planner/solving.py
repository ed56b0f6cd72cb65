"""Formulate and solve in one line each; captured models of the zoo and rules that remember their answers."""

import math
from collections.abc import Mapping
from functools import cache

import torch
from tests.planner.small_graphs import TableRules
from tests.zoo.models import ZOO

from shardwright.ir import Graph, Mesh
from shardwright.passes.strategies import Rules
from shardwright.planner.fates import FateOptions
from shardwright.planner.fold import Fold, fold_of
from shardwright.planner.formulate import formulate
from shardwright.planner.formulation import Formulation, Machine
from shardwright.planner.linear import Solution, solve
from shardwright.planner.space import build_space
from shardwright.runtime.capture import capture
from shardwright.runtime.rules import DTensorRules

__all__ = ["UNFOLDED", "captured", "formulated", "known_rules", "peak_bytes", "smallest_bytes", "solved"]

UNFOLDED = Fold({}, {}, {})


@cache
def known_rules() -> DTensorRules:
    return DTensorRules()


@cache
def captured(name: str, dtype: torch.dtype | None = None) -> Graph:
    """In the dtype that the model comes in unless told otherwise."""
    module, args, kwargs = ZOO[name]()
    return capture(module.to(dtype) if dtype else module, args, kwargs).keeping(()).graph


def formulated(
    graph: Graph,
    mesh: Mesh,
    machine: Machine,
    options: FateOptions | None = None,
    *,
    rules: Rules | None = None,
    fold: Fold | None = None,
) -> Formulation:
    """With the table of `small_graphs` unless told otherwise, and folded."""
    space = build_space(graph, mesh, fold or fold_of(graph), rules or TableRules(), machine.prices)
    return formulate(space, machine, options or FateOptions())


def solved(
    formulation: Formulation,
    budget_bytes: float = math.inf,
    bounds: Mapping[int, tuple[float, float]] | None = None,
    gap: float = 1e-9,
) -> Solution:
    limit = {formulation.peak: (0.0, budget_bytes / formulation.unit_bytes)}
    program = formulation.model.with_bounds({**(bounds or {}), **limit})
    return solve(program, time_limit_seconds=60.0, relative_gap=gap)


def peak_bytes(formulation: Formulation, solution: Solution) -> float:
    return solution.values[formulation.peak] * formulation.unit_bytes


def smallest_bytes(formulation: Formulation) -> float:
    """The peak of the plan that needs least."""
    program = formulation.model.with_cost({formulation.peak: 1e3})
    return peak_bytes(formulation, solve(program, time_limit_seconds=60.0, relative_gap=1e-3))
