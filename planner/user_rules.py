"""What a user pins and forbids, as bounds on the program's variables: baselines and smallest plans obey it too."""

from collections.abc import Mapping

from shardwright.ir import Fate, Mesh, PlanError, UserRules
from shardwright.ir.globs import matches
from shardwright.planner.fates import FATES
from shardwright.planner.formulation import Formulation
from shardwright.planner.linear import Bounds
from shardwright.planner.space import Unit

__all__ = ["allowed_meshes", "obey", "require_host"]


def allowed_meshes(meshes: tuple[Mesh, ...], rules: UserRules) -> tuple[Mesh, ...]:
    """Those whose axes may all be there. Raises PlanError when none is left."""
    found = tuple(mesh for mesh in meshes if rules.axes is None or set(mesh.axes) <= set(rules.axes))
    if not found:
        raise PlanError(
            f"expected `allow axes` to leave a mesh, found {', '.join(rules.axes or ())};"
            f" the meshes that are tried: {', '.join(map(str, meshes))}"
        )
    return found


def require_host(rules: UserRules, host_bytes: int) -> None:
    """Raises PlanError for a rule that asks for offloading where there is no memory to offload to."""
    asking = [rule for rule in rules.fates if rule.pinned and rule.fate is Fate.OFFLOAD]
    if asking and not host_bytes:
        raise PlanError(
            f"expected host memory for {rules.at(asking[0])}, found none: give --host SIZE, or take the rule out"
        )


def obey(formulation: Formulation, rules: UserRules) -> None:
    """Restrict the program. Rules on one layer of a class hold for the whole class. Raises PlanError naming the
    value for which nothing is left."""
    bounds: Bounds = {}
    members = formulation.space.fold.members()
    for unit in formulation.space.units:
        _obey_places(formulation, unit, rules, members, bounds)
    _obey_fates(formulation, rules, bounds)
    formulation.model = formulation.model.with_bounds(bounds)


def _obey_places(
    formulation: Formulation,
    unit: Unit,
    rules: UserRules,
    members: Mapping[str, tuple[str, ...]],
    bounds: Bounds,
) -> None:
    if not rules.places:
        return
    for value in unit.values:
        names = members.get(value, (value,))
        layouts = unit.layouts_of(value)
        allowed = [all(rules.allows_layout(name, layout) for name in names) for layout in layouts]
        if not any(allowed):
            offered = "; ".join(dict.fromkeys(", ".join(map(str, layout)) for layout in layouts))
            pins = ", ".join(rules.at(pin) for pin in rules.places if any(matches(pin.glob, name) for name in names))
            raise PlanError(
                f"expected the rules to leave a layout for {names[0]} on mesh {formulation.space.mesh}, found none"
                f" after {pins}; there are: {offered}"
            )
        variables = formulation.flows.choices[unit.index]
        bounds.update({v: (0.0, 0.0) for v, ok in zip(variables, allowed, strict=True) if not ok})


def _obey_fates(formulation: Formulation, rules: UserRules, bounds: Bounds) -> None:
    if not rules.fates:
        return
    for name in formulation.storages.forward:
        choice = formulation.fates.get(formulation.space.fold.key(name))
        possible = [Fate.KEEP] if choice is None else [fate for state, fate in FATES.items() if state in choice.counts]
        if not any(rules.allows_fate(name, fate) for fate in possible):
            offered = ", ".join(dict.fromkeys(possible))
            asked = ", ".join(rules.at(rule) for rule in rules.fates if matches(rule.glob, name))
            raise PlanError(
                f"expected the rules to leave a fate that {name} can have, found none of {offered} after {asked}:"
                " the others need host memory or disk, or a larger storage, or one that backward reads; change the rule"
            )
        if choice is not None:
            refused = [state for state, fate in FATES.items() if not rules.allows_fate(name, fate)]
            bounds.update({choice.counts[state]: (0.0, 0.0) for state in refused if state in choice.counts})
