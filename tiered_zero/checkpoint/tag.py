"""Find, open and prune tags (saved checkpoints): check whether a tag is whole, choose one to load, return its reader.

A tag of an in-place commit is a pointer: it leads to the newest commit of its run. A load that passes `tag` takes only
that tag's commit: it is refused if the run has committed again since."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final, final

from pydantic import Field, ValidationError
from pydantic_core import to_json

from tiered_zero.checkpoint.index import (
    DATA_FILE,
    LATEST_NAME,
    MANIFEST_NAME,
    TAG,
    RankPart,
    StoreLocation,
    TagManifest,
    WrittenBy,
    check_places,
    check_tag,
    file_name,
)
from tiered_zero.checkpoint.load import TensorReader
from tiered_zero.checkpoint.tag_writer import SaveDirectory, change_under_way
from tiered_zero.errors import StoreError
from tiered_zero.io.select import PROBE_PREFIX
from tiered_zero.record.data_files import (
    DATA_NAME,
    RecordFiles,
    RecordReader,
    Stripes,
    check_data_files,
)
from tiered_zero.record.directory import OWNER_NAME, Owner, read_owner
from tiered_zero.record.files import (
    MOST_NBYTES,
    StrictModel,
    disk_nbytes,
    error_text,
    first_problem,
    kind_text,
    names_in,
    next_path,
    open_directory,
    open_of_owner,
    read_file,
)
from tiered_zero.record.manifest import Manifest, choose
from tiered_zero.record.manifest import load as load_manifests
from tiered_zero.sizes import MIB

logger = logging.getLogger("tiered_zero")

# -- commits ---------------------------------------------------------------------------------------------------------


COMMIT_ID: Final = "commit_id"
"""The metadata key of a commit's id. All stores (sets of swap files) of the commit have it. Rank 0 draws the id at
random, because two commits may have the same step."""

DECIDED_BY: Final = "decided_by"
"""The metadata key for the location of the store that decides a commit. The other stores of the commit have this
key."""

ON_ITS_HOST: Final = (
    "Resume an in-place commit with the same number of ranks, each on the host that has its part (torchrun "
    "--node-rank), and with tiered_zero.checkpoint.in_place and resume; where a disk is lost, name another checkpoint."
)


@final
class Commit(StrictModel):
    """A run's newest in-place commit, read from the store (set of swap files) that decides it. `checkpoint`: the
    checkpoint's manifest, for all ranks; its records lie in `stores`. `ranks`: each rank's part."""

    commit_id: str
    checkpoint: TagManifest
    ranks: Annotated[list[RankPart], Field(min_length=1)]

    @property
    def stores(self) -> list[StoreLocation]:
        """The stores of all ranks, in the order of the manifest."""
        return [store for rank in self.ranks for store in rank.stores]

    @classmethod
    def read(cls, path: Path) -> Commit:
        """Read the newest commit of a run. `path`: the first directory of any store of the run. Raises StoreError."""
        committed = _committed(path)
        if DECIDED_BY in committed.metadata:
            with refused(path):
                decides = StoreLocation.model_validate(committed.metadata[DECIDED_BY])
            path, committed = decides.first, _committed(decides.first)
            if committed.run_id != decides.run_id:
                raise StoreError(f"{path} belongs to another run than the one whose commit is looked for.")
        commit = cls.of(committed, path)
        first = commit.stores[0]
        if (first.run_id, first.first) != (committed.run_id, path):
            raise StoreError(f"{path} belongs to other directories than its commit says; it was copied or moved.")
        return commit

    @classmethod
    def of(cls, committed: Manifest, path: Path) -> Commit:
        """Decode the commit in `committed`, the manifest of the store that decides the commit for all ranks. `path`:
        the store's first directory. Raises StoreError."""
        with refused(path):
            return cls.model_validate_json(to_json(committed.metadata))


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Return a context manager that turns a ValueError into the StoreError "`path` holds no in-place commit"."""
    try:
        yield
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise StoreError(f"{path} holds no in-place commit of a run ({why}).") from error


def find_missing(commit: Commit) -> str:
    """Return a text that names a missing part of a commit; "" if all parts are on this host. Raises StoreError."""
    step, own = commit.checkpoint.step, {COMMIT_ID: commit.commit_id}
    for store in commit.stores:
        found = [one for one in load_manifests(store.first) if one is not None and one.run_id == store.run_id]
        if not any(one.is_state(step, own) for one in found):
            return f"a part of it rests in {store.first}, which is not here, or does not hold step {step}"
    return ""


def owner_of(path: Path, which: str = "") -> Owner:
    """Return the owner of a swap directory. `which`: names the commit in errors, such as "of step 5 ". Raises
    StoreError."""
    try:
        return read_owner(path)
    except StoreError as error:
        raise StoreError(
            f"A part of the commit {which}rests in {path}, which cannot be read here: "
            f"{error if os.path.lexists(path) else 'it is gone, or on another host.'} {ON_ITS_HOST} For other ranks "
            "save without in_place."
        ) from error


def _committed(path: Path) -> Manifest:
    """Return the manifest of the committed state in `path`. Raises StoreError if there is none."""
    committed, _ = load_manifests(path)
    if committed is None:
        raise StoreError(f"{path} holds no committed state: its run ended before its first commit, or has none.")
    return committed


# -- one tag -----------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class TagInfo:
    """The result of `look_at` for one tag. `complete`: whether the tag can be loaded. `reason`: why it cannot be
    loaded; "" if it can. `nbytes`: its bytes on disk. `save_id`: see `TagManifest`. `is_unfinished`: whether a process
    is writing or removing the tag, or ended while it did so. `is_foreign`: whether it is another program's checkpoint.
    `created_s`: seconds since the epoch; 0.0 if unknown.

    These fields are for in-place commits only. `run_id`: the run that committed. `swap`: the directory of the run's
    newest commit. `held_id`: the id of that commit. `swap` and `held_id` are None if that commit is not found on this
    host."""

    tag: str
    path: Path
    step: int | None = None
    kind: str = ""
    nbytes: int = 0
    complete: bool = False
    reason: str = ""
    written_by: WrittenBy | None = None
    created_s: float = 0.0
    save_id: str = ""
    run_id: str = ""
    swap: Path | None = None
    held_id: str | None = None
    is_unfinished: bool = False
    is_foreign: bool = False

    @property
    def is_superseded(self) -> bool:
        """Whether the tag's commit was replaced by a newer in-place commit of its run."""
        return self.held_id is not None and self.held_id != self.save_id


