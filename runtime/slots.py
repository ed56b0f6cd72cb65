"""Places in a file: runs of bytes that are taken and given back. Knows no file.

First fit; free runs that touch are one. A training step takes all its places in forward and gives all back in backward,
so the next one finds a single run again.
"""

from bisect import insort

__all__ = ["Slots"]

Run = tuple[int, int]
"""Where it begins, and where it ends."""


class Slots:
    """The bytes from 0 to `size`, in use or free."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[Run] = []
        """Ascending, none empty, no two touching."""

    @property
    def free_bytes(self) -> int:
        return sum(end - begin for begin, end in self._free)

    @property
    def used_bytes(self) -> int:
        return self.size - self.free_bytes

    def take(self, num_bytes: int) -> int | None:
        """Where a free run of that many bytes begins, now in use; None where there is none.

        >>> slots = Slots()
        >>> slots.take(4), slots.grow(8), slots.take(4), slots.take(4), slots.take(4)
        (None, None, 0, 4, None)
        """
        for position, (begin, end) in enumerate(self._free):
            if end - begin >= num_bytes:
                rest = [(begin + num_bytes, end)] if end - begin > num_bytes else []
                self._free[position : position + 1] = rest
                return begin
        return None

    def give(self, begin: int, num_bytes: int) -> None:
        """Give back what `take` gave."""
        insort(self._free, (begin, begin + num_bytes))
        joined: list[Run] = []
        for start, end in self._free:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self._free = joined

    def missing(self, num_bytes: int) -> int:
        """How much the end must move for `take` to find that many bytes there."""
        at_end = next((end - begin for begin, end in reversed(self._free) if end == self.size), 0)
        return max(0, num_bytes - at_end)

    def grow(self, num_bytes: int) -> None:
        """Move the end; the new bytes are free."""
        self.size += num_bytes
        self.give(self.size - num_bytes, num_bytes)
