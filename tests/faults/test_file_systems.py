"""Training on file systems of every kind; disks that are full at the start, run full, or are gone in the middle."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.faults.test_rot import punch
from tests.record.test_runs import dead_run
from tests.support.faulty_runs import (
    POLICIES,
    build,
    check_aftermath,
    data_files,
    differing,
    faulty_disks,
    reference,
    train,
    weights_after,
)
from tests.support.file_systems import KINDS, fill, mounted, shut_down
from tests.support.inspection import free_nbytes, store_of
from tests.support.inspection.insides import collect_garbage
from tests.support.pairwise import by_turns
from tests.support.trainers import adamw, tiered
from tiered_zero.errors import StoreError

pytestmark = [pytest.mark.usefixtures("no_leaks")]


@pytest.fixture
def disk(request: pytest.FixtureRequest, swap_path: Path) -> Iterator[Path]:
    with mounted(request.param, swap_path) as point:
        yield point


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("disk", kinds, indirect=True)


def steps_with_parity(path: Path, policy: str) -> str:
    """Train, compare, close; which access was used."""
    with faulty_disks() as disks, build(path, policy) as engine:
        assert train(engine, 3) is None
        weights = weights_after(engine)
        assert isinstance(weights, dict) and not differing(reference(policy, 3), weights)
        inner = disks[0].inner
        access = "O_DIRECT" if inner.direct else "buffered"
    assert list(path.iterdir()) == []
    return f"{inner.name}, {access}: same weights"


@on(*KINDS)
def test_every_file_system_trains(disk: Path, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["disk"]
    for policy in POLICIES if kind in ("ext4", "ramfs") else ("overlapped",):
        came = steps_with_parity(disk, policy)
    if kind == "ramfs":
        assert "buffered" in came


@on(*KINDS)
def test_a_run_whose_owner_has_ended_is_removed_where_one_machine_alone_can_hold_it(
    disk: Path, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["disk"]
    with build(disk, "barrier"):
        (item,) = collect_garbage(disk, committed=True, unknown=True)
        assert item.run.state == "alive" and not item.removed
    dead_run(disk)
    (item,) = collect_garbage(disk)
    assert (item.run.state, item.removed) == (("unknown", False) if kind == "fuse" else ("dead", True))
    assert kind != "fuse" or collect_garbage(disk, unknown=True)[0].removed
    assert list(disk.iterdir()) == []


def test_a_file_system_without_o_direct(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any mount: every open with O_DIRECT is refused, as such file systems do."""
    real_open = os.open

    def refusing(path: str, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real_open(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", refusing)
    for policy in POLICIES:
        came = steps_with_parity(swap_path, policy)
        assert "buffered" in came


@on("ext4", "xfs", "btrfs", "tmpfs")
def test_a_disk_too_small_at_the_start(disk: Path) -> None:
    free_nbytes = os.statvfs(disk).f_bavail
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), nn.Linear(8192, 8))
    with pytest.raises(StoreError, match=r"needs 1\.\d GiB .*free there.* another nvme_path"):
        tiered(model, disk, ("nvme", "nvme"), adamw, zero={"sub_group_size": 1 << 20})
    assert list(disk.iterdir()) == []
    assert abs(os.statvfs(disk).f_bavail - free_nbytes) <= 2, "beyond what the file system logs of its own"


@pytest.mark.parametrize(("policy", "disk"), by_turns(list(POLICIES), ["ext4", "xfs"]), indirect=["disk"])
def test_a_disk_that_runs_full_behind_our_back(disk: Path, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """The blocks reserved at the start are given away again by somebody else, state first; then the disk fills up."""
    engine = build(disk, policy)
    assert train(engine, 2) is None
    engine.flush()
    (file,) = data_files(disk)
    half = file.stat().st_size // 2 // 4096 * 4096
    punch(file, half, file.stat().st_size - half)
    junk = fill(disk)
    failure = train(engine, 5, first=2)
    assert failure is not None
    check_aftermath(policy, engine, failure, disk)
    engine.close()
    junk.unlink()
    assert list(disk.iterdir()) == [] and not [text for text in caplog.messages if "still leased" in text]


@pytest.mark.parametrize(("policy", "disk"), by_turns(list(POLICIES), ["ext4", "xfs"]), indirect=["disk"])
def test_a_device_that_is_gone(disk: Path, policy: str) -> None:
    engine = build(disk, policy)
    assert train(engine, 2) is None
    engine.flush()
    shut_down(disk)
    failure = train(engine, 5, first=2)
    assert failure is not None and failure.step == 2, failure
    check_aftermath(policy, engine, failure, disk)
    engine.close()


@pytest.mark.parametrize(("policy", "disk"), by_turns(list(POLICIES), ["tmpfs", "xfs", "ext4"]), indirect=["disk"])
def test_disk_use_is_the_plan_to_the_byte(disk: Path, policy: str, request: pytest.FixtureRequest) -> None:
    """From the first step to the last: nothing grows, nothing is made beside the files."""
    engine = build(disk, policy)
    planned = engine.plan.nbytes("nvme")
    sizes: set[int] = set()
    blocks: set[int] = set()

    def look(step: int, call: str) -> None:
        (file,) = (entry for run in disk.iterdir() for entry in run.iterdir() if entry.name != "owner.json")
        sizes.add(file.stat().st_size)
        blocks.add(file.stat().st_blocks * 512)

    assert train(engine, 4, before=look) is None
    assert sizes == {planned} and free_nbytes(store_of(engine)) == 0
    # ext4 and xfs count the block of their own that lists a file's extents as the file's
    index_nbytes = 0 if request.node.callspec.params["disk"] == "tmpfs" else 4096
    assert blocks <= {planned, planned + index_nbytes}
    engine.close()
