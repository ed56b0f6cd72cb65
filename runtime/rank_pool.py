"""Gloo ranks as processes of this machine: started once, given functions to run, and gone afterwards, whatever happens.

Functions go by module and name, arguments and results by pickle over pipes; nothing is written to disk. When a rank
fails, the others have a few seconds to come to an end too (most errors are raised on all ranks); those that do not
are killed with the rest, and the next run starts afresh.
"""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from types import TracebackType
from typing import Self, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from shardwright.ir import ShardwrightError
from shardwright.runtime.rank_worker import Failure, Job, Reply

__all__ = ["RankError", "RankPool", "run_ranks"]

T = TypeVar("T")


class RankError(ShardwrightError):
    """A rank raised, died, or took too long; the message has its number and traceback."""


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: Connection


@dataclass
class RankPool:
    """`num_ranks` processes in one gloo group. A context manager; `close` ends them."""

    num_ranks: int
    grace_seconds: float = 5.0
    """How long the other ranks may go on after one has failed."""
    _ranks: list[_Rank] = field(default_factory=list, init=False, repr=False)
    _store: TCPStore | None = field(default=None, init=False, repr=False)

    def run(self, function: Callable[..., T], *args: object, timeout_seconds: float = 60.0) -> list[T]:
        """`function(*args)` on every rank; the results by rank.

        Raises the first rank's own error where it is one of ours, RankError otherwise and after the time limit.
        """
        if not self._ranks:
            self._start()
        job = Job.of(function).encode()
        payload = pickle.dumps(args)
        for rank in self._ranks:
            rank.pipe.send_bytes(job)
            rank.pipe.send_bytes(payload)
        replies = self._collect(timeout_seconds)
        failures = {number: reply for number, reply in replies.items() if isinstance(reply, Failure)}
        if len(replies) < self.num_ranks or any(failure.died for failure in failures.values()):
            self.close()
        if failures:
            raise _error(failures)
        if len(replies) < self.num_ranks:
            silent = ", ".join(str(n) for n in range(self.num_ranks) if n not in replies)
            raise RankError(f"expected {function.__name__} to end within {timeout_seconds} s, rank {silent} did not")
        return [pickle.loads(replies[n].payload) for n in range(self.num_ranks)]  # type: ignore[union-attr]

    def _collect(self, timeout_seconds: float) -> dict[int, Reply | Failure]:
        replies: dict[int, Reply | Failure] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(replies) < self.num_ranks and (left := deadline - time.monotonic()) > 0:
            numbers = {self._ranks[n].pipe: n for n in range(self.num_ranks) if n not in replies}
            for pipe in wait(list(numbers), left):
                number = numbers[pipe]  # type: ignore[index]
                replies[number] = self._receive(number)
                if isinstance(replies[number], Failure):
                    deadline = min(deadline, time.monotonic() + self.grace_seconds)
        return replies

    def _receive(self, number: int) -> Reply | Failure:
        rank = self._ranks[number]
        try:
            reply = pickle.loads(rank.pipe.recv_bytes())
        except (EOFError, OSError):
            code = rank.process.wait()
            return Failure("", f"the process ended with exit status {code}", "", died=True)
        if not isinstance(reply, Reply | Failure):
            return Failure("", f"expected a reply, found {type(reply).__name__}", "", died=True)
        return reply

    def _start(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        for number in range(self.num_ranks):
            self._ranks.append(self._start_rank(number, self._store.port))

    def _start_rank(self, number: int, port: int) -> _Rank:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "shardwright.runtime.rank_worker"]
        command += [str(theirs.fileno()), str(number), str(self.num_ranks), str(port)]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "LOCAL_RANK": str(number)}
        process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(),))
        theirs.close()
        return _Rank(process, ours)

    def close(self) -> None:
        """Kill every rank that is still there and wait for it."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.pipe.close()
        self._ranks.clear()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _error(failures: dict[int, Failure]) -> ShardwrightError:
    """The error to raise: one of ours, else of a rank that died (others then lose their connection), else the
    first that came in."""
    number = min(failures, key=lambda n: (not failures[n].error, not failures[n].died))
    failure = failures[number]
    text = f"rank {number}: {failure.message}"
    kinds = {kind.__name__: kind for kind in _subclasses(ShardwrightError)}
    if failure.error in kinds:  # the user's to mend: the message says what and where
        return kinds[failure.error](text)
    return RankError(f"{text}\n\n{failure.traceback}" if failure.traceback else text)


def _subclasses(kind: type[ShardwrightError]) -> list[type[ShardwrightError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _subclasses(child))]


def run_ranks(num_ranks: int, function: Callable[..., T], *args: object, timeout_seconds: float = 60.0) -> list[T]:
    """`function(*args)` on `num_ranks` fresh gloo ranks; the results by rank. No process is left behind."""
    with RankPool(num_ranks) as pool:
        return pool.run(function, *args, timeout_seconds=timeout_seconds)
