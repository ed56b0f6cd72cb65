"""Limits on the peak of a program, one after the other, until the plan that it finds takes what there is.

The rows of a program are close to replay but not equal to it: under a limit its plan may exceed the budget, or leave
some of it. The next limit is moved by what was too much or too little, then halfway between the nearest on both sides.
"""

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["ROOM", "Limits"]

ROOM: Final = 0.003
"""A plan that leaves more of the budget than this is worth another limit."""


@dataclass
class Limits:
    """In the unit of the program's peak."""

    now: float
    fitted: float = 0.0
    """The largest under which the plan fitted."""
    exceeded: float = math.inf
    """The smallest under which it did not."""

    def move(self, peak: float, room: float) -> bool:
        """To the next limit, from the `peak` of the program's solution and the room that its plan left, or lacked when
        negative. Says whether there is one."""
        if room >= 0:
            self.fitted = self.now
            self.now = self.now + room
        else:
            self.exceeded = min(self.now, peak)
            self.now = self.exceeded + room
        if not self.fitted < self.now < self.exceeded:
            self.now = (self.fitted + self.exceeded) / 2
        return self.now > 0 and self.exceeded - self.fitted > ROOM * self.now
