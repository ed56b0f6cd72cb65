"""What this machine and installation can do: versions, devices, engines, the price database, and what to mend.

Imports torch, to ask it for devices; neither the solver nor transformers are loaded, only their versions are read.
Memory is in bytes.
"""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table
from rich.text import Text

from shardwright.ir import ShardwrightError, format_size
from shardwright.runtime.profile_db import ProfileDb, default_path

__all__ = ["Finding", "Report", "examine", "report_table"]

REQUIRED = ("torch", "ortools", "lark", "typer", "rich", "numpy", "platformdirs")
TESTED = {"torch": "2.13.", "ortools": "9.15.", "transformers": "5.24."}
"""Releases that are tested; torch's private parts move between releases."""
INSTALL_HF = 'pip install -c constraints.txt -e ".[hf]"'
INSTALL = "pip install -c constraints.txt -e ."


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know, and what to do about it."""

    text: str
    advice: str
    fatal: bool
    """Whether planning or running is impossible until it is mended."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything `doctor` found."""

    versions: dict[str, str | None]
    """By distribution; None where it is not installed."""
    cores: int
    """That this process may use."""
    memory_bytes: int
    """Of the machine, or of the container where that is less."""
    devices: tuple[str, ...]
    """Accelerators with their memory; none on a CPU machine."""
    engines: dict[str, bool]
    """`gloo`, `nccl`: whether this build of torch has them."""
    database: str
    """Path of the price database."""
    database_entries: int
    """Measured prices in it."""
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not any(finding.fatal for finding in self.findings)


def examine() -> Report:
    """Look around; changes nothing."""
    versions = {name: _version(name) for name in ("shardwright", *REQUIRED, "transformers")}
    versions = {"python": platform.python_version(), **versions}
    has_torch = versions["torch"] is not None
    engines = _engines() if has_torch else {}
    entries, damage = _database_entries()
    return Report(
        versions=versions,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        devices=_devices() if has_torch else (),
        engines=engines,
        database=str(default_path()),
        database_entries=entries,
        findings=(*_findings(versions, engines), *damage),
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _engines() -> dict[str, bool]:
    from torch import distributed

    if not distributed.is_available():
        return {"gloo": False, "nccl": False}
    return {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}


def _devices() -> tuple[str, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(f"{device.name} {format_size(device.total_memory)}" for device in found)


def _memory_bytes() -> int:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(machine, int(text)) if text.isdigit() else machine


def _database_entries() -> tuple[int, tuple[Finding, ...]]:
    """Prices in the database, and what is wrong with it; looking does not create one."""
    path = default_path()
    if not path.exists():
        return 0, ()
    try:
        with ProfileDb(path) as database:
            return database.count(), ()
    except ShardwrightError as error:
        return 0, (Finding("the price database cannot be read", str(error), True),)


def _findings(versions: dict[str, str | None], engines: dict[str, bool]) -> list[Finding]:
    found = [Finding(f"{name} is not installed", INSTALL, True) for name in REQUIRED if versions[name] is None]
    if versions["transformers"] is None:
        found.append(Finding("transformers is not installed: no Hugging Face models", INSTALL_HF, False))
    for name, tested in TESTED.items():
        installed = versions[name]
        if installed is not None and not installed.startswith(tested):
            text = f"{name} {installed} is not the tested {tested}*"
            found.append(Finding(text, f"{INSTALL_HF} brings the tested release", False))
    if engines and not engines["gloo"]:
        found.append(Finding("torch has no gloo: nothing runs on CPU ranks", "install a torch with distributed", True))
    return found


def report_table(report: Report) -> Table:
    """For a terminal; findings last, each with what to do."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for name, installed in report.versions.items():
        grid.add_row(name, Text(installed or "not installed"))
    grid.add_row("cores", str(report.cores))
    grid.add_row("memory", format_size(report.memory_bytes))
    grid.add_row("devices", Text(", ".join(report.devices) or "CPU only"))
    engines = [name if present else f"no {name}" for name, present in report.engines.items()]
    grid.add_row("engines", Text(", ".join(engines)))
    grid.add_row("prices", Text(f"{report.database}   {report.database_entries:,} entries"))
    for finding in report.findings:
        style = "red" if finding.fatal else "yellow"
        grid.add_row(Text("mend" if finding.fatal else "note", style), Text(f"{finding.text}: {finding.advice}"))
    if not report.findings:
        grid.add_row("verdict", "all is there")
    return grid
