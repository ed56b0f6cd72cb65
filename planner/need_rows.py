"""Whether backward needs a storage by, or since, some step of backward, as variables of the program.

With r_c = 1 where child c is recomputed, and p a step:
  by[v, p] = 1 where v is needed in any case by p; else
  by[v, p] >= r_c + by[c, p] - 1 for every child c                                              (`_write_by`)
  by[v, p] <= sum of r_c over them, and sum of by[c, p]                                         (`_bounded`)
  since[v, p] >= r_c - by[c, p - 1]: a child recomputed, and not before p, needs v still        (`_write_since`)
"""

from dataclasses import dataclass, field

from shardwright.planner.flows import Terms, add_terms
from shardwright.planner.formulation import Formulation
from shardwright.planner.needs import NEVER, Needs

__all__ = ["NeedRows"]


@dataclass
class NeedRows:
    """Variables that say whether a storage is needed; None where no plan needs it by, or since, the step asked for."""

    result: Formulation
    needs: Needs
    always: int = field(init=False)
    """A variable that is 1."""
    _by: dict[tuple[str, int], int] = field(default_factory=dict)
    """(storage, one of its starts) to variable."""
    _since: dict[tuple[str, int], int | None] = field(default_factory=dict)
    _reasons: dict[int, list[tuple[Terms, int]]] = field(default_factory=dict)
    """Of variables without an upper bound so far: (child is recomputed, child is needed by then)."""

    def __post_init__(self) -> None:
        self.always = self.result.model.variable(lower=1.0)
        for name, need in self.needs.of.items():
            until = [p - 1 for p in need.starts[1:]] + [NEVER]
            for start, end in zip(need.starts, until, strict=True):
                if start < need.first:
                    self._write_by(name, start, end)

    def by(self, name: str, step: int) -> int | None:
        """1 where the storage is needed at the step, or was before."""
        need = self.needs.of[name]
        if step >= need.first:
            return self.always
        started = [p for p in need.starts if p <= step]
        return self._by.get((name, started[-1])) if started else None

    def since(self, name: str, step: int) -> int | None:
        """1 where the storage is needed at the step or after."""
        if step <= self.needs.of[name].last:
            return self.always
        until = next((p for p in self.needs.latest(name) if p >= step), NEVER)
        if (name, until) not in self._since:
            self._since[name, until] = self._write_since(name, until)
        return self._since[name, until]

    def _recomputed(self, child: str) -> Terms:
        fate = self.result.fates.get(self.result.space.fold.key(child))
        return fate.last_recomputed if fate else {}

    def _write_by(self, name: str, start: int, until: int) -> None:
        """What starts up to `until`, and was not kept apart, counts from `start`."""
        asking = [(c, self.by(c, until)) for c in self.needs.of[name].asking if self._recomputed(c)]
        reasons = [(self._recomputed(child), by) for child, by in asking if by is not None]
        if not reasons:
            return
        variable = self.result.model.variable()
        self._by[name, start] = variable
        self._reasons[variable] = reasons
        for recomputed, by in reasons:
            self.result.model.row(add_terms({variable: 1.0, by: -1.0}, recomputed, -1.0), -1.0)

    def _bounded(self, variable: int) -> int:
        """The same variable, and never 1 without a reason: needed where 1 makes something else cheaper."""
        waiting = [variable]
        while waiting:
            top = waiting.pop()
            some_recomputed, some_needed = {top: -1.0}, {top: -1.0}
            for recomputed, by in self._reasons.pop(top, ()):
                add_terms(some_recomputed, recomputed)
                add_terms(some_needed, {by: 1.0})
                waiting.append(by)
            if len(some_needed) > 1:
                self.result.model.row(some_recomputed, 0.0)
                self.result.model.row(some_needed, 0.0)
        return variable

    def _write_since(self, name: str, step: int) -> int | None:
        late = [c for c in self.needs.of[name].asking if self.needs.of[c].starts[-1] >= step]
        reasons = [(self._recomputed(c), self.by(c, step - 1)) for c in late if self._recomputed(c)]
        reasons = [(recomputed, by) for recomputed, by in reasons if by != self.always]
        if not reasons:
            return None
        variable = self.result.model.variable()
        for recomputed, by in reasons:
            row = add_terms({variable: 1.0}, recomputed, -1.0)
            self.result.model.row(row if by is None else add_terms(row, {self._bounded(by): 1.0}), 0.0)
        return variable
