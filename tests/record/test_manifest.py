"""A manifest comes back as it was, and any damage to it is known."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.json_files import read_body, with_body
from tiered_zero.errors import StoreError
from tiered_zero.record import manifest
from tiered_zero.record.files import confirm_file, discard_file, prepare_file
from tiered_zero.record.manifest import Manifest, Range, Record

STATE = Manifest(
    run_id="r",
    step=3,
    capacity_nbytes=1 << 20,
    weights=(1.0, 2.5),
    metadata={"loss": [1.5, None], "text": "ä"},
    records=(Record(name="layer.0/w\n", nbytes=5000, committed=True, offsets=(0, 8192)),),
    ranges={"layer.0/w\n": [Range(0, 4096, 1, 2**64 - 1), Range(4096, 8192, 0, None)]},
)
DATA = STATE.encode()


def test_round_trip(tmp_path: Path) -> None:
    assert manifest.load(tmp_path) == (None, None)
    prepare_file(tmp_path / manifest.MANIFEST_NAME, DATA)
    assert manifest.load(tmp_path) == (None, STATE)
    confirm_file(tmp_path / manifest.MANIFEST_NAME)
    prepare_file(tmp_path / manifest.MANIFEST_NAME, DATA)
    assert manifest.load(tmp_path) == (STATE, STATE)
    discard_file(tmp_path / manifest.MANIFEST_NAME)
    discard_file(tmp_path / manifest.MANIFEST_NAME)
    assert manifest.load(tmp_path) == (STATE, None)
    assert (tmp_path / manifest.MANIFEST_NAME).stat().st_mode & 0o777 == 0o600


@given(st.integers(0, len(DATA) - 1), st.integers(1, 255))
def test_no_changed_byte_passes(place: int, difference: int) -> None:
    data = bytearray(DATA)
    data[place] ^= difference
    try:
        decoded = Manifest.decode(bytes(data), Path("m"))
    except StoreError:
        return
    assert decoded == STATE, "only what means nothing (the last line's end, spaces) may change"


@given(st.integers(0, len(DATA) - 2))
def test_no_cut_manifest_passes(length: int) -> None:
    with pytest.raises(StoreError):
        Manifest.decode(DATA[:length], Path("m"))


def test_a_torn_next_one_counts_as_absent_a_damaged_current_one_does_not(tmp_path: Path) -> None:
    prepare_file(tmp_path / manifest.MANIFEST_NAME, DATA)
    confirm_file(tmp_path / manifest.MANIFEST_NAME)
    prepare_file(tmp_path / manifest.MANIFEST_NAME, DATA[:-5])
    assert manifest.load(tmp_path) == (STATE, None)
    (tmp_path / manifest.MANIFEST_NAME).write_bytes(DATA[:-5])
    with pytest.raises(StoreError, match="is damaged"):
        manifest.load(tmp_path)


@pytest.mark.parametrize("version", [1, 3, 6])
def test_another_version_is_refused_by_name(version: int) -> None:
    data = DATA.replace(b'"version": 5', b'"version": %d' % version)
    found = rf"version 5, found tiered_zero\.store version {version}; read it with the release that wrote it\.$"
    with pytest.raises(StoreError, match=found):
        Manifest.decode(data, Path("m"))


@pytest.mark.parametrize(
    "wrong",
    [
        [[0, 8192, 0, 1], [4096, 8192, 0, 1]],
        [[4096, 8192, 0, 1], [0, 4096, 0, 1]],
        [[4096, 4096, 0, 1]],
        [[0, 12288, 0, 1]],
        [[0, 5000, 0, 1]],
        [[0, 4096, 2, 1]],
        [[0, 2**63, 0, 1]],
        [[0, 4096, 0, 2**64]],
        [[0, 4096, 0]],
        [[0, 4096, True, 1]],
    ],
)
def test_ranges_that_no_store_writes_are_refused(wrong: list[list[int]]) -> None:
    body = read_body(DATA)
    body["ranges"]["layer.0/w\n"] = wrong
    with pytest.raises(StoreError, match=r"m is not a tiered_zero\.store \("):
        Manifest.decode(with_body("tiered_zero.store", body), Path("m"))


def test_metadata_that_is_not_json_is_refused() -> None:
    with pytest.raises(StoreError, match="must be JSON"):
        Manifest(run_id="r", step=1, capacity_nbytes=0, weights=(1.0,), metadata={"tensor": object()}).encode()
