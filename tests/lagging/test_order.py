"""In which order things happen where backward is launched ahead of the device."""

import tempfile
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.support.inspection.insides import UpdateJob, UpdatePipeline
from tests.support.models import ParityGPT, batch
from tests.support.trainers import adamw, tiered


@on_device
def test_updates_that_backward_leaves_come_in_the_order_of_the_next_forward(device: LaggingDevice):
    """The second update begins when a few units have their gradients, and goes on when all have them. Where state rests
    in memory all that were ready were opened by then, and the shallow ones, which forward needs first, came last."""
    order: list[int] = []
    num_added = [0]
    some_are_ready, second_has_begun, all_are_ready = (threading.Event() for _ in range(3))
    update, add = UpdatePipeline._update, UpdateJob.add_unit

    def held_update(pipeline: UpdatePipeline, work: Any, job: Any) -> None:
        order.append(work.layout.subgroup.index)
        if len(order) == 2:
            second_has_begun.set()
        assert (some_are_ready if len(order) == 1 else all_are_ready).wait(60)
        update(pipeline, work, job)

    def counted_add(job: UpdateJob, unit: Any, after: Any) -> list[Any]:
        ready = add(job, unit, after)
        num_added[0] += 1
        if num_added[0] == 3:
            some_are_ready.set()
            assert second_has_begun.wait(60)
        return ready

    zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 1}
    runtime = {"device": "cuda", "update": "overlapped"}
    tokens, targets = (values.cuda() for values in batch(0))
    with (
        tempfile.TemporaryDirectory() as directory,
        tiered(ParityGPT(), Path(directory), ("cpu", "cpu"), adamw, 1, 0.0, zero=zero, runtime=runtime) as engine,
    ):
        assert engine.plan.update_policy.optimizer_in_backward
        engine.backward(engine(tokens, targets, False))  # the first updates start behind backward
        engine.step()
        engine.flush()
        with patch.object(UpdatePipeline, "_update", held_update), patch.object(UpdateJob, "add_unit", counted_add):
            engine.backward(engine(tokens, targets, False))
            engine.step()
            all_are_ready.set()
            engine.flush()
    left = order[2:]
    assert len(left) > 3 and left == sorted(left), order
