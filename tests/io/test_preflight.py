"""Each thing that can be wrong with a swap path has an error of its own, which says what to do."""

import os
import stat
from pathlib import Path

import pytest

from tiered_zero.errors import ConfigError
from tiered_zero.io import select
from tiered_zero.io.select import filesystem_type, filesystem_warnings, preflight_directory

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:25 / /dev/shm rw,relatime shared:1 - tmpfs tmpfs rw
31 27 0:26 / /mnt/with\\040space rw shared:2 master:3 - nfs4 server:/x rw
32 27 0:27 / /mnt/twice rw - ext4 /dev/vdb rw
33 27 0:28 / /mnt/twice rw - xfs /dev/vdc rw
34 27 0:29 / /mnt/tw rw - fuse.sshfs sshfs rw
"""


def test_a_good_directory_passes_and_is_left_empty(swap_path: Path) -> None:
    warnings = preflight_directory(swap_path)
    assert os.listdir(swap_path) == []
    assert warnings == filesystem_warnings(str(swap_path), filesystem_type(swap_path))


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none cannot be used: ENOENT .*Create it"):
        preflight_directory(tmp_path / "none")


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file, but must be a directory"):
        preflight_directory(tmp_path / "file")


def test_a_block_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat_result(os.stat(tmp_path))
    device = os.stat_result((stat.S_IFBLK | 0o600, *real[1:]))
    monkeypatch.setattr(select.os, "stat", lambda path: device)
    with pytest.raises(ConfigError, match=r"is a block device\. Make a file system on it, mount it"):
        preflight_directory(tmp_path)


def test_not_writable() -> None:
    # Neither file modes nor being root matter there: the kernel refuses to create files in /proc.
    with pytest.raises(ConfigError, match=r"/proc/self is not writable: E\w+ .*Give this user the right"):
        preflight_directory("/proc/self")


def test_a_link_to_a_directory_of_ones_own_passes(swap_path: Path) -> None:
    (swap_path / "real").mkdir()
    (swap_path / "link").symlink_to(swap_path / "real")
    preflight_directory(f"{swap_path}/link/")


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/home/x", "ext4"),
        ("/dev/shm", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/mnt/with space/run", "nfs4"),
        ("/mnt/twice", "xfs"),
        ("/mnt/tw", "fuse.sshfs"),
    ],
)
def test_the_type_is_that_of_the_nearest_mount_on_top(tmp_path: Path, path: str, fstype: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert filesystem_type(path, mounts) == fstype


def test_a_system_without_mountinfo_has_no_types(tmp_path: Path) -> None:
    assert filesystem_type(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("fstype", "words"),
    [
        ("tmpfs", "RAM-backed"),
        ("devtmpfs", "RAM-backed"),
        ("nfs4", "network file system (nfs4)"),
        ("lustre", "network file system (lustre)"),
        ("fuse.sshfs", "FUSE"),
        ("overlay", "overlay"),
    ],
)
def test_places_that_are_slow_or_pointless_are_warned_of(fstype: str, words: str) -> None:
    (warning,) = filesystem_warnings("/x", fstype)
    assert warning.startswith("nvme_path /x ") and words in warning


@pytest.mark.parametrize("fstype", ["ext4", "xfs", "btrfs", "fuseblk", None])
def test_local_disks_are_not_warned_of(fstype: str | None) -> None:
    assert filesystem_warnings("/x", fstype) == []
