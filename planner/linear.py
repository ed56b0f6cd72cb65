"""A mixed-integer linear program as plain lists, and its solution by HiGHS or SCIP through OR-Tools MathOpt.

Units: seconds in milliseconds, bytes in a unit of the model's size, so that coefficients stay between 1e-4 and 1e5.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from shardwright.ir import ShardwrightError

__all__ = ["Bounds", "Engine", "LinearModel", "Solution", "Status", "solve"]

Terms = Mapping[int, float]
Bounds = dict[int, tuple[float, float]]
"""Variable to least and largest value."""


class Engine(StrEnum):
    HIGHS = "highs"
    SCIP = "scip"
    """Takes a hint; HiGHS does not."""


class Status(StrEnum):
    OPTIMAL = "optimal"
    """Proven within the gap asked for."""
    FEASIBLE = "feasible"
    """Cut short by the clock."""
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    """The clock ran out before anything was found."""


@dataclass(frozen=True)
class Solution:
    status: Status
    objective: float
    bound: float
    values: tuple[float, ...]


@dataclass
class LinearModel:
    """Minimise cost over variables with bounds, some of them integer, under rows lower <= terms <= upper."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[dict[int, float], float, float]] = field(default_factory=list)

    def variable(self, upper: float = 1.0, *, lower: float = 0.0, cost: float = 0.0, integer: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Terms, lower: float = -math.inf, upper: float = math.inf) -> int:
        self.rows.append(({v: c for v, c in terms.items() if c != 0.0}, lower, upper))
        return len(self.rows) - 1

    def with_bounds(self, bounds: Mapping[int, tuple[float, float]]) -> "LinearModel":
        """The same program with some variables restricted further."""
        lower, upper = list(self.lower), list(self.upper)
        for variable, (low, high) in bounds.items():
            lower[variable] = max(lower[variable], low)
            upper[variable] = min(upper[variable], high)
        return LinearModel(lower, upper, self.cost, self.integer, self.rows)

    def relaxed(self) -> "LinearModel":
        """The same program without whole numbers."""
        return LinearModel(self.lower, self.upper, self.cost, [False] * len(self.integer), self.rows)

    def with_cost(self, cost: Mapping[int, float]) -> "LinearModel":
        """The same program with another objective."""
        return LinearModel(
            self.lower, self.upper, [cost.get(i, 0.0) for i in range(len(self.cost))], self.integer, self.rows
        )


def solve(
    model: LinearModel,
    *,
    time_limit_seconds: float,
    relative_gap: float,
    engine: Engine = Engine.HIGHS,
    hint: Sequence[float] = (),
) -> Solution:
    """Solve with one thread and a fixed seed: equal models have equal solutions unless the clock cuts in.

    A hint is a value for every variable to start from; it is checked by the engine, not trusted.
    """
    if any(lower > upper for lower, upper in zip(model.lower, model.upper, strict=True)):
        return Solution(Status.INFEASIBLE, math.inf, math.inf, ())  # MathOpt takes crossed bounds for a mistake
    parameters = mathopt.SolveParameters(
        time_limit=timedelta(seconds=time_limit_seconds),
        relative_gap_tolerance=relative_gap,
        random_seed=1,
        # HiGHS refuses `SolveParameters.threads`: it wants its own option.
        highs=highs_pb2.HighsOptionsProto(int_options={"threads": 1}),
    )
    built = mathopt.Model.from_model_proto(_proto(model))
    start = mathopt.ModelSolveParameters()
    if hint and engine is Engine.SCIP:
        values = dict(zip(built.variables(), hint, strict=True))
        start.solution_hints.append(mathopt.SolutionHint(variable_values=values))
    result = mathopt.solve(built, _SOLVERS[engine], params=parameters, model_params=start)
    return _solution(result, built)


_SOLVERS = {Engine.HIGHS: mathopt.SolverType.HIGHS, Engine.SCIP: mathopt.SolverType.GSCIP}


def _proto(model: LinearModel) -> model_pb2.ModelProto:
    proto = model_pb2.ModelProto(name="plan")
    proto.variables.ids.extend(range(len(model.cost)))
    proto.variables.lower_bounds.extend(model.lower)
    proto.variables.upper_bounds.extend(model.upper)
    proto.variables.integers.extend(model.integer)
    costs = [(i, c) for i, c in enumerate(model.cost) if c != 0.0]
    proto.objective.linear_coefficients.ids.extend(i for i, _ in costs)
    proto.objective.linear_coefficients.values.extend(c for _, c in costs)
    constraints, matrix = proto.linear_constraints, proto.linear_constraint_matrix
    constraints.ids.extend(range(len(model.rows)))
    constraints.lower_bounds.extend(lower for _, lower, _ in model.rows)
    constraints.upper_bounds.extend(upper for _, _, upper in model.rows)
    for number, (terms, _, _) in enumerate(model.rows):
        for variable in sorted(terms):
            matrix.row_ids.append(number)
            matrix.column_ids.append(variable)
            matrix.coefficients.append(terms[variable])
    return proto


def _solution(result: mathopt.SolveResult, model: mathopt.Model) -> Solution:
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Solution(Status.INFEASIBLE, math.inf, math.inf, ())
    if not result.has_primal_feasible_solution():
        if reason is mathopt.TerminationReason.NO_SOLUTION_FOUND:
            return Solution(Status.UNKNOWN, math.inf, -math.inf, ())
        raise ShardwrightError(f"expected an answer of the solver, found {reason}: {result.termination.detail}")
    values = result.variable_values()
    proven = reason is mathopt.TerminationReason.OPTIMAL
    ordered = tuple(values[v] for v in model.variables())
    objective = result.objective_value()
    bound = result.best_objective_bound()
    return Solution(Status.OPTIMAL if proven else Status.FEASIBLE, objective, min(bound, objective), ordered)
