"""Clusters by name or from a TOML file, and back to TOML.

Presets are TOML files in `presets/`, `cpu:N` aside, which is this machine. Every key is needed and no other is
allowed; only the table `disk`, and in it `path`, may be left out. Sizes, rates and times are written with units
(`units`).
"""

import os
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from shardwright.ir.cluster import Cluster, Device, Disk, Host, Link
from shardwright.ir.errors import ClusterError, TextError
from shardwright.ir.names import closest, quote
from shardwright.ir.types import DTYPE_BYTES
from shardwright.ir.units import exact_seconds, exact_size, parse_rate, parse_seconds, parse_size

__all__ = ["PRESETS", "load_cluster", "parse_cluster", "print_cluster"]

PRESETS: Final = ("h100x8", "h100x64", "a100-80x8", "a100-80x16")
"""Names of the clusters that are described here; `cpu:N` besides."""

_MAX_BYTES: Final = 2**20
_FOLDER: Final = Path(__file__).with_name("presets")
_CPU: Final = re.compile(r"cpu:([1-9][0-9]{0,5})")
_KINDS: Final = ("cuda", "cpu")
_T = TypeVar("_T")

_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("name", "num_nodes", "ranks_per_node", "device", "intra", "inter", "host", "disk"),
    "device": ("kind", "memory", "memory_bandwidth", "matmul_efficiency", "launch", "block", "measured", "flops"),
    "intra": ("bandwidth", "latency", "overlap"),
    "inter": ("bandwidth", "latency", "overlap"),
    "host": ("memory", "copy_bandwidth", "copy_latency", "smallest_offload", "optimizer_rate", "overlap"),
    "disk": ("capacity", "write_bandwidth", "read_bandwidth", "latency", "path"),
}
"""The keys of every table."""
_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {"": ("disk",), "disk": ("path",)}
"""Those that may be left out; all others are needed."""


def load_cluster(name_or_path: str) -> Cluster:
    """The cluster of a preset, `cpu:N`, or a TOML file. Raises ClusterError."""
    match = _CPU.fullmatch(name_or_path)
    if match:
        return _cpu_cluster(int(match[1]))
    if name_or_path in PRESETS:
        return _read(_FOLDER / f"{name_or_path}.toml")
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.is_file():
        return replace(_read(path), name=name_or_path)  # plans remember where to find it
    near = closest(name_or_path, (*PRESETS, "cpu:1"))
    raise ClusterError(
        f"expected a cluster: one of {', '.join(PRESETS)}, cpu:N with N ranks of this machine, "
        f"or a TOML file, found {name_or_path!r}{near}"
    )


def parse_cluster(text: str, path: str = "<cluster>") -> Cluster:
    """The cluster that a TOML text describes; `path` is for messages. Raises ClusterError."""
    try:
        top = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ClusterError(f"expected TOML in {path}, found an error: {error}") from None
    root = _Table(path, "", top)
    device, intra, inter, host = (root.table(key) for key in ("device", "intra", "inter", "host"))
    return Cluster(
        name=root.text("name"),
        num_nodes=root.count("num_nodes"),
        ranks_per_node=root.count("ranks_per_node"),
        device=_device(device),
        intra=_link(intra),
        inter=_link(inter),
        host=Host(
            memory_bytes=host.size("memory", zero=True),
            copy_bytes_per_second=host.rate("copy_bandwidth", "B"),
            copy_latency_seconds=host.seconds("copy_latency"),
            smallest_offload_bytes=host.size("smallest_offload"),
            optimizer_elements_per_second=host.rate("optimizer_rate", "element"),
            overlap=host.fraction("overlap", zero=True),
        ),
        disk=_disk(root.table("disk")) if "disk" in root.keys else None,
    )


