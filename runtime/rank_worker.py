"""What a rank started by `rank_pool` does: join the gloo group, then run what comes down the pipe until it closes.

Started as `python -m shardwright.runtime.rank_worker FD RANK SIZE PORT`. A watching thread ends the process when its
parent is gone, so that a rank waiting in a collective does not outlive it.
"""

import importlib
import importlib.util
import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from shardwright.ir import ShardwrightError, TargetError

__all__ = ["Failure", "Job", "Reply", "main"]


@dataclass(frozen=True, slots=True)
class Job:
    """A function by where it can be imported from."""

    module: str
    file: str
    """Read when the module cannot be imported by name: scripts, and tests that pytest imports from their files."""
    name: str

    @classmethod
    def of(cls, function: Callable[..., object]) -> "Job":
        if "<" in function.__qualname__:
            raise TargetError(
                f"expected a function of a module, found {function.__qualname__}; move it to the top level"
            )
        file = getattr(sys.modules.get(function.__module__), "__file__", None) or ""
        return cls(function.__module__, os.path.abspath(file) if file else "", function.__qualname__)

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Job":
        return cls(**json.loads(data))

    def load(self) -> Callable[..., object]:
        found: object = self._module()
        for part in self.name.split("."):
            found = getattr(found, part)
        if not callable(found):
            raise TargetError(f"expected a function {self.module}.{self.name}, found {type(found).__name__}")
        return found

    def _module(self) -> object:
        if self.module != "__main__":
            try:
                return importlib.import_module(self.module)
            except ModuleNotFoundError:
                if not self.file:
                    raise
        # Not under the name __main__, or the script's own guard would run it; pickles by that name still find it.
        name = "__shardwright_main__" if self.module == "__main__" else self.module
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.file)
            if spec is None or spec.loader is None:
                raise TargetError(f"expected a Python file, found {self.file}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            if self.module == "__main__":
                sys.modules["__main__"] = module
        return sys.modules[name]


@dataclass(frozen=True, slots=True)
class Reply:
    payload: bytes
    """The pickled result."""


@dataclass(frozen=True, slots=True)
class Failure:
    error: str
    """Name of the class where it is one of ours, otherwise empty."""
    message: str
    traceback: str
    died: bool = False


def _answer(job: bytes, payload: bytes) -> Reply | Failure:
    try:
        function = Job.decode(job).load()
        return Reply(pickle.dumps(function(*pickle.loads(payload))))
    except Exception as error:  # whatever the function raises goes to the parent, which raises it
        ours = type(error).__name__ if isinstance(error, ShardwrightError) else ""
        message = str(error) if ours else f"{type(error).__name__}: {error}"
        return Failure(ours, message, traceback.format_exc())


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(descriptor: int, rank: int, size: int, port: int) -> None:
    """Serve the pipe until the parent closes it."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    pipe = Connection(descriptor)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            job, payload = pipe.recv_bytes(), pipe.recv_bytes()
        except EOFError:
            break
        pipe.send_bytes(pickle.dumps(_answer(job, payload)))
    os._exit(0)  # no farewell in the group: the others may be gone already


if __name__ == "__main__":
    # The classes sent back must be those of the importable module, not of __main__.
    from shardwright.runtime.rank_worker import main as run

    run(*(int(argument) for argument in sys.argv[1:]))
