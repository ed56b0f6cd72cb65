"""Places in a file: never two users of one byte, nothing lost, free neighbours joined."""

from hypothesis import given, settings
from hypothesis import strategies as draw

from shardwright.runtime.slots import Slots


def taken_from(slots: Slots, num_bytes: int) -> int:
    """The file grows by what is missing."""
    begin = slots.take(num_bytes)
    if begin is None:
        slots.grow(slots.missing(num_bytes))
        begin = slots.take(num_bytes)
    assert begin is not None
    return begin


@settings(max_examples=200, deadline=None)
@given(draw.lists(draw.tuples(draw.integers(1, 9), draw.integers(0, 5))))
def test_bytes_in_use_belong_to_one_and_all_come_back(steps: list[tuple[int, int]]) -> None:
    """Each step gives back what was taken some steps before, then takes."""
    slots = Slots()
    held: list[tuple[int, int]] = []
    for num_bytes, age in steps:
        if age < len(held):
            begin, size = held.pop(age)
            slots.give(begin, size)
        held.append((taken_from(slots, num_bytes), num_bytes))
        taken = sorted((start, start + size) for start, size in held)
        assert all(end <= start for (_, end), (start, _) in zip(taken, taken[1:], strict=False))
        assert taken[-1][1] <= slots.size
        assert slots.used_bytes == sum(size for _, size in held)
    for begin, size in held:
        slots.give(begin, size)
    assert slots.used_bytes == 0 and (not slots.size or slots.take(slots.size) == 0)


def test_a_step_like_the_last_one_needs_no_more() -> None:
    slots = Slots()
    for _ in range(3):
        taken = [(taken_from(slots, size), size) for size in (3, 1, 4, 1, 5)]
        for begin, size in reversed(taken):
            slots.give(begin, size)
        assert slots.size == 14