def print_cluster(cluster: Cluster) -> str:
    """TOML that `parse_cluster` reads back to the same cluster."""
    device, host = cluster.device, cluster.host
    flops = [f'{dtype} = "{rate!r}FLOP/s"' for dtype, rate in device.flops_per_second.items()]
    lines = [
        f"name = {quote(cluster.name)}",
        f"num_nodes = {cluster.num_nodes}",
        f"ranks_per_node = {cluster.ranks_per_node}",
        "\n[device]",
        f"kind = {quote(device.kind)}",
        f'memory = "{exact_size(device.memory_bytes)}"',
        f'memory_bandwidth = "{device.memory_bytes_per_second!r}B/s"',
        f"matmul_efficiency = {device.matmul_efficiency!r}",
        f'launch = "{exact_seconds(device.launch_seconds)}"',
        f'block = "{exact_size(device.block_bytes)}"',
        f"measured = {str(device.measured).lower()}",
        "\n[device.flops]",
        *flops,
        *_link_lines("intra", cluster.intra),
        *_link_lines("inter", cluster.inter),
        "\n[host]",
        f'memory = "{exact_size(host.memory_bytes)}"',
        f'copy_bandwidth = "{host.copy_bytes_per_second!r}B/s"',
        f'copy_latency = "{exact_seconds(host.copy_latency_seconds)}"',
        f'smallest_offload = "{exact_size(host.smallest_offload_bytes)}"',
        f'optimizer_rate = "{host.optimizer_elements_per_second!r}element/s"',
        f"overlap = {host.overlap!r}",
        *_disk_lines(cluster.disk),
    ]
    return "\n".join(lines) + "\n"


def _link_lines(name: str, link: Link) -> list[str]:
    return [
        f"\n[{name}]",
        f'bandwidth = "{link.bytes_per_second!r}B/s"',
        f'latency = "{exact_seconds(link.latency_seconds)}"',
        f"overlap = {link.overlap!r}",
    ]


def _disk_lines(disk: Disk | None) -> list[str]:
    if disk is None:
        return []
    return [
        "\n[disk]",
        f'capacity = "{exact_size(disk.capacity_bytes)}"',
        f'write_bandwidth = "{disk.write_bytes_per_second!r}B/s"',
        f'read_bandwidth = "{disk.read_bytes_per_second!r}B/s"',
        f'latency = "{exact_seconds(disk.latency_seconds)}"',
        *([f"path = {quote(disk.path)}"] if disk.path else []),
    ]


def _cpu_cluster(num_ranks: int) -> Cluster:
    one = _read(_FOLDER / "cpu.toml")
    each = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // num_ranks
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # gloo's threads mostly wait, so they hide beside compute, but less where ranks already share their cores.
    link = replace(one.intra, overlap=one.intra.overlap * min(1.0, cores / num_ranks))
    # A copy, or a step of the host, keeps a core busy: it hides on those that no rank computes on.
    overlap = one.host.overlap * min(1.0, max(0.0, cores / num_ranks - 1.0))
    return replace(
        one,
        name=f"cpu:{num_ranks}",
        ranks_per_node=num_ranks,
        intra=link,
        inter=link,
        device=replace(one.device, memory_bytes=each),
        host=replace(one.host, memory_bytes=each, overlap=overlap),
        disk=one.disk and replace(one.disk, capacity_bytes=_free_disk_bytes() // num_ranks),
    )


def _free_disk_bytes() -> int:
    """Where the user's own files, and with them the cache folder, usually lie."""
    home = Path(os.path.expanduser("~"))
    return shutil.disk_usage(home if home.is_dir() else "/").free


def _read(path: Path) -> Cluster:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"expected a readable cluster file, found {error} at {str(path)!r}") from None
    if len(data) > _MAX_BYTES:
        raise ClusterError(f"expected a cluster file of at most {exact_size(_MAX_BYTES)}, found a larger one: {path}")
    return parse_cluster(text, str(path))


