"""The file of the disk tier: bounded, exact, direct where it can be, named by nobody, and clear about what fails."""

import errno
import mmap
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwright.ir import DiskError, PlanError
from shardwright.runtime.disk_file import DiskFile

BLOCK = 4096


def aligned(num_bytes: int, fill: int = 0) -> memoryview:

    memory = memoryview(mmap.mmap(-1, num_bytes))
    memory[:] = bytes([fill]) * num_bytes
    return memory


def test_blocks_come_back_as_they_were_written_wherever_they_lie(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 10 * BLOCK)
    slots = [file.acquire(size) for size in (1, BLOCK, BLOCK + 1)]
    assert [slot.num_bytes for slot in slots] == [BLOCK, BLOCK, 2 * BLOCK]
    for number, slot in enumerate(slots):
        file.write(slot.offset, aligned(slot.num_bytes, number + 1))
    for number, slot in enumerate(slots):
        back = aligned(slot.num_bytes)
        file.read(slot.offset, back)
        assert back == bytes([number + 1]) * slot.num_bytes
    assert (file.used_bytes, file.held_bytes, file.peak_bytes) == (4 * BLOCK, 4 * BLOCK, 4 * BLOCK)
    for slot in slots:
        file.release(slot)
    assert (file.used_bytes, file.held_bytes) == (0, 4 * BLOCK)


def test_nothing_is_made_before_it_is_needed_and_it_has_no_name(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "missing", 10 * BLOCK)
    assert file.held_bytes == 0
    file = DiskFile(tmp_path, 10 * BLOCK)
    file.reserve(3 * BLOCK)
    assert list(tmp_path.iterdir()) == [] and file.held_bytes == 3 * BLOCK
    file.reserve(2 * BLOCK)
    assert file.held_bytes == 3 * BLOCK


def test_the_file_takes_its_blocks_from_the_disk_at_once(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 10 * BLOCK)
    file.reserve(8 * BLOCK)
    found = os.fstat(file._descriptor)
    assert found.st_size == 8 * BLOCK and found.st_blocks * 512 >= 8 * BLOCK


def test_more_than_the_budget_is_refused_with_figures_and_nothing_is_lost(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 2 * BLOCK)
    slot = file.acquire(BLOCK)
    with pytest.raises(PlanError, match="within 8192 bytes, found 8192 more wanted with 4096 in use"):
        file.acquire(2 * BLOCK)
    file.release(slot)
    assert file.acquire(2 * BLOCK).offset == 0


def test_direct_io_passes_the_cache_or_says_that_it_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses is played: the flag is taken and the first read fails, as some do."""
    direct = DiskFile(tmp_path, BLOCK)
    direct.reserve(BLOCK)
    real = os.preadv

    def refuses(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "preadv", refuses)
    cached = DiskFile(tmp_path, 2 * BLOCK)
    with pytest.warns(UserWarning, match="does not take direct I/O .*page cache"):
        cached.reserve(BLOCK)
    monkeypatch.setattr(os, "preadv", real)
    assert not cached.is_direct
    for file in (direct, cached):
        file.write(0, aligned(BLOCK, 7))
        back = aligned(BLOCK)
        file.read(0, back)
        assert back == bytes([7]) * BLOCK


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs at /dev/shm")
def test_a_file_grows_while_it_is_direct_or_on_a_file_system_that_is_not() -> None:
    """tmpfs takes direct I/O or not, by kernel."""
    file = DiskFile(Path("/dev/shm"), 4 * BLOCK)
    for number in range(4):
        slot = file.acquire(BLOCK)
        file.write(slot.offset, aligned(BLOCK, number))
        back = aligned(BLOCK)
        file.read(slot.offset, back)
        assert back == bytes([number]) * BLOCK


def test_short_reads_and_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskFile(tmp_path, 4 * BLOCK)
    file.reserve(4 * BLOCK)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: write(f, data[:BLOCK], at))
    monkeypatch.setattr(os, "preadv", lambda f, data, at: read(f, [data[0][:BLOCK]], at))
    source = memoryview(aligned(4 * BLOCK))
    for number in range(4):
        source[number * BLOCK : (number + 1) * BLOCK] = bytes([number]) * BLOCK
    file.write(0, source)
    back = aligned(4 * BLOCK)
    file.read(0, back)
    assert back == source


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_refused_before_anything_is_written_and_may_have_room_later(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 8 * BLOCK)
    with limited_file_size(4 * BLOCK):
        with pytest.raises(DiskError, match=r"expected room for 32KiB in a file of the disk tier in .*File too large"):
            file.reserve(8 * BLOCK)
        file.reserve(4 * BLOCK)
    file.reserve(8 * BLOCK)
    assert file.held_bytes == 8 * BLOCK


@pytest.mark.parametrize(("code", "advice"), [(errno.ENOSPC, "free space there"), (errno.EIO, "see to the disk")])
def test_an_error_says_what_where_why_and_what_to_do(
    code: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DiskFile(tmp_path, BLOCK)
    file.reserve(BLOCK)

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", fails)
        with pytest.raises(DiskError) as error:
            file.write(0, aligned(BLOCK))
    for part in ("to write 4KiB", str(tmp_path), os.strerror(code), advice, "Parameters and optimizer state are"):
        assert part in str(error.value)
    file.write(0, aligned(BLOCK))


def test_a_directory_that_is_missing_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"in .*/nowhere, found: No such file or directory; make the directory"):
        DiskFile(tmp_path / "nowhere", BLOCK).reserve(BLOCK)
    plain = tmp_path / "file"
    plain.touch()
    with pytest.raises(DiskError, match="Not a directory"):
        DiskFile(plain, BLOCK).reserve(BLOCK)
    # Root writes wherever it likes, but not into /proc.
    with pytest.raises(DiskError, match="/proc"):
        DiskFile(Path("/proc"), BLOCK).reserve(BLOCK)


def test_a_killed_process_leaves_no_file_and_no_blocks(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from shardwright.runtime.disk_file import DiskFile
        file = DiskFile(Path(sys.argv[1]), 1 << 26)
        file.reserve(1 << 26)
        print(file._descriptor, flush=True)
        time.sleep(60)
    """)
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    descriptor = child.stdout.readline().strip()
    held = os.stat(f"/proc/{child.pid}/fd/{descriptor}")
    assert held.st_blocks * 512 >= 1 << 26 and held.st_nlink == 0
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    child.stdout.close()
    assert child.returncode == -signal.SIGKILL and list(tmp_path.iterdir()) == []
