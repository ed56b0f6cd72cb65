"""What a tensor is: dtype, shape and, where it is not row-major, strides (in elements)."""

import math
from dataclasses import dataclass

__all__ = ["DTYPE_BYTES", "TensorType", "contiguous_strides", "num_bytes"]

DTYPE_BYTES: dict[str, int] = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8e4m3": 1, "f8e5m2": 1,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1, "c64": 8,
}  # fmt: skip
"""Bytes of one element, by the short name that graph text uses."""


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, as torch computes them (a dim of size 0 counts as 1).

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class TensorType:
    """A tensor's dtype, shape and memory layout.

    >>> str(TensorType("f32", (2, 3)))
    'f32[2, 3]'
    >>> str(TensorType("f32", (2, 3), (1, 2)))
    'f32[2, 3]{1, 2}'
    """

    dtype: str
    """Short name, a key of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In elements; None means row-major."""

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> "TensorType":
        """Build with row-major strides normalised to None; strides of dims of size 1 do not matter."""
        dense = contiguous_strides(shape)
        same = all(size <= 1 or a == b for size, a, b in zip(shape, strides, dense, strict=True))
        return cls(dtype, shape, None if same else strides)

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense storage of this type; an expanded view has fewer, which its root knows."""
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def storage_bytes(self) -> int:
        """Bytes from its first to its last element: what an operator allocates for such a result.

        >>> TensorType("f32", (2, 3), (4, 1)).storage_bytes, TensorType("f32", (2, 3), (0, 1)).storage_bytes
        (28, 12)
        """
        if self.strides is None or not self.num_elements:
            return self.num_bytes
        steps = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (1 + steps) * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        shape = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return shape if self.strides is None else f"{shape}{{{', '.join(map(str, self.strides))}}}"


def num_bytes(types: "tuple[TensorType, ...] | list[TensorType]") -> int:
    """Total of `TensorType.num_bytes`."""
    return sum(t.num_bytes for t in types)
