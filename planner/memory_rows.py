"""Memory as rows: what is alive at each step, as counts of items whose bytes are linear in the variables.

An item is one storage of one kind (whole, kept, made again, redistributed, gradient); equal layers share items, so
a row says how many copies are alive. Within a class of layers the rows of first and last layer bound all others: counts
are linear in the layer, and what the last layer holds is known by itself (`fates`). Rows that another row covers in
every item are dropped.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.planner.flows import Terms, add_terms

__all__ = ["Items"]


@dataclass
class Items:
    """Spans of steps, both ends included."""

    terms: dict[Hashable, Terms] = field(default_factory=dict)
    spans: list[tuple[int, int, Hashable]] = field(default_factory=list)

    def add(self, key: Hashable, terms: Terms, start: int, end: int) -> None:
        """One copy of an item, alive from `start` to `end`; nothing when it has no bytes or no span."""
        if not terms or end < start:
            return
        self.terms[key] = terms
        self.spans.append((start, end, key))

    def rows(self, steps: Sequence[int]) -> list[Terms]:
        """GB alive at each of the steps, without rows covered by others."""
        columns = {key: number for number, key in enumerate(self.terms)}
        index = {step: row for row, step in enumerate(steps)}
        last = max((end for _, end, _ in self.spans), default=0)
        # Prefix sums over the steps asked for: a span covers a run of rows.
        starts = np.searchsorted(np.asarray(steps), np.arange(last + 2))
        changes = np.zeros((len(index) + 1, len(columns)), dtype=np.int32)
        for start, end, key in self.spans:
            changes[starts[start], columns[key]] += 1
            changes[starts[end + 1], columns[key]] -= 1
        counts = np.unique(np.cumsum(changes[:-1], axis=0), axis=0)
        keys = list(columns)
        return [self._row(keys, row) for row in _uncovered(counts)]

    def _row(self, keys: list[Hashable], counts: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> Terms:
        terms: Terms = {}
        for column in np.flatnonzero(counts):
            add_terms(terms, self.terms[keys[column]], float(counts[column]))
        return terms


Matrix = np.ndarray[tuple[int, int], np.dtype[np.int32]]


def _uncovered(counts: Matrix) -> Matrix:
    """Rows that no other row covers; rows are distinct."""
    kept = [row for row in range(len(counts)) if (counts >= counts[row]).all(axis=1).sum() == 1]
    return counts[kept]
