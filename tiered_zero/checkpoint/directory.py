"""The tags of a save directory: which are there and whole, which is the newest, what is damaged."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, final

from tiered_zero.checkpoint.commit import COMMIT_ID
from tiered_zero.checkpoint.committed import ON_ITS_HOST, find_missing, held_commit, is_committed
from tiered_zero.checkpoint.save_directory import LATEST_NAME, LOCK_NAME, OLD, TEMPORARY, check_tag, hidden_tag
from tiered_zero.checkpoint.tag_manifest import MANIFEST_NAME, MOST_NBYTES, TagManifest, WrittenBy
from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB
from tiered_zero.store.directory import OWNER_NAME
from tiered_zero.store.files import disk_nbytes, error_text, kind_text, open_directory, read_file

_DATA_FILE: Final = re.compile(r"data-\d{5}\.bin")
_DCP_METADATA: Final = ".metadata"
_INDEPENDENT: Final = "To keep a step, load it into a run without in_place and save there, or `export` its weights"

_PLAIN_MANIFEST_NBYTES: Final = 32 * MIB
"""A manifest may be larger only beside data: what is decoded takes some twenty times the bytes of its text."""


@final
@dataclass(frozen=True, kw_only=True)
class TagInfo:
    """One tag of a save directory. `reason`: why it is not complete, else "". `nbytes`: on the disk.

    `run_id`, `commit_id`: of an in-place commit, its run's and its own. `held_id`: id of the commit that the run holds
    now. `step`, `kind`, `written_by`, `created_s` (seconds since the epoch): None, "" and 0.0 without a manifest.
    `manifest`: of a tag that `find_tag` has read alone. `is_foreign`: another program's.
    """

    tag: str
    path: Path
    step: int | None = None
    kind: str = ""
    nbytes: int = 0
    complete: bool = False
    reason: str = ""
    written_by: WrittenBy | None = None
    created_s: float = 0.0
    run_id: str = ""
    commit_id: str = ""
    held_id: str | None = None
    manifest: TagManifest | None = None
    is_foreign: bool = False

    @property
    def is_superseded(self) -> bool:
        """Whether its run has committed again in place since, and holds that alone."""
        return self.held_id is not None and self.held_id != self.commit_id


def read_manifest(tag_dir: str | os.PathLike[str]) -> TagManifest:
    """The manifest of a whole tag: every file is there with its size. Checksums are for `verify` and for reading.

    Raises StoreError, with the reason, for anything else; a foreign checkpoint is named as what it is.
    """
    path = Path(tag_dir)
    with _opened(path) as fd:
        manifest = _read(fd, path)
        if problem := _problem(fd, manifest):
            raise StoreError(f"{path} {problem}.")
    return manifest


def read_declared(tag_dir: str | os.PathLike[str]) -> TagManifest:
    """The manifest of a tag, whether or not the files that it declares are there. Raises StoreError."""
    path = Path(tag_dir)
    with _opened(path) as fd:
        return _read(fd, path)


def tag_path(save_dir: str | os.PathLike[str], tag: str) -> Path:
    """Return the path of the tag, also while a writer that ended was replacing it. Raises StoreError for a bad tag."""
    path = Path(save_dir) / check_tag(tag)
    if not os.path.lexists(path):
        for name in _names(Path(save_dir)):
            if hidden_tag(OLD, name) == tag:
                return path.with_name(name)
    return path


def list_tags(save_dir: str | os.PathLike[str]) -> list[TagInfo]:
    """The tags, oldest first, also damaged and unfinished ones and other programs' checkpoints, each with the reason.

    Raises StoreError where the directory cannot be read.
    """
    path = Path(save_dir)
    names = _names(path)
    found = [_inspect(path / name, tag) for name in names if (tag := _visible_tag(name, names)) is not None]
    infos = sorted((info for info in found if info is not None), key=_age)
    held = {info.commit_id: info.tag for info in infos if info.kind == "in_place" and info.complete}
    for index, info in enumerate(infos):
        if info.is_superseded and (newer := held.get(info.held_id or "")) is not None:
            reason = f"it was superseded by {newer}: an in-place commit holds one step. {_INDEPENDENT}"
            infos[index] = replace(info, reason=reason)
    return infos


def read_latest(save_dir: str | os.PathLike[str]) -> str | None:
    """The tag that `latest` names; None where there is no such file. Raises StoreError for a bad one."""
    path = Path(save_dir)
    try:
        with _opened(_real(path)) as fd:
            text = read_file(LATEST_NAME, fd, uid=os.fstat(fd).st_uid, most_nbytes=4096)
        return check_tag(text.decode().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, StoreError) as error:
        raise StoreError(f"{path / LATEST_NAME} names no checkpoint: {error_text(error)}.") from error


def find_tag(load_dir: str | os.PathLike[str], tag: str | None = None) -> tuple[TagInfo, list[str]]:
    """The tag to load, and what was skipped on the way to it, one line each.

    A given tag is taken or refused; else the one that `latest` names, else the newest complete one. Raises StoreError.
    """
    path = Path(load_dir)
    if tag is not None:
        found = tag_path(path, tag)
        if not os.path.lexists(found):
            raise StoreError(f"There is no checkpoint {found}.{_others(path)}")
        return _found(tag, found), []
    skipped = []
    named: str | None = None
    try:
        named = read_latest(path)
        if named is not None:
            found = tag_path(path, named)
            return _found(named, found), []
        skipped.append(f"{path} has no file {LATEST_NAME}")
    except StoreError as error:
        skipped.append(f"Skipped what {path / LATEST_NAME} names: {error}")
    if MANIFEST_NAME in _names(path):
        raise StoreError(f"{path} is one checkpoint. Name the directory that it is in, and {path.name!r} as the tag.")
    infos, others = list_tags(path), dict[str, list[str]]()
    for info in reversed(infos):
        if info.complete:
            return info, [*skipped, *_skipped(others)]
        if info.tag != named:  # else it is said above
            others.setdefault(info.reason.removesuffix("."), []).append(info.tag)
    skipped += _skipped(others)
    if any(info.kind == "in_place" and info.held_id is None for info in infos):
        skipped.append(ON_ITS_HOST)
    names = _content(path)
    if infos or LATEST_NAME in names:
        raise StoreError(f"There is no complete checkpoint in {path}. {' '.join(skipped)}")
    if problem := _foreign(names):
        raise StoreError(f"{path} is {problem}")
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    raise StoreError(
        f"Expected checkpoints of save_checkpoint in {path}; found {listed or 'nothing'}. Name the directory that "
        "holds them, or, to begin at step 0, one that is empty."
    )


def _found(tag: str, path: Path) -> TagInfo:
    """Raises StoreError unless it is whole."""
    manifest = read_manifest(path)
    return replace(_info(tag, path, manifest), manifest=manifest)


def _skipped(tags: Mapping[str, Sequence[str]]) -> list[str]:
    """One line for each reason, of its tags from the newest to the oldest."""
    return [
        f"Skipped {tags[0]}{f' and {len(tags) - 1} before it' if len(tags) > 1 else ''}: {reason}."
        for reason, tags in tags.items()
    ]


def nothing_to_load(load_dir: str | os.PathLike[str]) -> str:
    """Say why a run that resumes from `load_dir` begins at step 0; "" if there is something to load or to refuse.

    A new start is a directory that is missing or empty, or whose first save was never completed. Raises StoreError.
    """
    path = Path(load_dir)
    if not os.path.lexists(path):
        return "it does not exist"
    names = _content(path)
    if not names:
        return "it is empty"
    unfinished = all(hidden_tag(TEMPORARY, name) is not None for name in names)
    return "its first save was not completed" if unfinished else ""


def is_unused(save_dir: str | os.PathLike[str]) -> bool:
    """Whether the directory is there, with nothing in it but our lock and what saves that never ended have left.
    Raises StoreError."""
    path, ours = Path(save_dir), (LOCK_NAME, "lost+found")
    return path.is_dir() and all(name in ours or hidden_tag(TEMPORARY, name) is not None for name in _names(path))


def _content(path: Path) -> list[str]:
    """List names in `path`, without what a new run may find there: hidden files, lost+found, runs' swap directories."""
    shown = (TEMPORARY, OLD, _DCP_METADATA)
    names = [name for name in _names(path) if name != "lost+found" and (name[0] != "." or name.startswith(shown))]
    return [name for name in names if not os.path.lexists(path / name / OWNER_NAME)]


