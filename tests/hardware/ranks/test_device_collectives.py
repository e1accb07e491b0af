"""The end of groups of a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiered_zero.hardware.ranks.device_collectives import DeviceCollectives


class Group:
    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True
        if self.error is not None:
            raise self.error


def test_a_group_that_cannot_be_aborted_is_logged_and_the_others_are_ended(caplog: pytest.LogCaptureFixture) -> None:
    parts: Any = SimpleNamespace(timer=lambda recorder: None, recorder=None)
    collectives = DeviceCollectives(parts, parts, 0, 2, 1.0)
    groups = {"all_gather": Group(RuntimeError("this backend has no abort")), "reduce_scatter": Group(None)}
    collectives._groups |= groups
    collectives.abort()
    assert all(group.is_aborted for group in groups.values())
    assert "all_gather" in caplog.text and "this backend has no abort" in caplog.text
