"""A curve as a picture: step time over the memory a plan needs, the baselines beside it. One SVG file, no script.

Needs a curve. The line is the best plan found for that much memory: it steps down where more memory lets a faster plan
in, and begins where nothing smaller is known to work. Readable on light and on dark: the file follows the viewer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from shardwright.ir import format_seconds, format_size
from shardwright.planner.axis import SECONDS, SIZES, Axis
from shardwright.planner.curve import Curve, Point, Rival
from shardwright.planner.curve_table import rival_notes
from shardwright.planner.label_places import Box, Label, Place, place_labels, text_width
from shardwright.planner.plan_header import inputs_text

__all__ = ["curve_svg"]

WIDTH, HEIGHT = 860, 540
LEFT, RIGHT, BOTTOM = 78, 28, 82
HEAD: Final = 66
"""Height of title and subtitle."""
BEGIN_LINE: Final = 16
SQUEEZE: Final = 0.8
"""Baselines further beyond the curve than this part of its end, and than its own length, are drawn at the frame."""
MARK: Final = 6.5
"""Half a baseline's diamond; a plan's circle is smaller, so that both are seen at one spot."""
MAX_TITLE_LETTERS, MAX_SUBTITLE_LETTERS = 68, 112
STYLE: Final = """
text { font: 12px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.quiet { fill: #57606a }
.paper { fill: #ffffff }
.grid { stroke: #d8dee4; stroke-width: 1 }
.frame { stroke: #57606a; stroke-width: 1; fill: none }
.never { fill: #eaeef2 }
.begin { stroke: #8250df; stroke-width: 1; stroke-dasharray: 4 3 }
.begins { fill: #8250df }
.lead { stroke: #8c959f; stroke-width: 1 }
.curve { stroke: #0969da; stroke-width: 2; fill: none }
.point circle { fill: #0969da; stroke: #ffffff; stroke-width: 1 }
.times { fill: #0969da }
.rival path, .sample { fill: #bc4c00; stroke: #ffffff; stroke-width: 1 }
.beyond path { fill: none; stroke: #bc4c00; stroke-width: 1.5 }
.names { fill: #953800 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.quiet { fill: #9198a1 }
.paper { fill: #0d1117 }
.grid { stroke: #262c36 }
.frame { stroke: #9198a1 }
.never { fill: #1c2128 }
.begin { stroke: #ab7df8 }
.begins { fill: #ab7df8 }
.lead { stroke: #6e7681 }
.curve { stroke: #58a6ff }
.point circle { fill: #58a6ff; stroke: #0d1117 }
.times { fill: #58a6ff }
.rival path, .sample { fill: #f0883e; stroke: #0d1117 }
.beyond path { fill: none; stroke: #f0883e }
.names { fill: #f0883e }
}
"""


def curve_svg(curve: Curve) -> str:
    """The text of the file."""
    picture = _Picture.of(curve)
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    root.set("width", str(WIDTH))
    root.set("height", str(HEIGHT))
    SubElement(root, "title").text = _title(curve)
    SubElement(root, "style").text = STYLE
    _rect(root, "paper", Box(0, 0, WIDTH, HEIGHT))
    _head(root, curve)
    _axes(root, picture)
    _begins(root, picture)
    SubElement(root, "path", {"class": "curve", "d": _path(picture.corners())})
    places = picture.places()
    for place in places:
        if place.is_far:
            _line(root, "lead", place.label.x, place.label.y, *_nearest(place))
    for rival in picture.rivals:
        _rival(root, picture, rival)
    for point in curve.points:
        _point(root, picture, point)
    for place in places:
        middle = (place.box.left + place.box.right) / 2
        kind = "times" if place.label.text.endswith("x") else "names"
        _text(root, kind, middle, place.box.bottom - 3.5, place.label.text, "middle")
    _legend(root, picture)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


@dataclass(frozen=True)
class _Picture:
    """A curve with axes to draw it on."""

    curve: Curve
    rivals: tuple[Rival, ...]
    """Those that have figures."""
    memory: Axis
    time: Axis

    @classmethod
    def of(cls, curve: Curve) -> "_Picture":
        rivals = tuple(r for r in curve.rivals if r.step_seconds is not None and r.peak_bytes is not None)
        peaks = [point.peak_bytes for point in curve.points]
        times = [point.step_seconds for point in curve.points]
        top = HEAD + BEGIN_LINE * max(len(curve.begins), 1)
        memory = _span(peaks, [r.peak_bytes or 0 for r in rivals])
        time = _span(times, [r.step_seconds or 0.0 for r in rivals])
        return cls(
            curve,
            rivals,
            Axis(*_padded(*memory, left=0.12), LEFT, WIDTH - RIGHT, SIZES),
            Axis(*_padded(*time, left=0.08), HEIGHT - BOTTOM, top, SECONDS),
        )

    @property
    def frame(self) -> Box:
        return Box(self.memory.begin, self.time.end, self.memory.end, self.time.begin)

    def mark(self, num_bytes: float, seconds: float) -> tuple[float, float]:
        """The pixel; at the frame where the value is beyond it."""
        x = self.memory.pixel(min(num_bytes, self.memory.high))
        return x, self.time.pixel(min(seconds, self.time.high))

    def is_beyond(self, rival: Rival) -> bool:
        return (rival.peak_bytes or 0) > self.memory.high or (rival.step_seconds or 0.0) > self.time.high

    def corners(self) -> list[tuple[float, float]]:
        """Of the line, from little memory to much."""
        ordered = sorted({(point.peak_bytes, point.step_seconds) for point in self.curve.points})
        marks = [self.mark(*values) for values in ordered]
        turns = [corner for (_, y), (x, below) in pairwise(marks) for corner in ((x, y), (x, below))]
        return [marks[0], *turns, (self.memory.end, marks[-1][1])]

    def labels(self) -> list[Label]:
        """Names of baselines, those at one spot together, then how each plan compares with the fastest."""
        names: dict[tuple[float, float], list[str]] = {}
        for rival in self.rivals:
            mark = self.mark(rival.peak_bytes or 0, rival.step_seconds or 0.0)
            names.setdefault(mark, []).append(self._name(rival))
        times = {
            self.mark(point.peak_bytes, point.step_seconds): f"{point.step_seconds / self.curve.fastest_seconds:.2f}x"
            for point in self.curve.points
        }
        return [
            *(Label(*mark, ", ".join(found)) for mark, found in names.items()),
            *(Label(*mark, text) for mark, text in times.items()),
        ]

    def _name(self, rival: Rival) -> str:
        """With its figures where its place does not tell them."""
        if not self.is_beyond(rival):
            return rival.name
        return f"{rival.name} ({format_size(rival.peak_bytes or 0)}, {format_seconds(rival.step_seconds or 0.0)})"

    def places(self) -> list[Place]:
        labels = self.labels()
        marks = [Box(label.x - MARK, label.y - MARK, label.x + MARK, label.y + MARK) for label in labels]
        lines = [
            Box(min(a[0], b[0]) - 2, min(a[1], b[1]) - 2, max(a[0], b[0]) + 2, max(a[1], b[1]) + 2)
            for a, b in pairwise(self.corners())
        ]
        return place_labels(labels, [*marks, *lines, *self._begin_boxes()], self.frame)

    def _begin_boxes(self) -> list[Box]:
        pixels = [self.mark(begin.point.peak_bytes, 0.0)[0] for begin in self.curve.begins]
        return [Box(x - 1, self.frame.top, x + 1, self.frame.bottom) for x in pixels]


def _span(own: list[float] | list[int], others: list[float] | list[int]) -> tuple[float, float]:
    """All of the curve, and of what lies about it all that does not squeeze the curve into a corner."""
    low, high = min(own), max(own)
    limit = high + max(high - low, SQUEEZE * high)
    return min([low, *others]), max([high, *(value for value in others if value <= limit)])


def _padded(low: float, high: float, left: float) -> tuple[float, float]:
    room = (high - low) or high or 1.0
    return max(low - left * room, 0.0), high + 0.08 * room


def _title(curve: Curve) -> str:
    plan = curve.points[0].plan
    on_cluster = f" on {plan.cluster}"
    room = MAX_TITLE_LETTERS - len(on_cluster)
    target = plan.target if len(plan.target) <= room else "…" + plan.target[-room:]  # its end says more
    return target + on_cluster


def _head(root: Element, curve: Curve) -> None:
    plan = curve.points[0].plan
    _text(root, "title", LEFT, 26, _title(curve))
    host = f"; host memory {format_size(plan.budget.host_bytes)}" if plan.budget.host_bytes else ""
    disk = f"; disk {format_size(plan.budget.disk_bytes)}" if plan.budget.disk_bytes else ""
    given = f"{plan.decisions.mesh.num_ranks} ranks{host}{disk}"
    subtitle = f"global batch {inputs_text(plan)}; {plan.identity.dtype}, {plan.identity.optimizer}; {given}"
    cut = subtitle if len(subtitle) <= MAX_SUBTITLE_LETTERS else subtitle[: MAX_SUBTITLE_LETTERS - 1] + "…"
    _text(root, "quiet", LEFT, 46, cut)


def _axes(root: Element, picture: _Picture) -> None:
    frame = picture.frame
    _never(root, picture)
    for tick in picture.memory.ticks(8):
        _line(root, "grid", tick.pixel, frame.top, tick.pixel, frame.bottom)
        _text(root, "quiet", tick.pixel, frame.bottom + 18, tick.label, "middle")
    for tick in picture.time.ticks(8):
        _line(root, "grid", frame.left, tick.pixel, frame.right, tick.pixel)
        _text(root, "quiet", frame.left - 8, tick.pixel + 4, tick.label, "end")
    SubElement(root, "path", {"class": "frame", "d": f"M{frame.left} {frame.top:.1f}V{frame.bottom}H{frame.right}"})
    _text(root, "", frame.right, frame.bottom + 38, f"peak memory of a rank, {picture.memory.unit}", "end")
    middle = (frame.top + frame.bottom) / 2
    upright = _text(root, "", 22, middle, f"step time, {picture.time.unit}", "middle")
    upright.set("transform", f"rotate(-90 22 {middle:.1f})")


def _never(root: Element, picture: _Picture) -> None:
    """What no budget of that size is known to hold; not drawn where nobody looked for the smallest."""
    frame, curve = picture.frame, picture.curve
    if curve.smallest_bytes is None:
        return
    edge = picture.memory.pixel(curve.points[-1].peak_bytes)
    _rect(root, "never", Box(frame.left, frame.top, edge, frame.bottom))
    if edge - frame.left >= 20:
        x, y = (frame.left + edge) / 2 + 4, frame.bottom - 12
        upright = _text(root, "quiet", x, y, "no plan is known to fit", "start")
        upright.set("transform", f"rotate(-90 {x:.1f} {y:.1f})")


def _begins(root: Element, picture: _Picture) -> None:
    """A dashed line where a way to save memory is first used, coming from the right; its name on a line of its own."""
    frame = picture.frame
    for number, begin in enumerate(picture.curve.begins):
        x, _ = picture.mark(begin.point.peak_bytes, begin.point.step_seconds)
        y = frame.top - 6 - BEGIN_LINE * number
        _line(root, "begin", x, y - 10, x, frame.bottom)
        _text(root, "begins", x - 5, y, f"← {begin.what}", "end")


def _rival(root: Element, picture: _Picture, rival: Rival) -> None:
    x, y = picture.mark(rival.peak_bytes or 0, rival.step_seconds or 0.0)
    group = SubElement(root, "g", {"class": "rival beyond" if picture.is_beyond(rival) else "rival"})
    size, seconds = format_size(rival.peak_bytes or 0), format_seconds(rival.step_seconds or 0.0)
    SubElement(group, "title").text = f"{rival.name}: peak {size}, step {seconds}; {rival_notes(rival)}"
    SubElement(group, "path", d=_diamond(x, y))


def _point(root: Element, picture: _Picture, point: Point) -> None:
    x, y = picture.mark(point.peak_bytes, point.step_seconds)
    group = SubElement(root, "g", {"class": "point"})
    SubElement(group, "title").text = (
        f"budget {format_size(point.budget.device_bytes)}: peak {format_size(point.peak_bytes)},"
        f" step {format_seconds(point.step_seconds)}"
    )
    SubElement(group, "circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r="4")


def _legend(root: Element, picture: _Picture) -> None:
    x, y = float(LEFT), float(HEIGHT - 16)
    text = "best plan found for that much memory; 1.20x: its time beside the fastest one's"
    SubElement(root, "path", {"class": "curve", "d": f"M{x} {y - 4}h24"})
    _text(root, "quiet", x + 30, y, text)
    if picture.rivals:
        x += 50 + text_width(text)
        SubElement(root, "path", {"class": "sample", "d": _diamond(x, y - 4)})
        _text(root, "quiet", x + 12, y, "what a person would pick")


def _diamond(x: float, y: float) -> str:
    return f"M{x:.1f} {y - MARK:.1f}l{MARK} {MARK} {-MARK} {MARK} {-MARK} {-MARK}z"


def _nearest(place: Place) -> tuple[float, float]:
    """Of the label's box, seen from its mark."""
    x = min(max(place.label.x, place.box.left + 2), place.box.right - 2)
    return x, min(max(place.label.y, place.box.top + 2), place.box.bottom - 2)


def _path(corners: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)


def _line(root: Element, kind: str, x1: float, y1: float, x2: float, y2: float) -> None:
    SubElement(root, "path", {"class": kind, "d": _path(((x1, y1), (x2, y2)))})


def _rect(root: Element, kind: str, box: Box) -> None:
    size = {"width": f"{box.right - box.left:.1f}", "height": f"{box.bottom - box.top:.1f}"}
    SubElement(root, "rect", {"class": kind, "x": f"{box.left:.1f}", "y": f"{box.top:.1f}"} | size)


def _text(root: Element, kind: str, x: float, y: float, text: str, anchor: str = "start") -> Element:
    element = SubElement(root, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor})
    if kind:
        element.set("class", kind)
    element.text = text
    return element