def _others(path: Path) -> str:
    """The newest complete tags, as a sentence behind another; empty: none."""
    try:
        complete = [info.tag for info in list_tags(path) if info.complete]
    except StoreError:
        return ""
    return f" The newest there: {', '.join(reversed(complete[-4:]))}." if complete else ""


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A descriptor of the directory `path`, which is no symbolic link. Raises StoreError."""
    try:
        parent = Path(os.path.realpath(path.parent))
        fd = open_directory(parent / path.name if path.name else parent)
    except FileNotFoundError:
        raise StoreError(
            f"There is no checkpoint {path}. Name a directory that save_checkpoint wrote; a new run resumes from none."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise StoreError(f"{path} cannot be read: {_what_is_there(path, error)}.") from error
    with fd:
        yield fd


def _what_is_there(path: Path, error: Exception) -> str:
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return error_text(error)
    if stat.S_ISREG(mode):
        return "it is a file, perhaps of torch.save; expected a directory that save_checkpoint wrote"
    return error_text(error) if stat.S_ISDIR(mode) else f"it is {kind_text(mode)}; expected a directory"


def _real(save_dir: Path) -> Path:
    """A save directory may be a symbolic link, as `SaveDirectory.open` has it; a tag is none."""
    return Path(os.path.realpath(save_dir))


def _names(save_dir: Path) -> list[str]:
    path = _real(save_dir)
    with _opened(path) as fd:
        try:
            return sorted(os.listdir(fd))
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error_text(error)}.") from error


def _read(fd: int, path: Path) -> TagManifest:
    """The manifest in the directory that is open at `fd`. Raises StoreError."""
    try:
        most_nbytes = min(MOST_NBYTES, _PLAIN_MANIFEST_NBYTES + disk_nbytes(fd) // 64)
        data = read_file(MANIFEST_NAME, fd, uid=os.fstat(fd).st_uid, most_nbytes=most_nbytes)
    except FileNotFoundError:
        foreign = _foreign(os.listdir(fd))
        raise StoreError(
            f"{path} is {foreign}" if foreign else f"{path} is not a checkpoint: it has no {MANIFEST_NAME}."
        ) from None
    except (OSError, StoreError) as error:
        raise StoreError(f"{path / MANIFEST_NAME} cannot be read: {error_text(error)}.") from error
    return TagManifest.decode(data, path / MANIFEST_NAME)


def _problem(fd: int, manifest: TagManifest) -> str:
    """Describe why the tag that is open at `fd` is not whole, as words behind its name; empty: it is."""
    for name, nbytes in manifest.files.items():
        if problem := _file_problem(fd, name, nbytes):
            return f"is not a whole checkpoint: {name} {problem}"
    if manifest.swap is not None and (problem := _swap_problem(manifest)):
        return f"cannot be loaded: {problem}"
    return ""


def _file_problem(fd: int, name: str, nbytes: int) -> str:
    """Describe what is wrong with a data file, without opening it; empty: nothing."""
    try:
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be looked at ({error_text(error)})"
    if not stat.S_ISREG(status.st_mode):
        return f"is {kind_text(status.st_mode)}"
    if status.st_uid != (owner := os.fstat(fd).st_uid):
        return f"belongs to user id {status.st_uid}, the directory to {owner}"
    if status.st_size != nbytes:
        return f"has {status.st_size} bytes; expected {nbytes}"
    return ""


def _swap_problem(manifest: TagManifest) -> str:
    """Describe why the state that an in-place commit points to is not there any more; empty: it is."""
    assert manifest.swap is not None
    first = Path(manifest.swap["paths"][0])
    try:
        committed = held_commit(manifest)
        if committed is None:
            return f"its state rested in {first}, which is gone, or on another host"
        if is_committed(manifest, committed):
            return find_missing(committed)
    except StoreError as error:
        return f"its state rests in {first}: {error}"
    again = ", which was committed again," if committed.step == manifest.step else ""
    return (
        f"it was superseded: an in-place commit holds one step, and {first} is at step {committed.step}{again} by now. "
        f"Load that one. {_INDEPENDENT}"
    )


def _foreign(names: Sequence[str]) -> str:
    """Name the other program whose checkpoint has these files, and what to do; empty: none that is known."""
    if any(_DATA_FILE.fullmatch(name) for name in names):
        return f"a checkpoint that has lost its {MANIFEST_NAME}, without which its data cannot be read. Take another."
    if _DCP_METADATA in names or any(name.endswith(".distcp") for name in names):
        return (
            "a checkpoint of torch.distributed.checkpoint's own format, whose metadata is a pickle: reading it could "
            "run code. Load it with the program that wrote it, and pass its values to load_state_dict."
        )
    if any(name.endswith(("_model_states.pt", "_optim_states.pt")) or name == "zero_to_fp32.py" for name in names):
        return (
            "a checkpoint of DeepSpeed, which is pickled: reading it could run code. Convert it with its "
            "zero_to_fp32.py (--safe_serialization), and load the weights into the model before initialize()."
        )
    if any(name.endswith((".pt", ".pth", ".bin", ".ckpt", ".pkl")) for name in names):
        return (
            "a directory of torch.save's files, which are pickled. Load them with torch.load(weights_only=True) and "
            "pass them to load_state_dict."
        )
    if any(name.endswith(".safetensors") for name in names):
        return "a directory of exported weights (safetensors), without optimizer state. Load it with from_pretrained."
    return ""


def _visible_tag(name: str, names: Sequence[str]) -> str | None:
    """The tag that a directory of this name has or is to have; None: it is none."""
    if (old := hidden_tag(OLD, name)) is not None:
        return None if old in names else old
    if (temporary := hidden_tag(TEMPORARY, name)) is not None:
        return temporary
    try:
        return check_tag(name)
    except StoreError:
        return None


def _inspect(path: Path, tag: str) -> TagInfo | None:
    """None for what is no checkpoint at all."""
    info = TagInfo(tag=tag, path=path)
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            return None
        with _opened(path) as fd:
            info = replace(info, nbytes=disk_nbytes(fd))
            if hidden_tag(TEMPORARY, path.name) is not None:
                return replace(info, reason="it is being written or removed, or its writer ended before it was done")
            if MANIFEST_NAME not in (names := os.listdir(fd)):
                if OWNER_NAME in names:
                    return None
                is_own = any(_DATA_FILE.fullmatch(name) for name in names)
                foreign = _foreign(names)
                return replace(info, reason=f"it is {foreign}", is_foreign=not is_own) if foreign else None
            manifest = _read(fd, path)
            problem = _problem(fd, manifest)
            return _info(tag, path, manifest, problem and f"it {problem}", info.nbytes)
    except OSError as error:
        return replace(info, reason=f"it cannot be read: {error_text(error)}")
    except StoreError as error:
        return replace(info, reason=str(error))


def _info(tag: str, path: Path, manifest: TagManifest, reason: str = "", nbytes: int = 0) -> TagInfo:
    held_id = None
    if manifest.swap is not None:
        with suppress(StoreError):
            held = held_commit(manifest)
            held_id = None if held is None else str(held.metadata.get(COMMIT_ID))
    return TagInfo(
        tag=tag,
        path=path,
        step=manifest.step,
        kind=manifest.kind,
        nbytes=nbytes or manifest.data_nbytes,
        complete=not reason,
        reason=reason,
        written_by=manifest.written_by,
        run_id="" if manifest.swap is None else manifest.swap["run_id"],
        commit_id="" if manifest.swap is None else manifest.swap[COMMIT_ID],
        held_id=held_id,
        created_s=manifest.written_by.created_s,
    )


def _age(info: TagInfo) -> tuple[int, float, str]:
    return (-1 if info.step is None else info.step, info.created_s, info.tag)
