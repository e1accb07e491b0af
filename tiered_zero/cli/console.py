"""Terminal output: one console each for stderr and stdout, and the package's log lines on stderr."""

from __future__ import annotations

import logging
import os

from rich.console import Console, ConsoleDimensions

STDERR = Console(stderr=True)
"""Progress and log share it, so that a line is printed above the bar. It follows sys.stderr if that is replaced."""


class ResultConsole(Console):
    """Wraps at the width of a terminal, or at COLUMNS. A file and a pipe get whole lines, to be searched."""

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        fits = self.is_terminal or "COLUMNS" in os.environ
        return found if fits else ConsoleDimensions(width=_FILE_WIDTH, height=found.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


_FILE_WIDTH = 1000
STDOUT = ResultConsole()


class ConsoleHandler(logging.Handler):
    """Log lines on stderr; above INFO with their level."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {rank_prefix()}"
        STDERR.print(f"{level}{self.format(record)}", markup=False, highlight=False, soft_wrap=True)


def configure_logging() -> None:
    """Configure the one logger that the package uses. Ranks other than the first print errors only."""
    logger = logging.getLogger("tiered_zero")
    logger.setLevel(logging.INFO if rank_prefix() in ("", "rank 0: ") else logging.ERROR)
    logger.handlers = [ConsoleHandler()]


def rank_prefix() -> str:
    """The launcher's RANK before a message, if it has started several: "rank 1: "; else ""."""
    return f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
