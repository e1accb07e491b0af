"""The end of the group of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiered_zero.hardware.ranks.gather_reduce import DeviceCollectives


class Group:
    def abort(self) -> None:
        raise RuntimeError("this backend has no abort")


def test_a_group_that_cannot_be_aborted_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    parts: Any = SimpleNamespace(timer=lambda recorder: None, recorder=None)
    collectives = DeviceCollectives(parts, parts, 0, 2, 1.0)
    collectives._group = Group()
    collectives.abort()
    assert "this backend has no abort" in caplog.text
