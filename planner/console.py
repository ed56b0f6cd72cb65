"""Where the command line writes: results to stdout, progress and errors to stderr, colours only on a terminal."""

import os
import sys
from typing import TextIO

from rich.console import Console

__all__ = ["console", "error_console", "format_percent"]

PIPE_COLUMNS = 100
"""Width where there is no terminal to ask: files and pipes get the same text everywhere."""


def console() -> Console:
    """For results."""
    return _console(sys.stdout)


def error_console() -> Console:
    """For progress and errors."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    plain = not stream.isatty() or "NO_COLOR" in os.environ
    return Console(
        file=stream,
        no_color=plain,
        color_system=None if plain else "auto",
        highlight=False,
        width=None if stream.isatty() else PIPE_COLUMNS,
        legacy_windows=False,
    )


def format_percent(fraction: float) -> str:
    """
    >>> format_percent(0.0051), format_percent(0.25)
    ('0.5%', '25.0%')
    """
    return f"{100 * fraction:.1f}%"
