"""A look at a swap path full of what should not be there, and removal that never follows a link."""

import errno
import fcntl
import json
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import xxhash
from click.testing import CliRunner

from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import find_damage
from tiered_zero.cli.main import main
from tiered_zero.errors import StoreError, TieredZeroError
from tiered_zero.io.select import is_local
from tiered_zero.record import directory as swap_dir
from tiered_zero.record import manifest
from tiered_zero.record.data_files import DATA_NAME
from tiered_zero.record.directory import (
    OWNER_NAME,
    PREFIX,
    Owner,
    RunInfo,
    SwapDir,
    collect_garbage,
    leftover_notices,
    list_runs,
    read_owner,
)
from tiered_zero.record.manifest import MANIFEST_NAME, Manifest, Range, Record
from tiered_zero.record.store import SwapStore

PAGE = 4096
OLD_S = 2 * 86400

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - OLD_S,) * 2, follow_symlinks=False)


def dead_run(parent: Path, name: str = "dead", **changes: object) -> Path:
    """A run's directory whose owner has ended."""
    path = parent / f"{PREFIX}{name}"
    path.mkdir(mode=0o700)
    fields = {
        "run_id": name, "pid": 4_000_000, "host": socket.gethostname(),
        "created_s": time.time() - OLD_S, "model": "gpt", "note": "", "paths": (str(path),),
    }  # fmt: skip
    (path / OWNER_NAME).write_bytes(Owner(**{**fields, **changes}).encode())  # type: ignore[arg-type]
    (path / DATA_NAME).write_bytes(bytes(PAGE))
    return path


def only(parent: Path) -> RunInfo:
    (run,) = list_runs(parent)
    return run


def test_what_ended_runs_have_left_is_one_line_a_directory(swap_path: Path) -> None:
    assert leftover_notices([str(swap_path), str(swap_path / "absent")]) == []
    live = SwapDir.create([swap_path])
    assert leftover_notices([str(swap_path)]) == []
    (dead_run(swap_path) / DATA_NAME).write_bytes(bytes(1 << 20))
    (line,) = leftover_notices([str(swap_path)] * 2)
    assert line.startswith(f"{swap_path} holds 1.0 MiB of a run whose process has ended; ")
    assert line.endswith(f"`tiered-zero swap gc {swap_path}` removes them")
    (ended,) = [run.path for run in list_runs(swap_path) if run.state == "dead"]
    assert leftover_notices([str(swap_path)], {ended.resolve()}) == [], "the resumed run"
    dead_run(swap_path, "another")
    assert "of 2 runs whose processes have ended" in leftover_notices([str(swap_path)])[0]
    live.remove()


def test_a_linked_directory_is_not_emptied(swap_path: Path) -> None:
    precious, parent = swap_path / "precious", swap_path / "parent"
    precious.mkdir()
    parent.mkdir()
    (precious / "gold").write_text("gold")
    make_old(precious)
    (parent / f"{PREFIX}x").symlink_to("../precious")
    for options in ({}, {"committed": True, "unknown": True}):
        (item,) = collect_garbage(parent, **options)
        assert not item.removed and item.run.state == "unknown" and "a symbolic link" in item.run.reason
    assert (precious / "gold").read_text() == "gold"


