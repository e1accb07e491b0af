"""The section tiered_zero.checkpoint, and DeepSpeed's own section of that name."""

from typing import Any

import pytest

from tests.config.test_load import load_with, refused
from tiered_zero.config.deepspeed_keys import Fate

NVME = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}}


def with_checkpoint(zero: Any = NVME, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": zero, "tiered_zero": {"checkpoint": {"in_place": True}, **settings}}


def test_nothing_is_committed_or_resumed_unless_the_file_says_so() -> None:
    section = load_with().tiered_zero.checkpoint
    assert (section.in_place, section.async_save, section.resume, section.convert) == (False, False, None, False)


def test_every_key_is_read_and_explained() -> None:
    given = {"in_place": "auto", "async": True, "resume": "/runs/ck", "convert": True}
    loaded = load_with(tiered_zero={"checkpoint": given})
    section = loaded.tiered_zero.checkpoint
    assert (section.in_place, section.async_save, section.resume, section.convert) == (False, True, "/runs/ck", True)
    prefix = "tiered_zero.checkpoint."
    rows = {row.path.removeprefix(prefix): row for row in loaded.explain() if row.path.startswith(prefix)}
    assert {name: (row.value, row.source) for name, row in rows.items()} == {
        "in_place": (False, "auto"),
        "async": (True, "file"),
        "resume": ("/runs/ck", "file"),
        "convert": (True, "file"),
    }


def test_auto_is_the_default_under_the_name_in_the_file() -> None:
    loaded = load_with(tiered_zero={"checkpoint": {"async": "auto"}})
    assert any("tiered_zero.checkpoint.async = False" in notice for notice in loaded.notices)


def test_the_name_of_the_field_is_no_key() -> None:
    assert "unknown key" in refused(tiered_zero={"checkpoint": {"async_save": True}})
    assert refused(tiered_zero={"checkpoint": {"async": 3}}).startswith("tiered_zero.checkpoint.async: ")


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        (with_checkpoint({"stage": 2, "offload_optimizer": {"device": "cpu"}}), "offload_optimizer.device 'cpu'"),
        (with_checkpoint({"stage": 2}), "offload_optimizer.device 'none'"),
        (with_checkpoint({"stage": 2, "offload_optimizer": {**NVME["offload_optimizer"], "ratio": 0.5}}), "ratio 0.5"),
        (with_checkpoint(state_limits={"host": "1GiB"}), "tiered_zero.state_limits.host"),
        (with_checkpoint(checksums="off"), "found 'off'"),
    ],
)
def test_a_commit_needs_all_state_on_nvme_and_every_checksum(sections: dict[str, Any], found: str) -> None:
    text = refused(**sections)
    assert text.startswith("tiered_zero.checkpoint.in_place: expected ")
    assert found in text
    assert "in_place to false" in text


def test_async_beside_in_place_is_reported() -> None:
    loaded = load_with(zero_optimization=NVME, tiered_zero={"checkpoint": {"in_place": True, "async": True}})
    assert any("tiered_zero.checkpoint.async without effect with in_place" in notice for notice in loaded.notices)


def test_deepspeeds_section_is_reported_with_reasons() -> None:
    loaded = load_with(checkpoint={"tag_validation": "FAIL", "load_universal": True})
    assert loaded.checkpoint.tag_validation == "Fail"
    fates = {row.path: row.fate for row in loaded.explain() if row.path.startswith("checkpoint.")}
    assert fates == {"checkpoint.tag_validation": Fate.HONOURED, "checkpoint.load_universal": Fate.NO_EFFECT}
    assert not any("load_universal" in notice for notice in loaded.notices), "every checkpoint is one"


def test_another_tag_validation_is_refused() -> None:
    text = refused(checkpoint={"tag_validation": "maybe"})
    assert text.startswith("checkpoint.tag_validation: expected 'Warn', 'Fail' or 'Ignore'; found 'Maybe'")