def _device(table: "_Table") -> Device:
    kind = table.text("kind")
    if kind not in _KINDS:
        raise table.error("kind", f"expected {' or '.join(_KINDS)}, found {kind!r}{closest(kind, _KINDS)}")
    flops = table.table("flops", allowed=tuple(DTYPE_BYTES))
    return Device(
        kind=kind,
        memory_bytes=table.size("memory"),
        memory_bytes_per_second=table.rate("memory_bandwidth", "B"),
        flops_per_second={dtype: flops.rate(dtype, "FLOP") for dtype in flops.keys},
        matmul_efficiency=table.fraction("matmul_efficiency"),
        launch_seconds=table.seconds("launch"),
        block_bytes=table.size("block"),
        measured=table.flag("measured"),
    )


def _disk(table: "_Table") -> Disk:
    return Disk(
        capacity_bytes=table.size("capacity"),
        write_bytes_per_second=table.rate("write_bandwidth", "B"),
        read_bytes_per_second=table.rate("read_bandwidth", "B"),
        latency_seconds=table.seconds("latency"),
        path=table.text("path") if "path" in table.keys else "",
    )


def _link(table: "_Table") -> Link:
    return Link(table.rate("bandwidth", "B"), table.seconds("latency"), table.fraction("overlap", zero=True))


class _Table:
    """One table of the file, read by key with the unit that is meant. `allowed` keys may be absent; without it, the
    keys of `_SECTIONS` must all be there but those of `_OPTIONAL`."""

    def __init__(self, path: str, section: str, values: Mapping[str, object], allowed: tuple[str, ...] = ()) -> None:
        self._path = path
        self._section = section
        self._values = values
        known = allowed or _SECTIONS[section]
        for key in values:
            if key not in known:
                raise self.error(
                    key, f"expected one of the keys {', '.join(known)}, found {key!r}{closest(key, known)}"
                )
        needed = () if allowed else [key for key in known if key not in _OPTIONAL.get(section, ())]
        missing = [key for key in needed if key not in values]
        if missing:
            where = f"table [{section}]" if section else "the top of the file"
            raise self.error(
                missing[0], f"expected the key {missing[0]!r} in {where}, found {', '.join(values) or 'none'}"
            )

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._values)

    def error(self, key: str, message: str) -> ClusterError:
        return ClusterError(f"{message}\n  at {self._path}, key {f'{self._section}.{key}'.lstrip('.')}")

    def table(self, key: str, allowed: tuple[str, ...] = ()) -> "_Table":
        value = self._values[key]
        if not isinstance(value, dict):
            raise self.error(key, f"expected a table, found {value!r}")
        return _Table(self._path, f"{self._section}.{key}".lstrip("."), value, allowed)

    def text(self, key: str) -> str:
        value = self._values[key]
        if not isinstance(value, str) or not value:
            raise self.error(key, f"expected text in quotes, found {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self._values[key]
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}")
        return value

    def count(self, key: str) -> int:
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**7:
            raise self.error(key, f"expected a whole number of 1 or more, found {value!r}")
        return value

    def fraction(self, key: str, zero: bool = False) -> float:
        value = self._values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1 or not (value or zero):
            raise self.error(key, f"expected a number {'from 0' if zero else 'above 0'} to 1, found {value!r}")
        return float(value)

    def size(self, key: str, zero: bool = False) -> int:
        return self._quantity(key, lambda text: parse_size(text, zero=zero))

    def seconds(self, key: str) -> float:
        return self._positive(key, parse_seconds, zero=True)

    def rate(self, key: str, noun: str) -> float:
        return self._positive(key, lambda text: parse_rate(text, noun), zero=False)

    def _positive(self, key: str, parse: Callable[[str], float], zero: bool) -> float:
        value = self._quantity(key, parse)
        if not 0 <= value < float("inf") or not (value or zero):
            raise self.error(
                key, f"expected a number {'of 0 or more' if zero else 'above 0'}, found {self._values[key]!r}"
            )
        return value

    def _quantity(self, key: str, parse: Callable[[str], _T]) -> _T:
        try:
            return parse(self.text(key))
        except TextError as error:
            raise self.error(key, str(error)) from None
