"""Clusters: presets load, TOML reads with units, every mistake names file, key, and the closest match."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.ir import PRESETS, ClusterError, load_cluster, parse_cluster, print_cluster

H100 = print_cluster(load_cluster("h100x8"))


@pytest.mark.parametrize("name", [*PRESETS, "cpu:2"])
def test_a_cluster_prints_and_reads_back(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert parse_cluster(print_cluster(cluster)) == cluster


@pytest.mark.parametrize(("name", "nodes", "ranks"), [("h100x8", 1, 8), ("h100x64", 8, 64), ("a100-80x16", 2, 16)])
def test_presets_have_the_ranks_in_their_name(name: str, nodes: int, ranks: int) -> None:
    cluster = load_cluster(name)
    assert (cluster.num_nodes, cluster.num_ranks) == (nodes, ranks)
    assert cluster.device.block_bytes == 512
    assert not cluster.device.measured
    assert (cluster.inter == cluster.intra) == (nodes == 1)


def test_every_figure_of_a_preset_names_its_source() -> None:
    """`kind`, `measured`, counts and the copied link of one node aside."""
    folder = Path(print_cluster.__code__.co_filename).with_name("presets")
    files = sorted(folder.glob("*.toml"))
    assert [file.stem for file in files] == sorted([*PRESETS, "cpu"])
    for file in files:
        text = re.sub(r"\[inter\] # not used.*?(?=\[host\])", "", file.read_text(), flags=re.DOTALL)
        for line in text.split("\n"):
            figure = re.match(r"[a-z]\w* = .*\d", line) and not line.startswith(("name", "num_nodes", "ranks_per_node"))
            assert not figure or " # " in line, f"{file.name}: {line}"
        assert text.count(" # ") > 12


def test_a_disk_may_be_left_out_and_its_path_too() -> None:
    described = load_cluster("h100x8")
    without = H100[: H100.index("\n[disk]")]
    assert parse_cluster(without) == replace(described, disk=None)
    assert "disk" not in print_cluster(replace(described, disk=None))
    assert described.disk is not None and not described.disk.path
    scratch = replace(described, disk=replace(described.disk, path="/scratch/a b"))
    assert parse_cluster(print_cluster(scratch)) == scratch


def test_cpu_ranks_divide_this_machine() -> None:
    cluster = load_cluster("cpu:4")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cluster.device.memory_bytes == total // 4
    assert (cluster.num_ranks, cluster.device.block_bytes, cluster.device.measured) == (4, 1, True)


@pytest.mark.parametrize(("ranks", "share"), [(1, 1.0), (2, 1.0), (3, 1 / 3), (4, 0.0), (8, 0.0)])
def test_copies_hide_on_the_cores_that_no_rank_computes_on(
    ranks: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    free = load_cluster("cpu:1").host.overlap
    assert load_cluster(f"cpu:{ranks}").host.overlap == pytest.approx(share * free)


@pytest.mark.parametrize("name", ["h100x9", "cpu:0", "cpu:-1", "cpu", ""])
def test_an_unknown_name_lists_the_presets(name: str) -> None:
    with pytest.raises(ClusterError, match=r"one of h100x8, .*cpu:N"):
        load_cluster(name)


def test_a_near_name_is_offered() -> None:
    with pytest.raises(ClusterError, match="did you mean 'h100x8'"):
        load_cluster("h100x9")


def test_a_file_is_read_by_its_path_and_keeps_it_as_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(H100)
    assert load_cluster(str(path)) == replace(load_cluster("h100x8"), name=str(path))
    with pytest.raises(ClusterError, match="expected a readable cluster file, found .*other.toml"):
        load_cluster(str(tmp_path / "other.toml"))


MISTAKES = {
    "unknown key": ("launch =", "lunch =", "found 'lunch' (did you mean 'launch'?)", "device.lunch"),
    "unknown table": ("[intra]", "[intro]", "found 'intro' (did you mean 'intra'?)", "intro"),
    "missing key": ('kind = "cuda"\n', "", "expected the key 'kind' in table [device]", "device.kind"),
    "unknown unit": (
        "3350000000000.0B/s",
        "3350GP/s",
        "expected a rate with one of the units",
        "device.memory_bandwidth",
    ),
    "no unit": ('block = "512B"', 'block = "512"', "expected a size with a unit", "device.block"),
    "not text": ('block = "512B"', "block = 512", "expected text in quotes, found 512", "device.block"),
    "dtype": ("bf16 =", "bf17 =", "found 'bf17' (did you mean 'bf16'?)", "device.flops.bf17"),
    "kind": ('"cuda"', '"cude"', "expected cuda or cpu, found 'cude' (did you mean 'cuda'?)", "device.kind"),
    "count": ("num_nodes = 1", "num_nodes = 0", "expected a whole number of 1 or more, found 0", "num_nodes"),
    "bool": ("num_nodes = 1", "num_nodes = true", "expected a whole number of 1 or more, found True", "num_nodes"),
    "fraction": (
        "matmul_efficiency = 0.803",
        "matmul_efficiency = 1.5",
        "above 0 to 1, found 1.5",
        "device.matmul_efficiency",
    ),
    "nan": (
        "matmul_efficiency = 0.803",
        "matmul_efficiency = nan",
        "above 0 to 1, found nan",
        "device.matmul_efficiency",
    ),
    "infinite": ('launch = "7us"', 'launch = "infs"', "of 0 or more, found 'infs'", "device.launch"),
    "zero rate": ("55000000000.0B/s", "0B/s", "above 0, found '0B/s'", "host.copy_bandwidth"),
    "time": ('launch = "7us"', 'launch = "7"', "expected a time with one of the units", "device.launch"),
    "flag": ("measured = false", "measured = 0", "expected true or false, found 0", "device.measured"),
    "disk key": ('latency = "60us"', "", "expected the key 'latency' in table [disk]", "disk.latency"),
    "disk path": ("[disk]", "[disk]\npath = 3", "expected text in quotes, found 3", "disk.path"),
    "table": ("[device.flops]", "flops = 3\n[device.x]", "expected one of the keys kind", "device.x"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_file_and_the_key(mistake: str) -> None:
    old, new, message, key = MISTAKES[mistake]
    assert old in H100
    with pytest.raises(ClusterError) as error:
        parse_cluster(H100.replace(old, new), "mine.toml")
    first, place = str(error.value).split("\n")
    assert message in first
    assert place == f"  at mine.toml, key {key}"


def test_what_is_not_toml_is_refused_with_the_line() -> None:
    with pytest.raises(ClusterError, match=r"expected TOML in mine.toml, found an error: .*line 2"):
        parse_cluster("name = 'x'\nnum_nodes = = 3", "mine.toml")
