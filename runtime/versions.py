"""Releases that a plan depends on: recorded in it, and compared when it is put on a model."""

import platform
import warnings
from importlib import metadata

from shardwright.ir import Plan

__all__ = ["installed_versions", "warn_of_other_versions"]

PACKAGES = ("torch", "ortools", "transformers")


def installed_versions() -> tuple[tuple[str, str], ...]:
    """(name, version) of Python and of those packages that are installed."""
    found = [("python", platform.python_version())]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def warn_of_other_versions(plan: Plan) -> None:
    """One warning naming what differs: the plan stays right, since the graph is compared, but its prices may not be."""
    here = dict(installed_versions())
    other = [
        f"{name} {planned}, here {here.get(name, 'none')}"
        for name, planned in plan.versions
        if here.get(name) != planned
    ]
    if other:
        warnings.warn(
            f"the plan was made with {'; '.join(other)}. Its numbers are the same; predicted times may be off:"
            " plan again to renew them",
            stacklevel=3,
        )
