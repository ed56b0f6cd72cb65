"""TARGET of the command line: `file.py:function`, `package.module:function` or `hf:CONFIG.json`.

The function takes nothing and returns (module, args) or (module, args, kwargs) with global shapes; if it takes `batch`
and `seq`, they are handed on. Importing a target runs the user's code: only commands that say so do it.
"""

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from shardwright.ir import TargetError
from shardwright.runtime.hf import hf_target
from shardwright.runtime.trees import map_leaves

__all__ = ["Target", "load_target"]

_FORMS = "file.py:function, package.module:function or hf:CONFIG.json"
_RETURNS = "(module, args) or (module, args, kwargs) with args a tuple and kwargs a dict"


@dataclass(frozen=True)
class Target:
    """What to train, and on which inputs."""

    module: nn.Module
    args: tuple[object, ...]
    """Global batch."""
    kwargs: dict[str, object]
    name: str
    """As given on the command line."""


def load_target(
    text: str, batch: int | None = None, seq: int | None = None, dtype: torch.dtype | None = None
) -> Target:
    """Import and build. `batch` (global sequences a step) and `seq` are for `hf:` and for functions that take them;
    `dtype` converts floating parameters, buffers and inputs. Raises TargetError."""
    if text.startswith("hf:"):
        if batch is None or seq is None:
            raise TargetError(f"expected --batch and --seq with {text}, found {_given(batch, seq)}. Give both")
        return Target(*hf_target(text.removeprefix("hf:"), batch, seq, dtype), text)
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise TargetError(f"expected {_FORMS}, found {text!r}")
    function = _function(_imported(place, text), name, text)
    module, args, kwargs = _checked(_called(function, batch, seq, text), text)
    if dtype is not None:
        module = module.to(dtype)
        args = tuple(_converted(item, dtype) for item in args)
        kwargs = {name: _converted(item, dtype) for name, item in kwargs.items()}
    return Target(module, args, kwargs, text)


def _given(batch: int | None, seq: int | None) -> str:
    given = [f"--{name} {value}" for name, value in (("batch", batch), ("seq", seq)) if value is not None]
    return ", ".join(given) or "neither"


def _imported(place: str, text: str) -> ModuleType:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    except TargetError:
        raise
    except (Exception, SystemExit) as error:
        raise TargetError(f"expected {place} to import, found {_raised(error)}. Mend it, then run again") from None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"expected a Python file, found nothing at {path}")
    path = path.resolve()
    name = f"shardwright_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"expected a Python file, found {path}")
    module = importlib.util.module_from_spec(spec)
    # As if it were run: its neighbours can be imported, and classes in it can be found again by name.
    _on_path(str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_package(name: str) -> ModuleType:
    _on_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise TargetError(f"expected {_FORMS}, found no module {name!r} from {os.getcwd()}") from None


def _on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _function(module: ModuleType, name: str, text: str) -> Callable[..., object]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    public = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    found = "no such name" if function is None else f"a {type(function).__name__}"
    raise TargetError(f"expected a function {name} in {text}, found {found}. There are: {', '.join(public) or 'none'}")


def _called(function: Callable[..., object], batch: int | None, seq: int | None, text: str) -> object:
    parameters = inspect.signature(function).parameters
    wanted = {name: value for name, value in (("batch", batch), ("seq", seq)) if value is not None}
    surplus = [f"--{name}" for name in wanted if name not in parameters]
    if surplus:
        raise TargetError(
            f"expected {text} to take {', '.join(surplus)}, found a function of ({', '.join(parameters)}). "
            "Leave the option out, or add the parameter"
        )
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in rest and n not in wanted]
    if missing:
        raise TargetError(f"expected a function that needs no arguments, found {text} which needs {', '.join(missing)}")
    try:
        return function(**wanted)
    except (Exception, SystemExit) as error:
        raise TargetError(f"expected {text} to return {_RETURNS}, found {_raised(error)}") from None


def _raised(error: BaseException) -> str:
    """`ValueError: no data at train.py:12`; the line in the user's own file where there is one."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    frames = [f for f in frames if f.filename != __file__ and not f.filename.endswith("runtime/target.py")]
    own = [f for f in frames if "site-packages" not in f.filename and f"{os.sep}lib{os.sep}python" not in f.filename]
    place = (own or frames)[-1:]
    where = f" at {place[0].filename}:{place[0].lineno}" if place else ""
    return f"{type(error).__name__}: {error}{where}"


def _checked(result: object, text: str) -> tuple[nn.Module, tuple[object, ...], dict[str, object]]:
    parts = result if isinstance(result, tuple) else (result,)
    module, args, kwargs = (*parts, *(None, (), {})[len(parts) :]) if len(parts) <= 3 else (None, (), {})
    kinds = ", ".join(type(part).__name__ for part in parts)
    if not 2 <= len(parts) <= 3 or not isinstance(module, nn.Module):
        raise TargetError(f"expected {text} to return {_RETURNS}, found ({kinds})")
    if not isinstance(args, tuple | list) or not isinstance(kwargs, dict):
        raise TargetError(f"expected {text} to return {_RETURNS}, found ({kinds}). Write (x,) for a single input")
    return module, tuple(args), dict(kwargs)


def _converted(tree: object, dtype: torch.dtype) -> object:
    """Floating tensors in the dtype, whatever they are nested in."""
    return map_leaves(tree, lambda _, leaf: leaf.to(dtype) if _is_floating(leaf) else leaf)  # type: ignore[attr-defined]


def _is_floating(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
