"""A real small file system fills in the middle of a save: the error names it, the last tag stays, saving goes on."""

from pathlib import Path

import pytest
import torch

from tests.support.file_systems import mounted
from tests.support.tags import equal_bits, fields, load_tag, save_tag, tag_to_load, write_padding, write_share
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
        with pytest.raises(StoreError, match=r"The disk is full: checkpoint second .* untouched") as caught, writer:
            for number in range(16):
                write_padding(writer, f"x{number}", tensors["x"].nbytes)
            writer.publish(fields(2), [write_share(writer, tensors)])
        assert str(disk) in str(caught.value) and "free there" in str(caught.value)
        assert sorted(path.name for path in disk.iterdir()) == [".tiered_zero.lock", "first", "latest"]
        info, skipped = tag_to_load(disk), find_checkpoint(disk).lines
        assert (info.tag, skipped) == ("first", ()) and equal_bits(load_tag(info.path), tensors)
        save_tag(disk, "third", tensors, 3)
        assert tag_to_load(disk).tag == "third"
