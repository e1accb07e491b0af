"""The watch of a device's collectives, where its questions to the device raise."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tiered_zero.hardware.ranks.collective_transfer import DeviceCollective, RankTraffic, WaitContext
from tiered_zero.hardware.ranks.device_watch import DeviceWatch
from tiered_zero.hardware.ranks.rank_failures import CollectiveCall, RankFailures
from tiered_zero.telemetry.spans import Recorder


class Broken:
    """An event of a device that has failed."""

    def query(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    def synchronize(self) -> None:
        self.query()


@on_device
def test_the_error_of_a_device_ends_its_groups_and_the_other_ranks(device: LaggingDevice):
    store, ended, logged = dist.HashStore(), threading.Event(), list[str]()
    store.set_timeout(timedelta(seconds=1))
    failures, other = (RankFailures(store, rank, 2, 60.0) for rank in range(2))
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tiered_zero").addHandler(handler)
    waits = WaitContext(failures=failures, traffic=RankTraffic(), recorder=Recorder())
    transfer = DeviceCollective(waits, CollectiveCall(group="all_gather", number=1, kind=""), "all_gather of unit 1")
    watch = DeviceWatch(torch.device("cuda", 0), failures, 60.0, ended.set)
    try:
        transfer.finish_launch(Broken(), None)
        watch.add("all_gather", transfer, [])
        assert ended.wait(60), "the thread has ended: what hangs is not found"
    finally:
        watch.close()
        logging.getLogger("tiered_zero").removeHandler(handler)
    assert "illegal memory access" in logged[0] and "cuda:0" in logged[0], logged
    error = other.explain(RuntimeError("closed"), "all_gather of unit 1")
    assert "Rank 0 failed" in str(error) and "illegal memory access" in str(error), error