def test_a_directory_that_was_replaced_by_a_link_after_the_look_is_not_emptied(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious, parent = swap_path / "precious", swap_path / "parent"
    precious.mkdir()
    parent.mkdir()
    run = dead_run(parent)
    for name in (DATA_NAME, OWNER_NAME):
        (precious / name).write_bytes((run / name).read_bytes())
    looked = swap_dir.list_runs

    def look_and_replace(path: Path) -> list[RunInfo]:
        found = looked(path)
        run.rename(swap_path / "elsewhere")
        run.symlink_to(precious)
        return found

    monkeypatch.setattr(swap_dir, "list_runs", look_and_replace)
    (item,) = collect_garbage(parent)
    assert not item.removed and "ENOTDIR" in item.reason
    assert sorted(os.listdir(precious)) == [DATA_NAME, OWNER_NAME] == sorted(os.listdir(swap_path / "elsewhere"))


def test_files_that_are_links_are_removed_and_their_targets_stay(swap_path: Path) -> None:
    gold, parent = swap_path / "gold", swap_path / "parent"
    gold.write_text("gold")
    parent.mkdir()
    run = dead_run(parent)
    (run / DATA_NAME).unlink()
    (run / DATA_NAME).symlink_to(gold)
    (run / "more").symlink_to(swap_path)
    assert collect_garbage(parent)[0].removed and list(parent.iterdir()) == []
    assert gold.read_text() == "gold"


def test_close_leaves_what_has_taken_the_directorys_place(swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    precious, parent = swap_path / "precious", swap_path / "parent"
    precious.mkdir()
    parent.mkdir()
    (precious / "gold").write_text("gold")
    directory = SwapDir.create([parent])
    directory.paths[0].rename(swap_path / "moved")
    directory.paths[0].symlink_to(precious)
    with caplog.at_level(logging.ERROR, "tiered_zero"):
        directory.remove()
    assert (precious / "gold").read_text() == "gold" and directory.paths[0].is_symlink()
    assert list((swap_path / "moved").iterdir()) == [], "the run's own files are gone wherever they are"
    assert "is not the directory that this run made" in caplog.text


def test_a_directory_below_a_run_is_not_emptied(swap_path: Path) -> None:
    run = dead_run(swap_path)
    (run / "below").mkdir()
    (run / "below" / "gold").write_text("gold")
    (item,) = collect_garbage(swap_path)
    assert not item.removed and "cannot be removed" in item.reason and (run / "below" / "gold").exists()
    assert only(swap_path).pid == 4_000_000, "it is still known as a run's"
    (run / "below" / "gold").unlink()
    assert collect_garbage(swap_path)[0].removed and list(swap_path.iterdir()) == []


def test_a_directory_with_a_runs_name_and_other_contents_is_kept(swap_path: Path) -> None:
    tree = swap_path / f"{PREFIX}main"
    tree.mkdir()
    (tree / "README.md").write_text("an unpacked archive")
    make_old(tree)
    (item,) = collect_garbage(swap_path, unknown=True)
    assert not item.removed and "'README.md', which no run makes" in item.reason and (tree / "README.md").exists()


@needs_root
def test_another_users_directory_is_never_removed_nor_read(swap_path: Path) -> None:
    run = dead_run(swap_path)
    write_manifest(run)
    for path in (run / OWNER_NAME, run / DATA_NAME, run / MANIFEST_NAME, run):
        os.chown(path, 12345, 12345)
    for options in ({}, {"committed": True, "unknown": True}):
        (item,) = collect_garbage(swap_path, **options)
        assert not item.removed and "belongs to user id 12345" in item.reason
    assert item.run.step is None
    with pytest.raises(StoreError, match="user id 12345"):
        SwapDir.open(run)
    assert (run / DATA_NAME).exists()


@needs_root
def test_another_users_files_in_a_run_are_not_read(swap_path: Path) -> None:
    run = dead_run(swap_path)
    os.chown(run / OWNER_NAME, 12345, 12345)
    assert "belongs to user id 12345" in only(swap_path).reason
    with pytest.raises(StoreError, match="belongs to user id 12345"):
        SwapDir.open(run)


LOCAL = ("ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "bcachefs")
SHARED = ("virtiofs", "fuse", "fuse.sshfs", "ocfs2", "gfs2", "nfs", "nfs4", "9p", "cifs", "lustre", "afs", None)


@pytest.mark.parametrize("fstype", [*LOCAL, *SHARED])
def test_only_on_a_local_file_system_is_an_unlocked_run_dead(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str | None
) -> None:
    assert is_local(fstype) == (fstype in LOCAL)
    monkeypatch.setattr(swap_dir, "filesystem_type", lambda path: fstype)
    run = dead_run(swap_path, host="elsewhere", pid=os.getpid())
    half = swap_path / f"{PREFIX}half"
    half.mkdir(mode=0o700)
    make_old(half)
    found = {item.run.path: item for item in collect_garbage(swap_path)}
    assert found[run].run.state == ("dead" if fstype in LOCAL else "unknown")
    assert found[run].removed == (fstype in LOCAL) and found[half].run.state == "unknown"
    if fstype not in LOCAL:
        assert f"elsewhere; lies on {fstype or 'an unknown file system'}" in found[run].reason and run.exists()
    assert all(item.removed for item in collect_garbage(swap_path, unknown=True))
    assert list(swap_path.iterdir()) == []


def test_a_live_run_is_never_removed_on_demand(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_dir, "filesystem_type", lambda path: "virtiofs")
    with SwapStoreOf(swap_path):
        (item,) = collect_garbage(swap_path, committed=True, unknown=True)
        assert not item.removed and item.run.state == "alive"


class SwapStoreOf:
    def __init__(self, parent: Path) -> None:
        self._directory = SwapDir.create([parent])

    def __enter__(self) -> SwapDir:
        return self._directory

    def __exit__(self, *_: object) -> None:
        self._directory.remove()


def test_gc_on_the_command_line_takes_unknown_ones_on_demand(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_dir, "filesystem_type", lambda path: "virtiofs")
    dead_run(swap_path)
    kept = json.loads(CliRunner().invoke(main, ["swap", "gc", str(swap_path), "--json"]).stdout)
    assert not kept["runs"][0]["removed"] and "virtiofs" in kept["runs"][0]["reason"]
    gone = json.loads(CliRunner().invoke(main, ["swap", "gc", str(swap_path), "--json", "--unknown"]).stdout)
    assert gone["runs"][0]["removed"] and list(swap_path.iterdir()) == []


STATE = Manifest(
    run_id="r",
    step=3,
    capacity_nbytes=2 * PAGE,
    weights=(1.0,),
    records=(Record(name="w", nbytes=PAGE, committed=True, offsets=(0, PAGE)),),
    ranges={"w": [Range(0, PAGE, 0, None)]},
)


def write_manifest(run: Path, data: bytes | None = None) -> None:
    (run / MANIFEST_NAME).write_bytes(STATE.encode() if data is None else data)


def replaced(run: Path, name: str) -> Path:
    (run / name).unlink(missing_ok=True)
    return run / name


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 20 << 30)


def bind(path: str) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(path)


BAD_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
    "20 GiB without a byte": sparse,
    "socket": lambda path: bind(os.path.relpath(path)),
    "empty": Path.touch,
    "nothing": lambda path: None,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [OWNER_NAME, MANIFEST_NAME, manifest.NEXT_NAME, DATA_NAME])
@pytest.mark.parametrize("kind", BAD_FILES)
def test_no_kind_of_file_blocks_fills_or_ends_a_listing(
    swap_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swap_path)
    run = dead_run(swap_path, "bad")
    write_manifest(run)
    BAD_FILES[kind](replaced(run, name))
    check_commands(swap_path)


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_is_not_read(swap_path: Path) -> None:
    run = dead_run(swap_path, "bad")
    try:
        os.mknod(replaced(run, OWNER_NAME), stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except OSError as error:
        pytest.skip(f"no devices here: {error}")
    assert "is no file" in only(swap_path).reason
    check_commands(swap_path)


def check_commands(parent: Path) -> None:
    """Every command gives a row for each directory and raises only our errors; a good run next to it is listed."""
    store = SwapStore(good := SwapDir.create([parent]), SyncEngine(), capacity_nbytes=1 << 20)
    store.write(store.reserve("w", PAGE, committed=True), memoryview(bytearray(PAGE))).wait()
    store.commit(12, {})
    store.close(remove=False)
    names = {path.name.removeprefix(PREFIX) for path in parent.iterdir() if path.name.startswith(PREFIX)}
    for command in ("ls", "du", "gc"):
        for options in ((), ("--json",)):
            arguments = ["swap", command, str(parent), *options, *(("--dry-run",) if command == "gc" else ())]
            result = CliRunner().invoke(main, arguments, catch_exceptions=False)
            assert result.exit_code in (0, 1), result.output
            if options and command == "ls":
                assert {run["run_id"] for run in json.loads(result.stdout)["runs"]} == names
    rows = {run.run_id: run for run in list_runs(parent)}
    assert rows[good.run_id].step == 12 and all(run.reason for run in rows.values())
    for run in rows.values():
        if run.run_id != good.run_id:
            for act in (lambda: SwapDir.open(run.path).release(), lambda: find_damage(run.path)):  # noqa: B023
                with suppress(TieredZeroError):
                    act()
    collect_garbage(parent, committed=True, unknown=True)
    assert not good.paths[0].exists()


def changed_owner(run: Path, **fields: object) -> None:
    """With a right checksum, so that what is in it is looked at."""
    header, body = (run / OWNER_NAME).read_bytes().splitlines()
    text = json.dumps({**json.loads(body), **fields}).encode()
    head = {**json.loads(header), "nbytes": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text)}
    (run / OWNER_NAME).write_bytes(json.dumps(head).encode() + b"\n" + text + b"\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"paths": []}, {"paths": [5]}, {"paths": "x"}, {"paths": ["relative"]}, {"paths": ["/a\0b"]},
        {"paths": ["/\ud800"]}, {"paths": None}, {"created_s": "x"}, {"created_s": 1e999}, {"created_s": 10**400},
        {"pid": "1"}, {"pid": -1}, {"pid": True}, {"pid": 10**30}, {"run_id": None},
        {"model": {"a": 1}}, {"more": 1}, {"paths": ["/" + "x" * 5000]}, {"model": "\ud800\x1b[2J"},
        {"paths": ["/dev/zero"]}, {"paths": ["/proc/self"]}, {"host": "a\0b"},
    ],
    ids=lambda fields: ascii(fields)[:40],
)  # fmt: skip
def test_an_owner_file_with_anything_in_it_is_a_row(swap_path: Path, fields: dict[str, object]) -> None:
    run = dead_run(swap_path, "bad")
    changed_owner(run, **fields)
    check_commands(swap_path)


