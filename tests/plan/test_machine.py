"""Machines: what is saved is read back, a description may use units, and what is no machine is refused by name."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiered_zero.errors import ConfigError
from tiered_zero.plan.machine import Disk, Machine, from_description, load_machine, parse_disk

MEASURED = Machine(
    name="host",
    source="measured",
    date="2026-01-02T03:04:05+00:00",
    num_cores=16,
    device="cuda",
    device_nbytes=80 << 30,
    host_nbytes=128 << 30,
    flops_per_s={"bf16": 4.5e14, "fp32": 5.1e13},
    copy_bytes_per_s=2e11,
    update_bytes_per_s=1.5e11,
    to_device_bytes_per_s=5.1e10,
    from_device_bytes_per_s=4.9e10,
    disks=(Disk(path="/mnt/a", nbytes=10**12, read_bytes_per_s=7e9, write_bytes_per_s=5e9, mixed_bytes_per_s=5.5e9),),
)


def test_what_is_saved_is_read_back_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "machine.json"
    MEASURED.save(path)
    replace(MEASURED, num_cores=8).save(path)
    assert load_machine(path) == replace(MEASURED, num_cores=8)
    assert path.stat().st_mode & 0o777 == 0o600 and [*path.parent.iterdir()] == [path]


def test_a_save_that_a_disk_cuts_short_raises_and_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    MEASURED.save(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # a write takes 100 bytes, as on a disk that is full
    try:
        with pytest.raises(OSError, match="too large"):
            replace(MEASURED, num_cores=8).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_machine(path) == MEASURED


def test_a_description_may_use_units(tmp_path: Path) -> None:
    """And leave out what is not known."""
    path = tmp_path / "card.json"
    disk = {"path": "a drive", "nbytes": "2TB", "read_bytes_per_s": "7GB/s", "write_bytes_per_s": "5GB/s"}
    disk["rated_nbytes"] = "1.2PBW"
    values = {"name": "card", "device": "cuda", "device_nbytes": "24GiB", "flops_per_s": {"bf16": "150TFLOPS"}}
    path.write_text(json.dumps({**values, "copy_bytes_per_s": "40 GB/s", "disks": [disk]}) + "  // as people write")
    machine = load_machine(path)
    assert (machine.device_nbytes, machine.flops_per_s) == (24 << 30, {"bf16": 1.5e14})
    assert (machine.copy_bytes_per_s, machine.update_bytes_per_s) == (40e9, None)
    (drive,) = machine.disks
    assert (drive.nbytes, drive.read_bytes_per_s, drive.rated_nbytes) == (2 * 10**12, 7e9, 1200 * 10**12)
    assert drive.mixed_bytes_per_s == pytest.approx(2 / (1 / 7e9 + 1 / 5e9)), "as if it did one after the other"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"num_cores": "2"}, "num_cores: Input should be a valid integer"),
        ({"update_bytes_per_s": 0}, "update_bytes_per_s: Input should be greater than 0"),
        ({"update_bytes_per_s": "fast"}, "update_bytes_per_s: Value error, 'fast' is no size"),
        ({"flops_per_s": {"bf16": "150"}}, "flops_per_s.bf16: Value error, '150' is no number above zero with TFLOPS"),
        ({"disks": [{"nbytes": 1}]}, "disks.0.path: Field required"),
        ({"disks": [{"path": "a", "read_bytes_per_s": 1}]}, "disks.0: Value error, expected both read_bytes_per_s and"),
        ({"speed": 1}, "speed: Unexpected keyword argument"),
    ],
)
def test_what_is_no_machine_is_refused_by_name(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"name": "card", **wrong}))
    with pytest.raises(ConfigError) as caught:
        load_machine(path)
    assert str(path) in str(caught.value) and why in str(caught.value)


def test_options_replace_what_a_machine_has() -> None:
    drive = parse_disk("2TB:6GB/s,3GB/s")
    machine = from_description(MEASURED, host_nbytes=64 << 30, disks=[drive])
    assert machine == replace(MEASURED, host_nbytes=64 << 30, disks=(drive,))
    beside = from_description(replace(MEASURED, device="cpu", device_nbytes=None), device_nbytes=1 << 30)
    assert (beside.device, beside.flops_per_s) == ("cuda", {}), "the CPU's are not those of a card"
    assert from_description(device_nbytes=1 << 30).disks == ()


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs" / "machines").iterdir()), ids=str)
def test_the_machines_of_the_project_are_complete(path: Path) -> None:
    machine = load_machine(path)
    assert (
        machine.source and machine.num_cores and machine.host_nbytes and {"bf16", "fp32"} <= machine.flops_per_s.keys()
    )
    assert machine.copy_bytes_per_s and machine.update_bytes_per_s
    link = machine.device_nbytes, machine.to_device_bytes_per_s, machine.from_device_bytes_per_s
    assert all(link) if machine.device == "cuda" else not any(link)
    assert all(disk.nbytes and disk.read_bytes_per_s and disk.mixed_bytes_per_s for disk in machine.disks)
