"""The study of one model as a picture: step time over the budget, a line for every way to plan. One SVG, no script."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from shardwright.planner.axis import SECONDS, SIZES, Axis

if TYPE_CHECKING:
    from memory_study import Entry, Point

__all__ = ["study_svg"]

WIDTH, HEIGHT = 860, 520
LEFT, RIGHT, TOP, BOTTOM = 78, 28, 66, 112
LEGEND_COLUMNS: Final = 4
CEILING: Final = 1.6
"""Steps longer than this times the joint plan's longest are triangles at the upper edge."""
TRIANGLE: Final = 9
"""Pixels from one to the next."""
COLOURS: Final = ("#0969da", "#bc4c00", "#d4a72c", "#8250df", "#1a7f37", "#57606a", "#cf222e", "#bf3989")
STYLE: Final = """
text { font: 12px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #24292f }
.title { font-size: 14px; font-weight: 600 }
.paper { fill: #ffffff }
.grid { stroke: #d8dee4; stroke-width: 1 }
.frame { stroke: #57606a; stroke-width: 1; fill: none }
path.series { fill: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.paper { fill: #0d1117 }
.grid { stroke: #262c36 }
.frame { stroke: #9198a1 }
}
"""


@dataclass(frozen=True)
class _Picture:
    points: "Sequence[Point]"
    memory: Axis
    time: Axis

    @classmethod
    def of(cls, points: "Sequence[Point]") -> "_Picture":
        budgets = [point.budget_bytes for point in points]
        steps = [e.step_seconds for p in points for e in (p.joint, *p.rivals) if e.step_seconds is not None]
        joint = [p.joint.step_seconds for p in points if p.joint.step_seconds is not None]
        low, high = min(steps), min(max(steps), CEILING * max(joint, default=max(steps)))
        room, width = 0.06 * (high - low) or 0.06 * high, 0.06 * (max(budgets) - min(budgets))
        memory = Axis(min(budgets) - width, max(budgets) + width, LEFT, WIDTH - RIGHT, SIZES)
        return cls(points, memory, Axis(low - room, high + room, HEIGHT - BOTTOM, TOP, SECONDS))

    def runs(self, number: int) -> list[list[tuple[float, float]]]:
        """Pixels of one way to plan, broken where it has no plan, or a longer step than is shown."""
        found: list[list[tuple[float, float]]] = [[]]
        for point in self.points:
            seconds = self._entry(point, number).step_seconds
            if seconds is None or seconds > self.time.high:
                found.append([])
            else:
                found[-1].append((self.memory.pixel(point.budget_bytes), self.time.pixel(seconds)))
        return [run for run in found if run]

    def longer(self, number: int) -> list[float]:
        """Where, in pixels from the left, one way to plan has longer steps than are shown."""
        entries = [(point, self._entry(point, number).step_seconds) for point in self.points]
        return [self.memory.pixel(p.budget_bytes) for p, s in entries if s is not None and s > self.time.high]

    @staticmethod
    def _entry(point: "Point", number: int) -> "Entry":
        return (point.joint, *point.rivals)[number]


def study_svg(title: str, setting: str, points: "Sequence[Point]") -> str:
    """The text of the file; `setting`: what all points share, in a line below the title."""
    picture = _Picture.of(points)
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    root.set("width", str(WIDTH))
    root.set("height", str(HEIGHT))
    SubElement(root, "title").text = title
    SubElement(root, "style").text = STYLE
    SubElement(root, "rect", {"class": "paper", "width": str(WIDTH), "height": str(HEIGHT)})
    _text(root, LEFT, 24, title).set("class", "title")
    _text(root, LEFT, 44, f"{setting}; triangles: longer than shown")
    _axes(root, picture)
    names = [entry.name for entry in (points[0].joint, *points[0].rivals)]
    for number in reversed(range(len(names))):  # the joint plan on top
        _series(root, picture, number)
    for number, name in enumerate(names):
        _legend(root, number, name)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _axes(root: Element, picture: _Picture) -> None:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for tick in picture.memory.ticks(8):
        _line(root, "grid", ((tick.pixel, TOP), (tick.pixel, bottom)))
        _text(root, tick.pixel, bottom + 18, tick.label, "middle")
    for tick in picture.time.ticks(8):
        _line(root, "grid", ((LEFT, tick.pixel), (right, tick.pixel)))
        _text(root, LEFT - 8, tick.pixel + 4, tick.label, "end")
    _line(root, "frame", ((LEFT, TOP), (LEFT, bottom), (right, bottom)))
    _text(root, right, bottom + 38, f"budget of a rank, {picture.memory.unit}", "end")
    middle = (TOP + bottom) / 2
    upright = _text(root, 22, middle, f"step time by replay, {picture.time.unit}", "middle")
    upright.set("transform", f"rotate(-90 22 {middle:.1f})")


def _series(root: Element, picture: _Picture, number: int) -> None:
    colour, width = COLOURS[number % len(COLOURS)], "3" if number == 0 else "1.5"
    for run in picture.runs(number):
        _line(root, "series", run).attrib.update({"stroke": colour, "stroke-width": width})
        for x, y in run:
            size = "4.5" if number == 0 else "3"
            SubElement(root, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=size, fill=colour)
    for x in picture.longer(number):
        x += TRIANGLE * (number - len(COLOURS) + 1.5)  # side by side; the last two around the point
        corners = f"{x - 4:.1f},{TOP + 4} {x + 4:.1f},{TOP + 4} {x:.1f},{TOP - 4}"
        SubElement(root, "polygon", points=corners, fill=colour)


def _legend(root: Element, number: int, name: str) -> None:
    row, column = divmod(number, LEGEND_COLUMNS)
    x, y = LEFT + column * (WIDTH - LEFT - RIGHT) / LEGEND_COLUMNS, HEIGHT - 44 + 20 * row
    _line(root, "series", ((x, y - 4), (x + 20, y - 4))).attrib.update(
        {"stroke": COLOURS[number % len(COLOURS)], "stroke-width": "3" if number == 0 else "1.5"}
    )
    _text(root, x + 26, y, name)


def _line(root: Element, kind: str, corners: Iterable[tuple[float, float]]) -> Element:
    return SubElement(root, "path", {"class": kind, "d": "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)})


def _text(root: Element, x: float, y: float, text: str, anchor: str = "start") -> Element:
    element = SubElement(root, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor})
    element.text = text
    return element
