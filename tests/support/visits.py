"""Counts the lines of the package that threads execute, so that a loop shows without a clock."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiered_zero

PACKAGE = str(Path(tiered_zero.__file__).parent)


class LineCount:
    """Enter `on_threads` before threads of interest start: torch and Python trace no others."""

    def __init__(self) -> None:
        self._lines: Counter[CodeType] | None = None
        self._calls_alone = False
        self._is_ours: dict[CodeType, bool] = {}

    @contextmanager
    def on_threads(self) -> Iterator[None]:
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    @contextmanager
    def counting(self, calls_alone: bool = False) -> Iterator[Counter[CodeType]]:
        """Count the lines of each function of the package while the block runs, or its calls, a tenth of the work."""
        self._lines, self._calls_alone = Counter(), calls_alone
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield self._lines
        finally:
            sys.settrace(before)
            self._lines = None

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        lines, code = self._lines, frame.f_code
        if lines is None:
            return None
        if code not in self._is_ours:
            self._is_ours[code] = code.co_filename.startswith(PACKAGE)
        if not self._is_ours[code]:
            return None

        def count(_frame: FrameType, event: str, _arg: Any) -> Any:
            if event == "line":
                lines[code] += 1
            return count

        lines[code] += 1
        return None if self._calls_alone else count
