"""A real small file system fills in the middle of a save: the error names it, the last tag stays, saving goes on."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.file_systems import mounted
from tests.support.inspection.insides import list_tags, prune
from tests.support.tags import (
    equal_bits,
    fields,
    load_tag,
    save_tag,
    tag_to_load,
    unfinished,
    write_padding,
    write_share,
)
from tiered_zero.checkpoint.tag import find_checkpoint
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_the_disk_fills_in_mid_save(swap_path: Path, kind: str) -> None:
    tensors = {"x": torch.randn(2 * MIB)}
    with mounted(kind, swap_path) as disk:
        save_tag(disk, "first", tensors, 1)
        with pytest.raises(StoreError, match=r"The checkpoint needs .* are free\. Free space there"):
            TagWriter.begin(disk, "second", needed_nbytes=60 * MIB)
        writer = TagWriter.begin(disk, "second")  # which takes more than it had announced
        with (
            pytest.raises(StoreError, match=r"The disk is full: checkpoint second .* untouched") as caught,
            writer,
            writer.writing(),
        ):
            for number in range(16):
                write_padding(writer, f"x{number}", tensors["x"].nbytes)
            writer.publish(fields(2), [write_share(writer, tensors)])
        assert str(disk) in str(caught.value) and "free there" in str(caught.value)
        assert sorted(path.name for path in disk.iterdir()) == [".tiered_zero.lock", "first", "latest"]
        info, skipped = tag_to_load(disk), find_checkpoint(disk).lines
        assert (info.tag, skipped) == ("first", ()) and equal_bits(load_tag(info.path), tensors)
        save_tag(disk, "third", tensors, 3)
        assert tag_to_load(disk).tag == "third"


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_prune_needs_no_free_block(swap_path: Path, kind: str) -> None:
    with mounted(kind, swap_path) as disk:
        for step in (1, 2, 3):
            save_tag(disk, f"s{step}", {"x": torch.randn(1000)}, step)
        with (disk / "other").open("wb", buffering=0) as file:
            for nbytes in (MIB, 4096):
                with suppress(OSError):
                    while True:
                        file.write(bytes(nbytes))
            with suppress(OSError):
                os.fsync(file.fileno())
        assert os.statvfs(disk).f_bavail == 0
        assert [info.tag for info in prune(disk, keep=1)] == ["s1", "s2"]
        assert [info.tag for info in list_tags(disk)] == ["s3"] and unfinished(disk) == []
