"""Labels of a picture keep off each other, off marks and inside the frame, also where marks crowd."""

from itertools import combinations

from shardwright.planner.axis import SECONDS, SIZES, Axis
from shardwright.planner.label_places import Box, Label, place_labels

FRAME = Box(0, 0, 600, 300)


def test_labels_of_marks_in_a_crowd_do_not_collide() -> None:
    labels = [Label(300 + 9 * i, 150 + 4 * (i % 3), f"fsdp+number-{i}") for i in range(8)]
    marks = [Box(label.x - 5, label.y - 5, label.x + 5, label.y + 5) for label in labels]
    boxes = [place.box for place in place_labels(labels, marks, FRAME)]
    assert all(one.shared_area(other) == 0 for one, other in combinations(boxes, 2))
    assert all(box.shared_area(mark) == 0 for box in boxes for mark in marks)


def test_labels_of_marks_at_the_edges_stay_inside() -> None:
    corners = [Label(x, y, "a longer name") for x in (0, 600) for y in (0, 300)]
    for place in place_labels(corners, [], FRAME):
        assert place.box.shared_area(FRAME) == place.box.area


def test_a_lonely_mark_has_its_label_beside_it() -> None:
    (place,) = place_labels([Label(300, 150, "ddp")], [], FRAME)
    assert not place.is_far


def test_ticks_are_round_numbers_in_a_unit_that_suits() -> None:
    sizes = Axis(50 * 2**20, 310 * 2**20, 0, 100, SIZES)
    assert sizes.unit == "MiB"
    assert [tick.label for tick in sizes.ticks(6)] == ["50", "100", "150", "200", "250", "300"]
    assert sizes.ticks(6)[0].pixel == 0
    times = Axis(0.9, 1.55, 100, 0, SECONDS)
    assert [tick.label for tick in times.ticks(7)] == ["0.9", "1.0", "1.1", "1.2", "1.3", "1.4", "1.5"]
    assert times.pixel(0.9) == 100
