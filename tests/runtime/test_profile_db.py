"""The price database keeps answers, survives several writers, and refuses files it cannot trust."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.ir import ShardwrightError
from shardwright.runtime.profile_db import Price, ProfileDb, Source, Where, default_path

HERE = Where("a processor", "2.13.0", 1)


def price(question: str, seconds: float) -> Price:
    return Price("op", "aten.mm.default", question, seconds)


def test_answers_outlive_the_process_that_wrote_them(tmp_path: Path) -> None:
    with ProfileDb(tmp_path / "deep" / "p.sqlite") as database:
        database.record(HERE, [price("a", 1.0), Price("op", "x", "b", 2.0, Source.ESTIMATED, "no time")])
    with ProfileDb(tmp_path / "deep" / "p.sqlite") as database:
        found = database.load(HERE)
    assert found == (price("a", 1.0), Price("op", "x", "b", 2.0, Source.ESTIMATED, "no time"))


def test_the_first_answer_stays_unless_replaced(tmp_path: Path) -> None:
    with ProfileDb(tmp_path / "p.sqlite") as database:
        database.record(HERE, [price("a", 1.0)])
        assert database.record(HERE, [price("a", 9.0)]) == (price("a", 1.0),)
        assert database.record(HERE, [price("a", 9.0)], replace=True) == (price("a", 9.0),)


@pytest.mark.parametrize("other", [Where("another", "2.13.0", 1), Where("a processor", "2.14.0", 1),
                                   Where("a processor", "2.13.0", 2)])  # fmt: skip
def test_a_price_holds_only_for_its_device_version_and_threads(tmp_path: Path, other: Where) -> None:
    with ProfileDb(tmp_path / "p.sqlite") as database:
        database.record(HERE, [price("a", 1.0)])
        assert database.load(other) == ()


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    path.write_bytes(b"not a database at all, but long enough to be looked at" * 50)
    with pytest.raises(ShardwrightError, match="p.sqlite.*delete the file"):
        ProfileDb(path)
    assert path.read_bytes().startswith(b"not a database"), "the file must be left as it was"


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    ProfileDb(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with pytest.raises(ShardwrightError, match="found format 99.*update shardwright"):
        ProfileDb(path)


def test_another_program_s_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE theirs (x)")
    raw.close()
    with pytest.raises(ShardwrightError, match="another SQLite file"):
        ProfileDb(path)


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ShardwrightError, match="another path"):
        ProfileDb(tmp_path / "file" / "p.sqlite")


def test_the_default_is_in_the_user_cache() -> None:
    assert default_path().name == "prices.sqlite" and "shardwright" in default_path().parts


WRITER = """
import sys
from pathlib import Path
from shardwright.runtime.profile_db import Price, ProfileDb, Where
with ProfileDb(Path(sys.argv[1])) as database:
    for i in range(150):
        database.record(Where("d", "t", 1), [Price("op", "mm", f"shared {i}", float(sys.argv[2])),
                                             Price("op", "mm", f"own {sys.argv[2]} {i}", 1.0)])
"""


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_two_processes_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    """Both write 150 own and 150 shared answers: all are there, each shared one whole and from one of them."""
    path = tmp_path / "p.sqlite"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(n)]) for n in (1, 2)]
    try:
        codes = [writer.wait(timeout=50) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert codes == [0, 0]
    with ProfileDb(path) as database:
        found = database.load(Where("d", "t", 1))
    assert len(found) == 450
    assert {p.seconds for p in found if p.question.startswith("shared")} <= {1.0, 2.0}
