"""Text of a tensor type to the type: the inverse of `str(TensorType)`."""

import re
from typing import Final

from shardwright.ir.errors import TextError
from shardwright.ir.names import closest
from shardwright.ir.types import DTYPE_BYTES, TensorType

__all__ = ["parse_type"]

_TYPE: Final = re.compile(r"(\w+)\[([0-9, ]*)\](?:\{([0-9, ]*)\})?")


def parse_type(text: str) -> TensorType:
    """`f32[2, 3]{1, 2}` to a type. Raises TextError.

    >>> parse_type("f32[2, 3]{1, 2}").strides
    (1, 2)
    """
    match = _TYPE.fullmatch(text)
    if match is None:
        raise TextError(f"expected a type such as f32[8, 4] or f32[8, 4]{{1, 8}}, found {text!r}")
    dtype, shape, strides = match.groups()
    if dtype not in DTYPE_BYTES:
        raise TextError(f"expected a dtype of {', '.join(DTYPE_BYTES)}, found {dtype!r}{closest(dtype, DTYPE_BYTES)}")
    sizes = _integers(shape, text)
    steps = None if strides is None else _integers(strides, text)
    if steps is not None and len(steps) != len(sizes):
        raise TextError(f"expected as many strides as dims, found {len(steps)} for {len(sizes)} in {text!r}")
    return TensorType(dtype, sizes, steps)


def _integers(text: str, whole: str) -> tuple[int, ...]:
    if not text.strip():
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and len(part) < 20 for part in parts):
        raise TextError(f"expected whole numbers separated by commas, found {whole!r}")
    return tuple(int(part) for part in parts)
