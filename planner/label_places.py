"""Where labels of a picture go: beside their marks, off everything else.

Units are pixels, y grows downward. Greedy: each label in turn takes the place that covers least of what is there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["Box", "Label", "Place", "place_labels", "text_width"]

LINE_PIXELS: Final = 14.0
LETTER_PIXELS: Final = 6.9
"""Of a sans-serif letter at 12 pixels, on average and a little more."""
MARGIN: Final = 10.0
"""From a mark's middle to its label."""
OUTSIDE: Final = 20.0
"""Price of a square pixel beyond the frame, beside one that covers something."""


@dataclass(frozen=True, slots=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float

    def shared_area(self, other: "Box") -> float:
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


@dataclass(frozen=True, slots=True)
class Label:
    """A text for a mark at (x, y)."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """A label's box; `is_far` asks for a line to its mark."""

    label: Label
    box: Box
    is_far: bool


def text_width(text: str) -> float:
    return LETTER_PIXELS * len(text)


def place_labels(labels: Sequence[Label], obstacles: Iterable[Box], frame: Box) -> list[Place]:
    """In the order given: earlier labels get the better places."""
    taken = list(obstacles)
    places = []
    for label in labels:
        options = list(_options(label))
        prices = [_price(place, number, taken, frame) for number, place in enumerate(options)]
        chosen = options[prices.index(min(prices))]
        taken.append(chosen.box)
        places.append(chosen)
    return places


def _price(place: Place, number: int, taken: Sequence[Box], frame: Box) -> float:
    """Square pixels; of equal ones the nearer place, then the earlier."""
    covered = sum(place.box.shared_area(other) for other in taken)
    outside = place.box.area - place.box.shared_area(frame)
    return covered + OUTSIDE * outside + number


def _options(label: Label) -> Iterator[Place]:
    """Above, right, below, left and between, nearest first."""
    width = text_width(label.text)
    for ring in range(6):
        away = MARGIN + ring * LINE_PIXELS
        for side, up in ((0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1), (-1, 0), (-1, 1)):
            slant = 0.7 if side and up else 1.0
            middle = label.x + side * (away * slant + width / 2)
            line = label.y - up * (away * slant + LINE_PIXELS / 2)
            box = Box(middle - width / 2, line - LINE_PIXELS / 2, middle + width / 2, line + LINE_PIXELS / 2)
            yield Place(label, box, ring > 0)
