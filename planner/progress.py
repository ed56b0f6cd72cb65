"""Progress of a solve: the stage, the best plan so far, the bound and the gap.

`planner.api.plan` calls its `progress` with a `Progress` whenever something changed. `show_progress` draws them: one
live line on a terminal, plain lines otherwise.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status

from shardwright.ir import format_seconds
from shardwright.planner.console import error_console, format_percent

__all__ = ["Progress", "ProgressSink", "print_progress", "show_progress"]


@dataclass(frozen=True, slots=True)
class Progress:
    """One report."""

    stage: str
    """What is being done: `capture`, `rules`, `solve (dp=2, tp=2)`, `replay fsdp`."""
    incumbent_seconds: float | None = None
    """The best plan found so far."""
    bound_seconds: float | None = None
    """No plan of the space is faster."""

    @property
    def gap(self) -> float | None:
        """Relative distance of the two; None while one is unknown, and where a replayed time is below the bound of the
        solver's coarser objective: then the two do not compare."""
        best, bound = self.incumbent_seconds, self.bound_seconds
        if not best or bound is None or bound > best:
            return None
        return (best - bound) / best

    def __str__(self) -> str:
        parts = [self.stage]
        if self.incumbent_seconds is not None:
            parts.append(f"best {format_seconds(self.incumbent_seconds)}")
        if self.bound_seconds is not None:
            parts.append(f"bound {format_seconds(self.bound_seconds)}")
        if self.gap is not None:
            parts.append(f"gap {format_percent(self.gap)}")
        return "  ".join(parts)


REPEAT_SECONDS = 10.0
"""Plain lines that differ in numbers only come this far apart."""
ProgressSink = Callable[[Progress], None]


@dataclass
class _Lines:
    """Writes a report where it says something new, with the seconds since the start."""

    out: Console
    status: Status | None
    began: float = field(default_factory=time.monotonic)
    last: str = ""
    """Without its digits: counting up is nothing new."""
    last_seconds: float = 0.0

    def __call__(self, progress: Progress) -> None:
        seconds = time.monotonic() - self.began
        line = f"{seconds:6.1f}s  {progress}"
        if self.status is not None:
            self.status.update(line)
            return
        kind = "".join(letter for letter in str(progress) if not letter.isdigit())
        if kind == self.last and seconds < self.last_seconds + REPEAT_SECONDS:
            return
        self.last, self.last_seconds = kind, seconds
        self.out.print(line, markup=False, soft_wrap=True)


@contextmanager
def show_progress(out: Console) -> Iterator[ProgressSink]:
    """A sink that draws on `out` while the block runs."""
    if not out.is_terminal:
        yield _Lines(out, None)
        return
    with out.status("starting") as status:
        yield _Lines(out, status)


def print_progress() -> ProgressSink:
    """A sink that writes plain lines to stderr: `parallelize(progress=print_progress())`."""
    return _Lines(error_console(), None)
