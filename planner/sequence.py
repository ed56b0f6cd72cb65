"""Layouts first and fates afterwards: what planning one after the other chooses.

The joint program allows such plans too, and ranks them by its own objective; where replay likes one better, by the
little that the objective does not know, the search wants to have tried it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from shardwright.ir import DTYPE_BYTES, InputKind
from shardwright.planner.fates import GB, State
from shardwright.planner.flows import Terms
from shardwright.planner.formulation import Formulation
from shardwright.planner.linear import Bounds, Solution, solve

__all__ = ["everything_kept", "layouts_alone", "with_layouts"]


def layouts_alone(
    formulation: Formulation, resident_bytes: float, *, time_limit_seconds: float, relative_gap: float
) -> Solution:
    """The fastest with everything kept, whatever activations need, of which parameters, gradients and optimizer state
    take at most `resident_bytes`; without values where no layouts do."""
    model = formulation.model.with_bounds(everything_kept(formulation))
    program = replace(model, rows=[*model.rows, (_resident(formulation), -math.inf, resident_bytes / GB)])
    return solve(program, time_limit_seconds=time_limit_seconds, relative_gap=relative_gap)


def with_layouts(formulation: Formulation, values: Sequence[float]) -> Bounds:
    """Bounds that leave the layouts of a solution only."""
    variables = [variable for choices in formulation.flows.choices for variable in choices]
    shares = [float(round(values[variable])) for variable in variables]
    return {variable: (share, share) for variable, share in zip(variables, shares, strict=True)}


def everything_kept(formulation: Formulation) -> Bounds:
    """Bounds under which nothing is recomputed or moved."""
    bounds: Bounds = dict.fromkeys(formulation.hosted, (0.0, 0.0))
    for choice in formulation.fates.values():
        state = State.DROP if State.DROP in choice.counts else State.KEEP
        bounds[choice.counts[state]] = (float(choice.multiplicity), float(choice.multiplicity))
    return bounds


def _resident(formulation: Formulation) -> Terms:
    """GB of parameters, gradients and optimizer state, by choice variable."""
    terms: Terms = {}
    optimizer = formulation.machine.optimizer
    for unit in formulation.space.units:
        if unit.kind not in (InputKind.PARAM, InputKind.FROZEN):
            continue
        for variable, choice in zip(formulation.flows.choices[unit.index], unit.choices, strict=True):
            local = formulation.local(unit.values[0], choice.layouts[0])
            num_bytes = local.num_bytes
            if unit.kind is InputKind.PARAM:
                num_bytes += local.num_bytes + optimizer.state_bytes(local.num_elements, DTYPE_BYTES[local.dtype])
            terms[variable] = num_bytes * unit.multiplicity / GB
    return terms
