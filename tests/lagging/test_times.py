"""A step's report has the device's times of what crosses the link, and not those of its launch."""

import tempfile
from pathlib import Path

import torch

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.support.models import ParityGPT, batch
from tests.support.trainers import adamw, tiered

BYTES_PER_S = 4e6


@on_device
def test_links_are_busy_for_as_long_as_their_bytes_take(device: LaggingDevice):
    zero, runtime = {"stage3_param_persistence_threshold": 0}, {"device": "cuda", "update": "overlapped"}
    with (
        tempfile.TemporaryDirectory() as directory,
        tiered(ParityGPT(), Path(directory), ("cpu", "cpu"), adamw, 1, 1.0, zero=zero, runtime=runtime) as engine,
    ):
        tokens, targets = (values.cuda() for values in batch(0))
        torch.accelerator.synchronize()
        device.set(h2d_bytes_per_s=BYTES_PER_S, d2h_bytes_per_s=BYTES_PER_S)
        for _ in range(2):
            engine.backward(engine(tokens, targets, False))
            engine.step()
        report = engine.step_report
        for lane in ("fetch", "reduce"):
            least_s = 0.5 * report.link_nbytes[lane] / BYTES_PER_S  # of the bytes; the last may come after the report
            assert least_s < report.busy_s[lane] <= report.wall_s, lane
