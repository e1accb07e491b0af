"""Owner files and manifests with anything in them: rows with reasons and errors of ours, and nothing else.

TIERED_ZERO_FUZZ_EXAMPLES=100000 runs it long; otherwise with so few examples that it takes seconds, always the same.
"""

import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.damage import store_damage
from tests.support.inspection.insides import find_damage
from tiered_zero.errors import TieredZeroError
from tiered_zero.record.data_files import DATA_NAME
from tiered_zero.record.directory import OWNER_NAME, PREFIX, Owner, SwapDir, collect_garbage, list_runs
from tiered_zero.record.manifest import MANIFEST_NAME, NEXT_NAME, Manifest, Range, Record
from tiered_zero.record.store import SwapStore

PAGE = 4096
EXAMPLES = int(os.environ.get("TIERED_ZERO_FUZZ_EXAMPLES", "150"))
fuzz = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, PAGE, 2**31, 2**62, 2**63, 2**64, 10**400, 1e308, 5e-324, float("inf"), float("nan")])
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["", "\0", "/", "/dev/zero", "/proc/self", "\ud800", "..", "/" + "x" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def changed(draw: st.DrawFn, value: Any, depth: int = 0) -> Any:
    """`value` with one thing in it replaced, removed or added."""
    if depth < 4 and isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        if not draw(st.integers(0, 7)):
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: changed(draw, value[key], depth + 1)}
    if depth < 4 and isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], changed(draw, value[index], depth + 1), *value[index + 1 :]]
    return draw(VALUES)


def owner_of(path: str) -> Owner:
    host = socket.gethostname()
    return Owner(
        run_id="bad", pid=4_000_000, host=host, created_s=1.0, model="gpt", note="", paths=(path,),
    )  # fmt: skip


@st.composite
def owners(draw: st.DrawFn) -> bytes:
    return changed_file(draw, owner_of("/PATH").encode())


STATE = Manifest(
    run_id="bad",
    step=3,
    capacity_nbytes=4 * PAGE,
    weights=(1.0,),
    metadata={"loss": 1.0},
    records=(
        Record(name="w", nbytes=PAGE, committed=True, offsets=(0, PAGE)),
        Record(name="v", nbytes=PAGE, committed=True, offsets=(2 * PAGE, 3 * PAGE)),
    ),
    ranges={"w": [Range(0, PAGE, 0, 1)], "v": [Range(0, PAGE, 1, None)]},
)


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    return changed_file(draw, STATE.encode())


def changed_file(draw: st.DrawFn, whole: bytes) -> bytes:
    """With a right checksum, so that what is in it is looked at; or with any header."""
    header, body = whole.splitlines()
    text = json.dumps(changed(draw, json.loads(body))).encode()
    head = {**json.loads(header), "nbytes": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text)}
    if not draw(st.integers(0, 5)):
        head = changed(draw, head)
    return json.dumps(head).encode() + b"\n" + text + b"\n"


def check(parent: Path) -> None:
    (run,) = list_runs(parent)
    assert run.reason and run.state in ("dead", "unknown")
    for act in (
        lambda: store_damage(run.paths),
        lambda: find_damage(run.path),
        lambda: recover(run.path),
    ):
        with suppress(TieredZeroError):
            act()
    collect_garbage(parent)
    collect_garbage(parent, committed=True, unknown=True)


def recover(path: Path) -> None:
    directory = SwapDir.open(path)
    try:
        SwapStore.recover(directory, SyncEngine()).close(remove=False)
    finally:
        directory.release()


def make_run(parent: Path) -> Path:
    path = parent / f"{PREFIX}bad"
    path.mkdir(mode=0o700)
    whole = owner_of(str(path))
    (path / OWNER_NAME).write_bytes(whole.encode())
    (path / MANIFEST_NAME).write_bytes(STATE.encode())
    (path / DATA_NAME).write_bytes(bytes(4 * PAGE))
    return path


@fuzz
@given(owners())
def test_any_owner_file(data: bytes) -> None:
    parent = Path(tempfile.mkdtemp())
    try:
        path = make_run(parent)
        (path / OWNER_NAME).write_bytes(data)
        check(parent)
    finally:
        shutil.rmtree(parent)


@fuzz
@given(manifests(), st.booleans())
def test_any_manifest(data: bytes, prepared: bool) -> None:
    parent = Path(tempfile.mkdtemp())
    try:
        path = make_run(parent)
        (path / (NEXT_NAME if prepared else MANIFEST_NAME)).write_bytes(data)
        check(parent)
    finally:
        shutil.rmtree(parent)