@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, '{"a":' * 2000, "\xff", "null", "[]", "{}", '"x"', ""])
@pytest.mark.parametrize("name", [OWNER_NAME, MANIFEST_NAME])
def test_text_that_no_run_writes_is_a_row(swap_path: Path, name: str, text: str) -> None:
    run = dead_run(swap_path, "bad")
    (run / name).write_bytes(text.encode("latin-1"))
    check_commands(swap_path)


@pytest.mark.parametrize("name", [b"\xff", b"a\nb", b"\x1b[31m"])
def test_names_that_cannot_be_shown_are_rows(swap_path: Path, name: bytes) -> None:
    os.mkdir(os.fsencode(swap_path) + b"/" + PREFIX.encode() + name)
    check_commands(swap_path)
    result = CliRunner().invoke(main, ["swap", "ls", str(swap_path)])
    assert result.exit_code == 0 and "\x1b[31m" not in result.output


def test_no_locks_is_unknown_and_an_error_of_ours(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = dead_run(swap_path)

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert (only(swap_path).state, collect_garbage(swap_path)[0].removed) == ("unknown", False)
    assert "ENOLCK" in only(swap_path).reason
    for act in (lambda: SwapDir.open(run), lambda: SwapDir.create([swap_path])):
        with pytest.raises(StoreError, match=r"no locks \(ENOLCK .*local disk"):
            act()
    assert [path.name for path in swap_path.iterdir()] == [run.name]
    assert collect_garbage(swap_path, unknown=True)[0].removed


def test_a_parent_in_a_circle_is_an_error_of_ours(swap_path: Path) -> None:
    (swap_path / "circle").symlink_to(swap_path / "circle")
    for path in (swap_path / "circle", swap_path / "missing", swap_path / "a\0b"):
        with pytest.raises(StoreError, match="not a directory that can be read"):
            list_runs(path)


def test_an_owner_file_is_whole_after_short_writes(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, bytes(data)[:7], offset))
    directory = SwapDir.create([swap_path])
    read_owner(directory.paths[0])
    directory.remove()
