"""Interrupts at a chosen place of the package, as a trace of it finds them."""

from __future__ import annotations

import dis
import functools
import os
import sys
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tiered_zero

PACKAGE = str(Path(tiered_zero.__file__).parent) + os.sep


class Breaker:
    """Lists the places of the package that the calling thread comes to, and raises at one of them, the `nth` time that
    it comes to `place`; "": at any place; `nth` 0: not at all.

    Places are lines ("file:line"). With `at_calls` they are what is behind a call of a C function ("file:line.offset"),
    where CPython looks for signals before the result is stored; behind a call of a Python function it does not."""

    def __init__(self, error: type[BaseException], place: str, nth: int, *, at_calls: bool = False) -> None:
        self._error = error
        self._place = place
        self._left = nth
        self._event = "opcode" if at_calls else "line"
        self._have_called: set[FrameType] = set()
        """Those whose last call was of a Python function."""
        self._has_begun = False
        """Whether the call is past the first lines of its entry point (`on_one_thread`). An exception there is one
        between two calls: the user drops the step before the batch is repeated, or gets an error that says so."""
        self.where = ""
        self.places: list[str] = []

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._have_called.clear()

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call" and frame.f_back is not None and self._event == "opcode":
            self._have_called.add(frame.f_back)
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        self._has_begun |= frame.f_code.co_name != "entered"
        if event == self._event and self._has_begun and self._can_be_interrupted(frame):
            place = f"{frame.f_code.co_filename[len(PACKAGE) :]}:{frame.f_lineno}"
            if event == "opcode":
                place += f".{frame.f_lasti}"
            self.places.append(place)
            self._left -= self._place in ("", place)
            if self._left == 0 and self._place in ("", place):
                sys.settrace(None)
                self.where = place
                raise self._error
        return self._trace

    def _can_be_interrupted(self, frame: FrameType) -> bool:
        if self._event == "line":
            return not _takes_no_signal(frame)
        if frame.f_lasti not in _behind_calls(frame.f_code):
            return False
        called_python = frame in self._have_called
        self._have_called.discard(frame)
        return not called_python


_NO_SIGNAL = ([("RETURN_VALUE", None)], [("NOP", None)])


@functools.cache
def _instructions(code: CodeType) -> dict[int, list[tuple[str, object]]]:
    """Offset of an instruction -> it and the next three, with their arguments, without NOPs."""
    found = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "RESUME")]
    real = [i for i in found if i.opname != "NOP"]
    following = {i.offset: [(j.opname, j.argval) for j in real[at : at + 4]] for at, i in enumerate(real)}
    return {i.offset: following.get(i.offset, [("NOP", None)]) for i in found}


def _takes_no_signal(frame: FrameType) -> bool:
    """CPython looks for signals as a call begins or ends and as a loop goes round: not between the end of a `with`
    block and the call of `__exit__`, nor while a finished call returns, nor at a `try`, which may lie outside of what
    the blocks around it catch."""
    following = _instructions(frame.f_code).get(frame.f_lasti, [])
    if following[:1] and following[0][0] == "SWAP":  # a `return` within the block: its value goes below __exit__
        following = following[1:]
    return following[:3] == [("LOAD_CONST", None)] * 3 or following[:1] in _NO_SIGNAL


@functools.cache
def _behind_calls(code: CodeType) -> set[int]:
    """Offsets of instructions behind a call, where what is raised ends where it would if the call had raised it."""
    found = list(dis.get_instructions(code))
    blocks = getattr(dis, "_parse_exception_table", lambda _code: [])(code)  # Python 3.10 has none

    def handler(offset: int) -> int | None:
        return next((block.target for block in blocks if block.start <= offset < block.end), None)

    return {
        behind.offset
        for call, behind in pairwise(found)
        if call.opname.startswith("CALL") and handler(call.offset) == handler(behind.offset)
    }