_PLAIN_MANIFEST_NBYTES: Final = 32 * MIB
"""Manifests of up to this size are always read. A larger one is read only if the tag's files are large too. Otherwise
it may be hostile: decoding a manifest takes about twenty times its size in memory."""

_NO_CHECKPOINT: Final = f"it is not a checkpoint: it has no {MANIFEST_NAME}"
_LOST: Final = f"a checkpoint that has lost its {MANIFEST_NAME}, without which its data cannot be read. Take another"
_FOREIGN: Final = {
    DATA_FILE.pattern: _LOST,
    r"\.metadata|.*\.distcp": (
        "a checkpoint of torch.distributed.checkpoint's own format, whose metadata is a pickle: reading it could run "
        "code. Load it with the program that wrote it, and pass its values to load_state_dict"
    ),
    r".*_(model|optim)_states\.pt|zero_to_fp32\.py": (
        "a checkpoint of DeepSpeed, which is pickled: reading it could run code. Convert it with its zero_to_fp32.py "
        "(--safe_serialization), and load the weights into the model before initialize()"
    ),
    r".*\.(pt|pth|bin|ckpt|pkl)": (
        "a directory of torch.save's files, which are pickled. Load them with torch.load(weights_only=True) and pass "
        "them to load_state_dict"
    ),
    r".*\.safetensors": (
        "a directory of exported weights (safetensors), without optimizer state. Load it with from_pretrained"
    ),
}
"""Pattern of a file name -> which kind of checkpoint has such files, and advice. The first match counts."""


def _foreign(names: Iterable[str]) -> str:
    """Return the text of `_FOREIGN` (kind of checkpoint, and advice) for files of these names; "" if no pattern
    matches."""
    found = (what for pattern, what in _FOREIGN.items() if any(re.fullmatch(pattern, name) for name in names))
    return next(found, "")


