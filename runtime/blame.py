"""An exception from inside a model, told as a CaptureError: which module, which line, what to do. Never a traceback."""

import inspect
import os
import traceback

import torch
from torch import nn

from shardwright.ir import CaptureError
from shardwright.runtime.compat import DataDependentOutputException, DynamicOutputShapeException, TorchDynamoException

__all__ = ["blame", "place_of_forward"]

_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

_ADVICE_DATA = (
    "A step must run the same operators for every batch: replace .item(), bool(tensor) and branches on values by "
    "tensor operators such as torch.where, or move them out of forward"
)
_ADVICE_SIZE = (
    "Sizes must not depend on values: replace nonzero, masked_select, unique and indexing by a mask with a fixed-size "
    "form, such as torch.where or multiplying by the mask"
)
_ADVICE_TRACE = (
    "Rewrite that line with tensor operators and plain Python, or move it out of forward (printing, logging, "
    "files, other libraries)"
)
_ADVICE_OTHER = "The model itself raised this, on inputs of the given shapes: check the example inputs and the model"


def blame(error: Exception, module: nn.Module) -> CaptureError:
    """What to raise instead of `error`, which came from running or tracing `module`."""
    if isinstance(error, CaptureError):
        return error
    where = _place(error, module)
    found = _first_line(error)
    cause = _root(error)
    if isinstance(cause, DataDependentOutputException):
        return CaptureError(f"expected no use of a tensor's value in Python, found {found} {where}. {_ADVICE_DATA}")
    if isinstance(cause, DynamicOutputShapeException):
        return CaptureError(f"expected sizes known before the step, found {found} {where}. {_ADVICE_SIZE}")
    if isinstance(error, TorchDynamoException):
        return CaptureError(f"expected code that can be traced, found: {found} {where}. {_ADVICE_TRACE}")
    return CaptureError(f"expected forward to run, found {type(error).__name__}: {found} {where}. {_ADVICE_OTHER}")


def place_of_forward(module: nn.Module) -> str:
    """`Net.forward at net.py:12`."""
    kind = type(module)
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return f"{kind.__name__}.forward" + (f" at {code.co_filename}:{code.co_firstlineno}" if code else "")


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_line(error: Exception) -> str:
    """The first line that says something; dynamo's own advice follows after it."""
    lines: list[str] = [line.strip() for line in str(error).splitlines() if line.strip()]
    first: str = lines[0] if lines else type(error).__name__
    return first


def _place(error: Exception, module: nn.Module) -> str:
    frames = _user_frames(error, module)
    if not frames:
        return "at an unknown line"
    path, file, line = frames[-1]
    return f"in module {path or '(top)'} at {file}:{line}"


def _user_frames(error: Exception, module: nn.Module) -> list[tuple[str, str, int]]:
    """(module path, file, line) of frames outside torch, outermost first; from dynamo's own stack where it has one."""
    names = {id(m): name for name, m in module.named_modules()}
    found: list[tuple[str, str, int]] = []
    path = ""
    dynamo: traceback.StackSummary | None = getattr(error, "real_stack", None)
    if dynamo:
        frames = [(f.filename, f.lineno or 0) for f in dynamo if not f.filename.startswith(_OWN)]
        for file, line in frames:
            path = _module_at(module, file, line) or path
            found.append((path, file, line))
        return found
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = names.get(id(frame.f_locals.get("self")), path)
        file = frame.f_code.co_filename
        if not file.startswith(_OWN):
            found.append((path, file, line))
    return found


def _module_at(module: nn.Module, file: str, line: int) -> str:
    """The first submodule whose forward holds that line."""
    for name, candidate in module.named_modules():
        code = getattr(inspect.unwrap(type(candidate).forward), "__code__", None)
        if code is None or code.co_filename != file:
            continue
        lines = [number for _, _, number in code.co_lines() if number is not None]
        if lines and min(lines) <= line <= max(lines):
            return str(name)
    return ""
