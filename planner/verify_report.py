"""What `verify` prints: the largest differences, what passed only by the second term, what failed, the verdict.

Differences are relative: of the loss to the loss, of a gradient by norms, as in docs/numerics.md.
"""

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwright.planner.json_export import Json

if TYPE_CHECKING:  # it imports torch, which printing does not need
    from shardwright.runtime.verify import Report
    from shardwright.runtime.verify_rank import Comparison

__all__ = ["comparison_table", "exit_code", "fault_table", "report_json"]

SHOWN_FAILURES = 10
EQUAL, DIFFERS, MISSED = 0, 1, 3
"""Exit codes; 2 is for usage errors."""


def comparison_table(found: "Comparison", title: str) -> RenderableType:
    """One run against the plain model."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("largest differences", overflow="fold")
    table.add_column("relative", justify="right", no_wrap=True)
    table.add_row("loss", f"{found.loss_difference:.2e}")
    for name, relative in found.largest:
        table.add_row(Text(name), f"{relative:.2e}")
    lines = [Text(line, "red") for line in found.failures[:SHOWN_FAILURES]]
    if len(found.failures) > SHOWN_FAILURES:
        lines.append(Text(f"and {len(found.failures) - SHOWN_FAILURES} more"))
    return Group(table, *_notes(found), *lines, Text(f"{title}: {_verdict(found)}", "bold"))


def _notes(found: "Comparison") -> list[Text]:
    notes = []
    if found.second_term:
        names = ", ".join(found.second_term)
        notes.append(Text(f"passed only beside the model's other gradients ({len(found.second_term)}): {names}"))
    if found.bitwise:
        notes.append(Text("bitwise equal to the same program with everything kept"))
    return notes


def _verdict(found: "Comparison") -> str:
    return f"equal (rtol {found.rtol:.0e})" if found.equal else f"differs (rtol {found.rtol:.0e})"


def fault_table(report: "Report") -> RenderableType:
    """Which collectives, broken on purpose, were noticed."""
    lines = [Text(f"MISSED {f.kind}:{f.collective}, {report.collectives[f.collective]}", "red") for f in report.missed]
    if not report.clean.equal:
        lines.append(Text("the unbroken step differs: what was noticed proves nothing", "red"))
    num_faults = len(report.injected)
    return Group(*lines, Text(f"{num_faults - len(report.missed)} of {num_faults} faults caught", "bold"))


def exit_code(report: "Report") -> int:
    """A step with a fault should differ, and does where all were caught; a missed one must not look like that."""
    if not report.injected:
        return EQUAL if report.clean.equal else DIFFERS
    return DIFFERS if report.clean.equal and not report.missed else MISSED


def report_json(report: "Report") -> dict[str, Json]:
    """The clean run, and every fault."""
    injected: list[Json] = [
        {"fault": f"{fault.kind}:{fault.collective}", "noticed": not comparison.equal, **_comparison_json(comparison)}
        for fault, comparison in report.injected
    ]
    return {"clean": _comparison_json(report.clean), "injected": injected, "num_missed": len(report.missed)}


def _comparison_json(found: "Comparison") -> dict[str, Json]:
    return {
        "equal": found.equal,
        "rtol": found.rtol,
        "loss_difference": found.loss_difference,
        "largest": dict(found.largest),
        "second_term": list(found.second_term),
        "failures": list(found.failures),
        "bitwise": found.bitwise,
    }