def look_at(path: Path) -> tuple[TagInfo, TagManifest | None]:
    """Examine the directory of one tag without reading its data. Return the result and the manifest; the manifest is
    None if it cannot be read."""
    info = TagInfo(tag=path.name, path=path)
    manifest = None
    try:
        if not stat.S_ISDIR(mode := os.lstat(path).st_mode):
            reason = f"it is {kind_text(mode)}; expected a directory that save_checkpoint wrote"
            return replace(info, reason=reason), None
        with open_directory(path) as fd:
            info = replace(info, nbytes=disk_nbytes(fd))
            if MANIFEST_NAME not in (names := names_in(fd)):
                if change_under_way(path.parent)[1] == path.name:
                    reason = "it is being written or removed, or its writer ended before it was done"
                    return replace(info, reason=reason, is_unfinished=True), None
                foreign = "" if OWNER_NAME in names else _foreign(names)
                reason = f"it is {foreign}" if foreign else _NO_CHECKPOINT
                return replace(info, reason=reason, is_foreign=foreign not in ("", _LOST)), None
            most_nbytes = min(MOST_NBYTES, _PLAIN_MANIFEST_NBYTES + info.nbytes // 64)
            data = read_file(MANIFEST_NAME, fd, most_nbytes=most_nbytes)
            manifest = TagManifest.decode(data, Path(MANIFEST_NAME))
            info = replace(
                info,
                step=manifest.step,
                kind="full" if manifest.swap is None else "in_place",
                save_id=manifest.save_id,
                written_by=manifest.written_by,
                created_s=manifest.written_by.created_s,
            )
            wrong = (_wrong_file(fd, name, nbytes) for name, nbytes in manifest.files.items())
            reason = next((f"it is not whole: {what}" for what in wrong if what), "")
    except FileNotFoundError:
        reason = (
            "it is not there. Name a directory that save_checkpoint wrote; where nothing was saved yet, set "
            "tiered_zero.checkpoint.resume to null"
        )
    except (OSError, ValueError, StoreError) as error:  # ValueError: a NUL in the path
        reason = f"it cannot be read: {error_text(error).removesuffix('.')}"
    if manifest is not None and manifest.swap is not None:
        return _follow(info, manifest), manifest
    return replace(info, complete=not reason, reason=reason), manifest


def _wrong_file(dir_fd: int, name: str, nbytes: int) -> str:
    """Return what is wrong with the data file `name`; "" if it has `nbytes` bytes. Does not open the file."""
    try:
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return f"{name} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{name} is {kind_text(status.st_mode)}"
    return "" if status.st_size == nbytes else f"{name} has {status.st_size} bytes; expected {nbytes}"


def _follow(info: TagInfo, manifest: TagManifest) -> TagInfo:
    """Return `info` with facts about the newest commit of the tag's run. `manifest`: the tag's manifest, which
    describes an in-place commit. The tag is complete if this commit is the newest one of the run, and all its parts are
    on this host."""
    assert manifest.swap is not None, "a tag of an in-place commit"
    first = manifest.swap.first
    info = replace(info, run_id=manifest.swap.run_id)
    try:
        held, _ = load_manifests(first)
        if held is None or held.run_id != manifest.swap.run_id:
            return replace(info, reason=f"its state rested in {first}, which is gone, or on another host")
        info = replace(info, swap=first, held_id=str(held.metadata.get(COMMIT_ID)))
        again = " again" if held.step == manifest.step else ""
        superseded = (
            f"it was superseded: an in-place commit holds one step, and its run has committed step {held.step}{again} "
            f"in place since, in {first}. To keep a step, load it into a run without in_place and save there, or "
            "`export` its weights"
        )
        is_own = held.is_state(manifest.step, {COMMIT_ID: manifest.save_id})
        reason = find_missing(Commit.of(held, first)) if is_own else superseded
    except StoreError as error:
        reason = f"its state rests in {first}: {error}".removesuffix(".")
    return replace(info, complete=not reason, reason=reason)


# -- a save directory --------------------------------------------------------------------------------------------------


def list_tags(save_dir: str | os.PathLike[str]) -> list[TagInfo]:
    """Return all tags of a save directory, lowest step first. Include tags that cannot be loaded, with the reason.
    Raises StoreError if the directory cannot be read."""
    infos = []
    for name in _names(Path(save_dir)):
        path = Path(save_dir) / name
        if TAG.fullmatch(name) and path.is_dir() and not path.is_symlink():
            info, _ = look_at(path)
            if info.reason != _NO_CHECKPOINT:
                infos.append(info)
    return sorted(infos, key=_age)


def _age(info: TagInfo) -> tuple[int, float, str]:
    return (-1 if info.step is None else info.step, info.created_s, info.tag)


def read_latest(save_dir: str | os.PathLike[str]) -> str | None:
    """Return the tag that the file `latest` names; None if there is no such file. Raises StoreError for a bad file."""
    path = Path(os.path.realpath(save_dir))
    try:
        with open_directory(path) as fd:
            text = read_file(LATEST_NAME, fd, most_nbytes=4096)
        return check_tag(text.decode().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, StoreError) as error:
        raise StoreError(f"{path / LATEST_NAME} names no checkpoint: {error_text(error)}") from error


def nothing_to_load(load_dir: str | os.PathLike[str], *, resumes: bool = False) -> str:
    """Return why `load_dir` has nothing to load: it is missing or empty, or its first save was never completed. Return
    "" if it may have something. `resumes`: True if the user asks to resume from `load_dir`. Then a missing directory is
    an error, and swap directories in it count as content. Raises StoreError."""
    path = Path(load_dir)
    if not resumes and not os.path.lexists(path):
        return "it does not exist"
    names = [name for name in _content(path) if resumes or not os.path.lexists(path / name / OWNER_NAME)]
    if not names:
        return "it is empty"
    is_unfinished = len(names) == 1 and look_at(Path(os.path.realpath(path)) / names[0])[0].is_unfinished
    return "its first save was not completed" if is_unfinished else ""


def swap_directories(path: Path) -> str:
    """Return a text that names the runs' swap directories in `path`; "" if there are none. Raises StoreError."""
    runs = [name for name in _names(path) if os.path.lexists(path / name / OWNER_NAME)]
    listed = ", ".join(runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    return f"It holds swap directories ({listed}): name one of them." if runs else ""


def _content(path: Path) -> list[str]:
    """Return the names in `path`, except those that may exist before a first save: hidden files, lost+found, and the
    file in which the next `latest` is prepared."""
    passed_over = ("lost+found", next_path(Path(LATEST_NAME)).name)
    return [name for name in _names(path) if name not in passed_over and (name[0] != "." or name == ".metadata")]


def _names(save_dir: Path) -> list[str]:
    """Return the names in a save directory, which may be a symbolic link. Raises StoreError."""
    try:
        return sorted(os.listdir(os.path.realpath(save_dir)))
    except FileNotFoundError:
        raise StoreError(
            f"There is no checkpoint {save_dir}. Name a directory that save_checkpoint wrote; where nothing "
            "was saved yet, set tiered_zero.checkpoint.resume to null."
        ) from None
    except NotADirectoryError:
        raise StoreError(f"{save_dir} is no directory that save_checkpoint wrote; it may be torch.save's.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise StoreError(f"{save_dir} cannot be read: {error_text(error)}.") from error


# -- find --------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint that was found. `path`: the tag's directory, or a swap directory. `swap`: a swap directory of the
    run that committed in place; None for a full save. `lines`: messages for the log, such as which tags were skipped.
    `manifest`: the tag's manifest, if the search has read it."""

    path: Path
    swap: Path | None = None
    lines: tuple[str, ...] = ()
    manifest: TagManifest | None = field(default=None, repr=False)


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None = None) -> FoundCheckpoint:
    """Find the checkpoint to load. `directory`: a run's swap directory, one tag, or a save directory with many tags.
    `tag`: the only tag to take; None: take the tag that `latest` names, or if that cannot be loaded, the newest tag
    that can be.

    Without `tag`, a tag of an in-place commit leads to its run's newest commit ([Note: In-place commits]). Raises
    StoreError, which lists the skipped tags, if there is none."""
    path = Path(os.path.abspath(directory))
    if tag is not None:
        place = path / check_tag(tag)
        if not os.path.lexists(place):
            complete = [info.tag for info in list_tags(path) if info.complete]
            newest = f" The newest there: {', '.join(reversed(complete[-4:]))}." if complete else ""
            raise StoreError(f"There is no checkpoint {place}.{newest}")
        return _take(place, follows=False)
    if (path / OWNER_NAME).exists():
        paths = read_owner(path).paths
        return FoundCheckpoint(path=path, swap=Path(paths[0]) if str(path) in paths else path)
    if (path / MANIFEST_NAME).exists():
        return _take(path)
    skipped: list[str] = []
    named: str | None = None
    try:
        if (named := read_latest(path)) is not None:
            return _take(path / named)
        skipped.append(f"{path} has no file {LATEST_NAME}.")
    except StoreError as error:
        skipped.append(f"Skipped what {path / LATEST_NAME} names: {error}")
    infos, others = list_tags(path), dict[str, list[str]]()
    for info in reversed(infos):
        if info.complete or info.swap is not None:
            found = _take(info.path)
            return replace(found, lines=(*skipped, *_skipped(others), *found.lines))
        if info.tag != named:  # else it was reported above
            others.setdefault(info.reason, []).append(info.tag)
    raise _nothing_found(path, infos, [*skipped, *_skipped(others)])


def _take(path: Path, *, follows: bool = True) -> FoundCheckpoint:
    """Return the checkpoint of the tag in the directory `path`. `follows`: also accept a newer commit of the tag's run.
    Raises StoreError, with the reason, if there is none."""
    info, manifest = look_at(path)
    if not info.complete and (info.swap is None or not follows):
        raise StoreError(f"{path} cannot be loaded: {info.reason}.")
    lines = (f"{path} leads to {info.swap}, which is loaded: {info.reason}.",) if info.is_superseded else ()
    return FoundCheckpoint(path=path, swap=info.swap, lines=lines, manifest=manifest)


def _skipped(tags: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one message for each reason in `tags`. `tags`: reason -> the tags skipped for it, newest first."""
    return [
        f"Skipped {own[0]}{f' and {len(own) - 1} before it' if len(own) > 1 else ''}: {reason}."
        for reason, own in tags.items()
    ]


def _nothing_found(path: Path, infos: Sequence[TagInfo], skipped: list[str]) -> StoreError:
    names = _content(path)
    if infos or LATEST_NAME in names:
        host = [ON_ITS_HOST] if any(info.kind == "in_place" for info in infos) else []
        return StoreError(f"There is no complete checkpoint in {path}. {' '.join([*skipped, *host])}")
    if foreign := _foreign(names):
        return StoreError(f"{path} is {foreign}.")
    if runs := swap_directories(path):
        return StoreError(f"{path} holds no checkpoint. {runs}")
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return StoreError(
        f"Expected checkpoints of save_checkpoint in {path}; found {listed or 'nothing'}. Name the directory that "
        "holds them, or, to begin at step 0, one that is empty."
    )


# -- open --------------------------------------------------------------------------------------------------------------


def open_reader(found: FoundCheckpoint, own_runs: Container[str] = ()) -> TensorReader:
    """Open the checkpoint `found`: a tag or an in-place commit. `own_runs`: run ids of the caller's own stores, which
    may be opened although their run is alive. Raises StoreError."""
    if found.swap is not None:
        return open_commit(found.swap, own_runs)
    manifest = found.manifest or _take(found.path).manifest
    assert manifest is not None, "the tag is complete"
    files = [
        RecordFiles(paths=[found.path / file_name(rank, manifest.save_id)], contents=store)
        for rank, store in enumerate(manifest.stores)
    ]
    return TensorReader(manifest, RecordReader(files))


def find_damage(directory: str | os.PathLike[str]) -> list[str]:
    """Read and verify every byte of a tag or an in-place commit. Return a text for each fault. `directory`: the tag, or
    a swap directory of the run. Raises StoreError if the checkpoint cannot be opened or its run is alive."""
    path = Path(directory)
    found = FoundCheckpoint(path=path, swap=path) if (path / OWNER_NAME).exists() else _take(path, follows=False)
    with open_reader(found) as reader:
        return reader.damage()


def open_commit(path: str | os.PathLike[str], own_runs: Container[str] = ()) -> TensorReader:
    """Open the newest commit of a run. `path`: any of the run's swap directories. `own_runs`: run ids of the caller's
    own stores, which may be opened, but must not commit while the reader is open. Raises StoreError if nothing is
    committed, if a part is damaged or missing on this host, or if another live run owns the directories."""
    commit = Commit.read(Path(owner_of(Path(path)).paths[0]))
    with ExitStack() as resources:
        stores = open_stores(commit.stores, commit, resources, own_runs)
        records = RecordReader(stores)
        with refused(commit.stores[0].first):
            check_places(commit.checkpoint.tensors, records.extents)
        return TensorReader(commit.checkpoint, records, resources.pop_all())


def open_stores(
    locations: Sequence[StoreLocation], commit: Commit, resources: ExitStack, own_runs: Container[str] = ()
) -> list[RecordFiles]:
    """Lock and check the stores of `commit` at `locations`, and return their data files. No process can adopt the
    stores until `resources` is closed. `own_runs`: run ids of the caller's own stores, which may be opened although
    their run is alive. Raises StoreError."""
    found, step = [], commit.checkpoint.step
    for location in locations:
        paths = [Path(path) for path in location.paths]
        owner = owner_of(paths[0], f"of step {step} ")
        if (owner.run_id, owner.paths) != (location.run_id, tuple(location.paths)):
            raise StoreError(
                f"{paths[0]} belongs to another run, or other directories, than the commit of step {step}."
            )
        _lock(paths[0], owner, resources, own_runs)
        manifest, _ = choose(paths[0], step, {COMMIT_ID: commit.commit_id})
        check_data_files(paths, Stripes(manifest.weights), manifest.capacity_nbytes)
        found.append(RecordFiles(paths=[path / DATA_NAME for path in paths], contents=manifest))
    return found


def _lock(path: Path, owner: Owner, resources: ExitStack, own_runs: Container[str]) -> None:
    """Take a shared lock on a swap directory until `resources` is closed. If a run of this process or of `own_runs`
    holds the lock, do nothing. Raises StoreError if another run holds the lock, or if locking fails."""
    try:
        fd = open_of_owner(path / OWNER_NAME)
        resources.callback(fd.close)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        if owner.run_id in own_runs or owner.is_this_process:
            return
        raise StoreError(
            f"The swap directory {path} belongs to a live run (pid {owner.pid} on {owner.host}), which goes on "
            "changing it; stop that run first."
        ) from error
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error_text(error)}.") from error


# -- old tags ----------------------------------------------------------------------------------------------------------


def prune(save_dir: str | os.PathLike[str], keep: int, *, dry_run: bool = False) -> list[TagInfo]:
    """Remove tags of replaced in-place commits, and all complete tags except the newest `keep`. Return the removed
    tags. `dry_run`: only return the tags to remove. `prune` never removes the tag that `latest` names, or a tag with
    other programs' files. If a run ended before it wrote the tag of its last in-place commit, the run's newest tag
    stays too. Raises StoreError."""
    if keep < 1:
        raise StoreError(f"Keep at least one checkpoint; found {keep}.")
    directory = None if dry_run else SaveDirectory.open(save_dir)
    removed = []
    try:
        for info in _prunable(Path(save_dir), keep):
            others = [
                name
                for name in sorted(os.listdir(info.path))
                if name != MANIFEST_NAME and not DATA_FILE.fullmatch(name) and not name.startswith(PROBE_PREFIX)
            ]
            if others:
                logger.warning(
                    "%s has files that are no part of a checkpoint, and is not removed: %s. Move them elsewhere.",
                    *(info.path, ", ".join(map(ascii, others))[:200]),
                )
                continue
            if directory is not None:
                directory.remove(info.tag, info.save_id)
            removed.append(info)
        return removed
    except OSError as error:
        raise StoreError(f"{save_dir} cannot be pruned: {error}.") from error
    finally:
        if directory is not None:
            directory.release()


def _prunable(path: Path, keep: int) -> list[TagInfo]:
    """Return the tags that `prune` may remove."""
    latest = None
    with suppress(StoreError):
        latest = read_latest(path)
    infos = list_tags(path)
    kept = {latest, *(info.tag for info in [info for info in infos if info.complete][-keep:])}
    tagged = {info.run_id for info in infos if info.held_id == info.save_id}
    # the run was killed before it wrote the tag of its last commit
    for run_id in {info.run_id for info in infos if info.is_superseded} - tagged:
        kept.add([info.tag for info in infos if info.run_id == run_id][-1])
    return [info for info in infos if (info.complete or info.is_superseded) and info.tag not in kept]
