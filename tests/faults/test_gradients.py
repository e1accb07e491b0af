"""Disks that fail under gradients: a step is dropped before its update, or the engine latches in it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.fakes.io_faults import Fault
from tests.support.faulty_runs import build, check_closed, differing, faulty_disks, train
from tests.support.inspection import gradient_traffic
from tests.support.models import ParityGPT, batch, named_weights
from tiered_zero.errors import CorruptionError, EngineFailedError, StoreError, TransferError

ON_NVME = {"gradients": "nvme"}
STEP = 2


def model() -> nn.Module:
    """More units than there are windows."""
    return ParityGPT(5)


def weights_after(path: Path, policy: str, steps: int) -> dict[str, torch.Tensor]:
    with build(path, policy, model) as engine:
        assert train(engine, steps) is None
        return dict(named_weights(engine.module))


@pytest.mark.parametrize("policy", ["barrier", "overlapped"])
@pytest.mark.parametrize("effect", [errno.EIO, errno.ENOSPC, "short"])
def test_a_write_that_fails_drops_the_step(policy: str, effect: int | str, swap_path: Path) -> None:
    """Weights and state are those of the step before, and can be saved; the store of gradients is used no more."""
    expected = weights_after(swap_path, policy, STEP)
    with faulty_disks() as disks, build(swap_path, policy, model, runtime=ON_NVME) as engine:

        def arm(step: int, call: str) -> None:
            if (step, call) == (STEP, "backward"):
                disks[-1].add(Fault("write", disks[-1].count("write") + 1, effect))

        failure = train(engine, STEP + 2, before=arm)
        assert failure is not None and isinstance(failure.error, TransferError), failure
        assert failure.step == STEP and "write of " in str(failure.error)
        assert not differing(expected, dict(named_weights(engine.module)))
        engine.save_checkpoint(swap_path / "saved")
        loss = engine(*batch(STEP))
        with pytest.raises(EngineFailedError, match="failed earlier"):
            engine.backward(loss)


@pytest.mark.parametrize("policy", ["barrier", "overlapped"])
@pytest.mark.parametrize("effect", [errno.EIO, "flip"])
def test_a_read_that_fails_in_the_update_latches(
    policy: str, effect: int | str, swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with faulty_disks() as disks, build(swap_path, policy, model, runtime=ON_NVME) as engine:

        def arm(step: int, call: str) -> None:
            if (step, call) == (STEP, "step"):
                disks[-1].add(*(Fault("read", disks[-1].count("read") + nth, effect) for nth in range(1, 4)))

        failure = train(engine, STEP + 2, before=arm)
        assert failure is not None and failure.step in (STEP, STEP + 1), failure
        again = train(engine, STEP + 3, first=STEP + 2)
        if again is not None and isinstance(again.error, TransferError):  # what failed first was a fetch of parameters
            again = train(engine, STEP + 4, first=STEP + 3)
        assert again is not None and isinstance(again.error, EngineFailedError | CorruptionError)
        check_closed(engine, swap_path, caplog)


def test_a_read_that_fails_in_an_accumulation_drops_the_step(swap_path: Path) -> None:
    def course(engine: tiered_zero.Engine, first: int) -> None:
        for micro in range(3):
            engine.backward(engine(*batch(3 * first + micro)))
            engine.step()

    def built(**runtime: Any) -> tiered_zero.Engine:
        return build(swap_path, "barrier", model, runtime=runtime, accumulation=3)

    with built() as engine:
        course(engine, 0)
        expected = dict(named_weights(engine.module))
    with faulty_disks() as disks, built(**ON_NVME) as engine:
        course(engine, 0)
        assert gradient_traffic(engine)["read"] > 0 and not gradient_traffic(engine)["unverified"]
        disks[-1].add(Fault("read", disks[-1].count("read") + 1))
        with pytest.raises(TransferError, match="read of "):
            course(engine, 1)
        assert not differing(expected, dict(named_weights(engine.module)))


def test_a_disk_without_room_is_found_before_the_start(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def refuse(self: Any, nbytes: int) -> None:
        sizes.append(nbytes)
        if len(sizes) == 2:  # parameters and state lie in the first
            raise TransferError(f"cannot reserve {nbytes} bytes: planted")

    with faulty_disks() as disks:
        engine = build(swap_path, "barrier", model, runtime=ON_NVME)
        file = type(disks[-1].inner.open(str(swap_path / "probe"), create=True))
        engine.close()
    (swap_path / "probe").unlink()
    monkeypatch.setattr(file, "allocate", refuse)
    with pytest.raises((StoreError, TransferError), match="cannot reserve"):
        build(swap_path, "barrier", model, runtime=ON_NVME)
    assert not any(swap_path.iterdir())
