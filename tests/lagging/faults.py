"""A fault that is planted on one device and on two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tiered_zero.hardware.device.accelerator import Lane

Plant = Callable[[pytest.MonkeyPatch], None]


def lane_does_not_wait(name: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        submit = Lane.submit

        def submit_at_once(self: Lane, job: Callable[[], None], after: object = (), *rest: object, **more: object):
            return submit(self, job, () if self.name == name else after, *rest, **more)

        patch.setattr(Lane, "submit", submit_at_once)

    return plant
