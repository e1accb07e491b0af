"""The end of the group of a device."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tiered_zero.hardware.ranks.process_groups import ProcessGroups
from tiered_zero.hardware.ranks.rank_failures import RankFailures, RankTraffic
from tiered_zero.telemetry.spans import Recorder


class Group:
    def abort(self) -> None:
        raise RuntimeError("this backend has no abort")


def test_a_group_that_cannot_be_aborted_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    groups = ProcessGroups(1.0)
    groups.failures = RankFailures(dist.HashStore(), 0, 2, 1.0, RankTraffic(), Recorder())
    groups._device_group = Group()
    groups._phase = type(groups._phase).OPEN
    groups.fail("ValueError: no data")
    assert "this backend has no abort" in caplog.text
    groups.close()
