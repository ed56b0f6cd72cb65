"""A curve on disk: each point's plan with its graph, named after its budget, and the picture."""

from dataclasses import dataclass
from pathlib import Path

from shardwright.ir import PlanError, format_size, parse_size
from shardwright.ir.files import write_text
from shardwright.ir.units import exact_size
from shardwright.planner.curve import Curve
from shardwright.planner.curve_svg import curve_svg

__all__ = ["Written", "save_curve"]


@dataclass(frozen=True)
class Written:
    """What was asked to be written."""

    plans: tuple[Path, ...] = ()
    """One a point, in their order."""
    picture: Path | None = None

    @property
    def all(self) -> tuple[Path, ...]:
        return self.plans if self.picture is None else (*self.plans, self.picture)


def save_curve(curve: Curve, folder: Path | None, picture: Path | None) -> Written:
    """Raises PlanError where a file cannot be written."""
    plans = () if folder is None else _save_plans(curve, folder)
    if picture is not None:
        write_text(picture, curve_svg(curve))
    return Written(plans, picture)


def _save_plans(curve: Curve, folder: Path) -> tuple[Path, ...]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError(f"expected a folder to write plans to, found {error}") from None
    paths = tuple(folder / f"{_size_name(point.budget.device_bytes)}.plan" for point in curve.points)
    for point, path in zip(curve.points, paths, strict=True):
        point.result.save(path)
    return paths


def _size_name(num_bytes: int) -> str:
    """As tables print it, where that is the size and not something close to it.

    >>> _size_name(900 * 2**20), _size_name(900 * 10**6)
    ('900MiB', '900000000B')
    """
    shown = format_size(num_bytes)
    return shown if parse_size(shown) == num_bytes else exact_size(num_bytes)
