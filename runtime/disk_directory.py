"""Where the disk tier's file is made: where the caller says, else where the cluster says, else in the user's cache."""

import warnings
from pathlib import Path

import platformdirs

from shardwright.ir import Cluster, ClusterError, DiskError, load_cluster

__all__ = ["cluster_disk_path", "disk_directory"]


def disk_directory(cluster: str, given: str | Path | None = None) -> Path:
    """The directory for a plan made for `cluster`, a preset or a file, on this rank. Raises DiskError.

    A plan says what its cluster was called, and no more: where that cannot be read here, a warning says so.
    """
    if given is not None:
        return _there(Path(given))
    try:
        return _there(cluster_disk_path(load_cluster(cluster)))
    except ClusterError:
        found = _default_path()
        warnings.warn(
            f"the plan's cluster {cluster!r} cannot be read here, so that its [disk] path is not known: the disk tier"
            f" is in {found}. Name another directory with disk_path",
            stacklevel=2,
        )
        return _there(found)


def cluster_disk_path(cluster: Cluster) -> Path:
    """The path of the cluster's disk, else a folder in the user's cache, which may have to be made."""
    return Path(cluster.disk.path) if cluster.disk is not None and cluster.disk.path else _default_path()


def _default_path() -> Path:
    return Path(platformdirs.user_cache_dir("shardwright", appauthor=False)) / "disk"


def _there(path: Path) -> Path:
    """Only our own is made: an empty mount point would take what a disk of its own should."""
    try:
        if path == _default_path():
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(
            f"expected to make {path} for the disk tier, found: {error.strerror}; name another directory: [disk] path"
            " of the cluster, or disk_path"
        ) from error
    if not path.is_dir():
        raise DiskError(f"expected a directory for the disk tier at {path}, found none; make it, or name another one")
    return path
