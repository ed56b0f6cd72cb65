"""What `plan` and `sweep` ask alike: a target, machines and how to solve, read from the command line's texts.

Reading knows neither torch nor the solver; a text that cannot be read is a usage error, before the target is imported.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from shardwright.ir import Cluster, Mesh
from shardwright.planner import cli_values

if TYPE_CHECKING:
    from shardwright.runtime.target import Target

__all__ = ["Options", "Question", "read_question"]


class Options(TypedDict):
    """Keyword arguments that `api.plan` and `sweep.sweep` share."""

    cluster: Cluster
    host: int
    disk: int
    optimizer: str
    clip: str
    loss: str | None
    seed: int
    accumulate: int
    mesh: Mesh | None
    rules: Path | None
    time_limit: float
    gap: float
    target: str


@dataclass(frozen=True)
class Question:
    options: Options
    batch: int | None
    """Global sequences of a micro-batch."""
    seq: int | None
    dtype: str | None
    """The short name; None keeps the model's own."""

    def load(self) -> "Target":
        """Import the target, which runs its code. Raises TargetError."""
        from shardwright.runtime.target import load_target
        from shardwright.runtime.torch_ops import TORCH_DTYPES

        dtype = None if self.dtype is None else TORCH_DTYPES[self.dtype]
        return load_target(self.options["target"], self.batch, self.seq, dtype)


def read_question(
    target: str,
    *,
    cluster: str,
    host: str,
    disk: str,
    optimizer: str,
    clip: str,
    dtype: str | None,
    loss: str | None,
    rules: Path | None,
    mesh: str | None,
    batch: int | None,
    seq: int | None,
    accumulate: int,
    seed: int,
    time_limit: float,
    gap: float,
) -> Question:
    """Arguments as they come from the command line. Raises typer.BadParameter."""
    cli_values.check_target(target, batch, seq)
    options = Options(
        cluster=cli_values.read_cluster(cluster),
        host=cli_values.read_size(host, "--host", zero=True),
        disk=cli_values.read_size(disk, "--disk", zero=True),
        optimizer=cli_values.read_optimizer(optimizer),
        clip=cli_values.read_clip(clip),
        loss=loss,
        seed=seed,
        accumulate=accumulate,
        mesh=cli_values.read_mesh(mesh),
        rules=rules,
        time_limit=time_limit,
        gap=gap,
        target=target,
    )
    return Question(options, cli_values.read_batch(batch, accumulate), seq, cli_values.read_dtype(dtype))
