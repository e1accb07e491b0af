"""A manifest comes back as it was, and any damage to it is known."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.errors import StoreError
from tiered_zero.store import manifest
from tiered_zero.store.checked_json import encode_checked
from tiered_zero.store.manifest import Manifest, Record
from tiered_zero.store.ranges import Range

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
    manifest.prepare(tmp_path, DATA)
    assert manifest.load(tmp_path) == (None, STATE)
    manifest.confirm(tmp_path)
    manifest.prepare(tmp_path, DATA)
    assert manifest.load(tmp_path) == (STATE, STATE)
    manifest.discard(tmp_path)
    manifest.discard(tmp_path)
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
    manifest.prepare(tmp_path, DATA)
    manifest.confirm(tmp_path)
    manifest.prepare(tmp_path, DATA[:-5])
    assert manifest.load(tmp_path) == (STATE, None)
    (tmp_path / manifest.MANIFEST_NAME).write_bytes(DATA[:-5])
    with pytest.raises(StoreError, match="is damaged"):
        manifest.load(tmp_path)


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match=r"version 1, found tiered_zero\.store version 2"):
        Manifest.decode(DATA.replace(b'"version": 1', b'"version": 2'), Path("m"))


def test_a_record_of_an_earlier_version_is_read_without_its_dtype_and_shape() -> None:
    body = json.loads(DATA.splitlines()[1])
    for record in body["records"]:
        record |= {"dtype": "uint8", "shape": []}
    assert Manifest.decode(encode_checked("tiered_zero.store", 1, body), Path("m")) == STATE


def test_metadata_that_is_not_json_is_refused() -> None:
    with pytest.raises(StoreError, match="must be JSON"):
        Manifest(run_id="r", step=1, capacity_nbytes=0, weights=(1.0,), metadata={"tensor": object()}).encode()
