"""Where words go: one console each for stderr and stdout, and the package's log lines on the former."""

from __future__ import annotations

import logging

from rich.console import Console

STDERR = Console(stderr=True)
"""Progress and log share it, so that a line is printed above the bar. It follows sys.stderr where that is replaced."""

STDOUT = Console()


class ConsoleHandler(logging.Handler):
    """Log lines on stderr; above INFO with their level."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        STDERR.print(f"{level}{self.format(record)}", markup=False, highlight=False, soft_wrap=True)


def configure_logging() -> None:
    """Of the one logger that the package uses."""
    logger = logging.getLogger("tiered_zero")
    logger.setLevel(logging.INFO)
    logger.handlers = [ConsoleHandler()]
