"""What planning does where nothing else is said."""

from typing import Final

from shardwright.planner.progress import Progress

__all__ = ["GAP", "TIME_LIMIT_SECONDS", "silent"]

TIME_LIMIT_SECONDS: Final = 120.0
GAP: Final = 0.01


def silent(progress: Progress) -> None:
    """Where nobody watches."""
