"""`tiered-zero doctor --device` on a device whose rates and order are known."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.lagging.faults import lane_does_not_wait
from tiered_zero.cli import device_check
from tiered_zero.cli.main import main
from tiered_zero.hardware import check
from tiered_zero.hardware.device.streams import CudaAccelerator, StreamAccelerator
from tiered_zero.sizes import MIB
from tiered_zero.system import BAD, GOOD, POOR

NAMES = ["device memory", "kernel", "copies", "overlap", "waits", "allocator", "pinned memory", "steps"]

TIMED = ("copies", "overlap", "waits")


def examine(patch: pytest.MonkeyPatch, code: int, *options: str) -> dict[str, dict[str, Any]]:
    for name, value in {"COPY_NBYTES": 1 << 16, "SIDE": 64, "BUSY_S": 1e-3}.items():
        patch.setattr(check, name, value)
    result = CliRunner().invoke(main, ["doctor", "--device", "--json", *options])
    assert result.exit_code == code, (result.output, result.exception)
    found = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert all(finding["fix"] for finding in found.values() if finding["state"] == BAD)
    return found


@on_device
def test_every_question_is_answered(device: LaggingDevice) -> None:
    pinned = device.pinned_nbytes()
    with pytest.MonkeyPatch.context() as patch:
        found = examine(patch, 0, "--pin", "3MiB")
    assert list(found) == NAMES
    assert [name for name in NAMES if found[name]["state"] != GOOD and name not in TIMED] == []
    assert found["pinned memory"]["found"].startswith("3.0 MiB of 3.0 MiB pinned in ")
    assert found["steps"]["found"] == "3 steps have the bits of plain PyTorch"
    assert device.pinned_nbytes() == pinned, "nothing is left"


@pytest.mark.parametrize(
    ("both_s", "cpu_s", "states"),
    [(0.6, 0.01, [GOOD, GOOD, GOOD]), (1.0, 0.9, [POOR, POOR, POOR]), (0.6, 0.9, [GOOD, GOOD, POOR])],
)
@on_device
def test_times_are_judged(device: LaggingDevice, both_s: float, cpu_s: float, states: list[str]) -> None:
    """A copy and a product take 0.5 s each, and a wait 1 s."""
    clock, cpu = itertools.count(), itertools.count(0, cpu_s)
    accelerator = CudaAccelerator(torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "COPY_NBYTES", 1 << 16)
        patch.setattr(check, "SIDE", 16)
        patch.setattr(check, "launch_seconds", lambda _, *launches: 0.5 if len(launches) == 1 else both_s)
        patch.setattr(check, "time", SimpleNamespace(perf_counter=clock.__next__, thread_time=cpu.__next__))
        found = [run(accelerator) for run in (check.check_copies, check.check_overlap, check.check_sleep)]
    assert [finding.state for finding in found] == states, found
    assert all(bool(finding.fix) == (finding.state == POOR) for finding in found)
    accelerator.close()


@on_device
def test_products_and_link_of_a_device_have_rates(device: LaggingDevice) -> None:
    pinned, accelerator = device.pinned_nbytes(), CudaAccelerator(torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "COPY_NBYTES", 1 << 16)
        patch.setattr(check, "COPY_NBYTES", 1 << 16)
        patch.setattr(check, "_SHAPES", {False: (32, 16)})
        patch.setattr(check, "_MODEL_SHAPES", {False: (32, 1, 64)})
        patch.setattr(check, "LIMIT_S", 0.0)
        products = check.product_rates(accelerator)
        models = [rate for found in check.model_rates(accelerator, products) for rate in found.values()]
        found = [*check.link_rates(accelerator), *products.values(), *models]
    assert len(products) >= 2 and len(models) >= 2 and all(rate is not None and rate > 0 for rate in found)
    accelerator.close()
    assert device.pinned_nbytes() == pinned


@on_device
def test_memory_that_cannot_be_pinned_is_slow(device: LaggingDevice) -> None:
    accelerator = CudaAccelerator(torch.device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaAccelerator, "pin", StreamAccelerator.pin)
        finding = check.check_pinning(accelerator, MIB)
    assert finding.state == POOR and finding.found.startswith("0 B of 1.0 MiB") and finding.fix
    assert check.check_pinning(accelerator, 1 << 60).state == BAD
    accelerator.close()


@on_device
def test_steps_that_differ_name_the_policy_that_is_sound(device: LaggingDevice) -> None:
    device.set(delay_seed=1, kernel_s=2e-3)
    with pytest.MonkeyPatch.context() as patch:
        lane_does_not_wait("fetch")(patch)
        accelerator = CudaAccelerator(torch.device("cuda"))
        every = device_check.check_steps(accelerator)
        accelerator.close()
    assert every.state == BAD and "with every update policy" in every.found, every


@on_device
def test_a_kernel_that_the_device_does_not_have_ends_the_checks(device: LaggingDevice) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", refuse)
        patch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_50", "sm_60"])
        found = examine(patch, 1)
    assert list(found) == ["device memory", "kernel"]
    assert (
        "sm_90" in found["kernel"]["found"] and "sm_50 sm_60): CUDA error: no kernel image" in found["kernel"]["found"]
    )
