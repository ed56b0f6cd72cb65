"""The database of measured prices: seconds by question, device and versions, in one SQLite file.

Needs a path (default: the user's cache folder). Several processes may write at once; the first answer to a question
stays, so that the same database gives the same plans. Holds numbers and text only: opening one runs nothing.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Final

import platformdirs

from shardwright.ir import ShardwrightError

__all__ = ["FORMAT_VERSION", "Price", "ProfileDb", "Source", "Where", "default_path"]

FORMAT_VERSION: Final = 1
_APPLICATION_ID: Final = 0x53_57_50_42
"""Marks the file as ours: SWPB."""
_BUSY_SECONDS: Final = 30.0
"""How long a writer waits for another one."""

_SCHEMA: Final = """
CREATE TABLE prices (
  kind TEXT NOT NULL,
  op TEXT NOT NULL,
  question TEXT NOT NULL,
  device TEXT NOT NULL,
  torch TEXT NOT NULL,
  threads INTEGER NOT NULL,
  seconds REAL NOT NULL,
  source TEXT NOT NULL,
  note TEXT NOT NULL,
  PRIMARY KEY (kind, op, question, device, torch, threads)
) WITHOUT ROWID
"""


class Source(StrEnum):
    MEASURED = "measured"
    ESTIMATED = "estimated"
    """By the analytical model: there was no time, or the operator failed; the note says which."""


@dataclass(frozen=True, slots=True)
class Where:
    """What a price holds for."""

    device: str
    """Name of the accelerator or processor."""
    torch: str
    """Version."""
    threads: int


@dataclass(frozen=True, slots=True)
class Price:
    """One answer."""

    kind: str
    """`op`, `link`, `disk`, `calibration`."""
    op: str
    """Operator or collective."""
    question: str
    """Types (with dtypes) and arguments as text."""
    seconds: float
    source: Source = Source.MEASURED
    note: str = ""


def default_path() -> Path:
    """`prices.sqlite` in the user's cache folder."""
    return Path(platformdirs.user_cache_dir("shardwright", appauthor=False)) / "prices.sqlite"


class ProfileDb:
    """An open database; a context manager. Raises ShardwrightError for a file that is not ours, newer or damaged."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path
        with self._clear_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            with self._clear_errors():
                self._prepare()
        except ShardwrightError:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        with self._writing():
            version = int(self._pragma("user_version"))
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and tables == 0:
                self._connection.execute(_SCHEMA)
                self._connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                self._connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                return
        found = int(self._pragma("application_id"))
        if found != _APPLICATION_ID:
            raise ShardwrightError(f"expected a price database, found another SQLite file: {self.path}; "
                                   "give a path of its own")  # fmt: skip
        if version != FORMAT_VERSION:
            raise ShardwrightError(
                f"expected a price database of format {FORMAT_VERSION}, found format {version}: {self.path}; "
                "update shardwright, or delete the file: prices are then measured again"
            )

    def _pragma(self, name: str) -> int:
        value: int = self._connection.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    def load(self, where: Where) -> tuple[Price, ...]:
        """Everything known about a device, ordered by question."""
        with self._clear_errors():
            rows = self._connection.execute(
                "SELECT kind, op, question, seconds, source, note FROM prices"
                " WHERE device = ? AND torch = ? AND threads = ? ORDER BY kind, op, question",
                (where.device, where.torch, where.threads),
            ).fetchall()
        return tuple(Price(kind, op, text, seconds, Source(src), note) for kind, op, text, seconds, src, note in rows)

    def record(self, where: Where, prices: Iterable[Price], replace: bool = False) -> tuple[Price, ...]:
        """Write answers in one transaction and give back those that hold: the first one written of each question.

        With `replace` the new ones hold.
        """
        given = tuple(prices)
        verb = "INSERT OR REPLACE" if replace else "INSERT OR IGNORE"
        with self._clear_errors(), self._writing():
            self._connection.executemany(
                f"{verb} INTO prices VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (p.kind, p.op, p.question, where.device, where.torch, where.threads, p.seconds, p.source, p.note)
                    for p in given
                ],
            )
            return tuple(self._holding(where, price) for price in given)

    def count(self) -> int:
        """Prices of all devices and versions together."""
        with self._clear_errors():
            number: int = self._connection.execute("SELECT count(*) FROM prices").fetchone()[0]
        return number

    def _holding(self, where: Where, price: Price) -> Price:
        seconds, source, note = self._connection.execute(
            "SELECT seconds, source, note FROM prices WHERE kind = ? AND op = ? AND question = ?"
            " AND device = ? AND torch = ? AND threads = ?",
            (price.kind, price.op, price.question, where.device, where.torch, where.threads),
        ).fetchone()
        return Price(price.kind, price.op, price.question, seconds, Source(source), note)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A write transaction taken at once, so that two writers wait for each other instead of failing."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ShardwrightError(
                f"expected a readable and writable price database, found {self.path}: {error}; "
                "delete the file (prices are then measured again) or give another path"
            ) from error

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "ProfileDb":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
