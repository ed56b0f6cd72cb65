"""Where the disk tier's file is made: where the caller says, else where the cluster says, else in the user's cache."""

import warnings
from pathlib import Path

import platformdirs

from shardwright.ir import Cluster, ClusterError, DiskError, load_cluster

__all__ = ["cluster_disk_directory", "disk_directory"]


def disk_directory(cluster: str, given: str | Path | None = None) -> Path:
    """The directory for a plan made for `cluster`, a preset or a file, on this rank. Raises DiskError.

    A plan says what its cluster was called, and no more: where that cannot be read here, a warning says so.
    """
    if given is not None:
        return _there(Path(given))
    try:
        return cluster_disk_directory(load_cluster(cluster))
    except ClusterError:
        found = _cache_directory()
        warnings.warn(
            f"the plan's cluster {cluster!r} cannot be read here, so that its [disk] path is not known: the disk tier"
            f" is in {found}. Name another directory with disk_path",
            stacklevel=2,
        )
        return found


def cluster_disk_directory(cluster: Cluster) -> Path:
    """The path of the cluster's disk, else a folder in the user's cache. Raises DiskError."""
    if cluster.disk is not None and cluster.disk.path:
        return _there(Path(cluster.disk.path))
    return _cache_directory()


def _there(path: Path) -> Path:
    """Not made here: an empty mount point would take what a disk of its own should."""
    if not path.is_dir():
        raise DiskError(f"expected a directory for the disk tier at {path}, found none; make it, or name another one")
    return path


def _cache_directory() -> Path:
    path = Path(platformdirs.user_cache_dir("shardwright", appauthor=False)) / "disk"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(
            f"expected to make {path} for the disk tier, found: {error.strerror}; name another directory: [disk] path"
            " of the cluster, or disk_path"
        ) from error
    return path
