"""A directory tree that forgets: replays a log of file operations up to a crash, and says what may then be left.

As CrashDisk, with directories: entries are durable when their own directory was fsynced. Of the other entries any
prefix may be left, of all together or of each directory for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.crash_disk import PAGE, Choice, Operation


@dataclass
class RecordingTree:
    """The `os` module for the code under test; logs what changes files and directories, and syncs nothing."""

    log: list[Operation]
    _positions: dict[int, int] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        full = _full(path, dir_fd)
        is_new = bool(flags & os.O_CREAT) and not os.path.lexists(full)
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        if is_new:
            self.log.append(("create", full))
        self._positions[fd] = 0
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self.log.append(("write", _path_of(fd), self._positions[fd], bytes(data)))
        self._positions[fd] += len(data)
        return os.write(fd, data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self.log.append(("write", _path_of(fd), offset, data))
        return os.pwrite(fd, data, offset)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        self.log.append(("truncate", _path_of(fd), nbytes))
        os.ftruncate(fd, nbytes)

    def truncate(self, path: str, nbytes: int) -> None:
        self.log.append(("truncate", path, nbytes))
        os.truncate(path, nbytes)

    def fsync(self, fd: int) -> None:
        path = _path_of(fd)
        self.log.append(("sync_directory" if os.path.isdir(path) else "sync", path))

    def mkdir(self, path: str | os.PathLike[str], mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        os.mkdir(path, mode, dir_fd=dir_fd)
        self.log.append(("mkdir", _full(path, dir_fd)))

    def rename(self, old: str, new: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self.log.append(("rename", _full(old, src_dir_fd), _full(new, dst_dir_fd)))
        os.rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        os.unlink(path, dir_fd=dir_fd)
        self.log.append(("remove", _full(path, dir_fd)))

    def rmdir(self, path: str, *, dir_fd: int | None = None) -> None:
        os.rmdir(path, dir_fd=dir_fd)
        self.log.append(("remove", _full(path, dir_fd)))


def _path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def _full(path: str | os.PathLike[str], dir_fd: int | None) -> str:
    return os.path.join(os.getcwd() if dir_fd is None else _path_of(dir_fd), os.fspath(path))


@dataclass(eq=False)
class _File:
    """`pending`: writes (offset, at most a page) and cuts (size, None) that are not durable yet."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def after(self, kept: list[tuple[int, bytes | None]]) -> bytes:
        content = bytearray(self.durable)
        for offset, data in kept:
            end = offset if data is None else offset + len(data)
            content.extend(bytes(max(0, end - len(content))))
            if data is None:
                del content[offset:]
            else:
                content[offset:end] = data
        return bytes(content)


@dataclass(eq=False)
class _Directory:
    durable: dict[str, _Node] = field(default_factory=dict)


_Node = _File | _Directory
_Change = tuple[_Directory, dict[str, _Node | None]]


@dataclass
class CrashTree:
    """`root`: an existing empty directory; only what is below it is replayed."""

    root: str
    _top: _Directory = field(default_factory=_Directory)
    _pending: list[_Change] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        kind, path, *rest = operation
        if kind in ("create", "mkdir"):
            self._change({path: _File() if kind == "create" else _Directory()})
        elif kind == "rename":
            self._change({path: None, rest[0]: self._find(path)})
        elif kind == "remove":
            self._change({path: None})
        elif kind == "sync_directory":
            directory = self._find(path)
            assert isinstance(directory, _Directory)
            directory.durable = self._entries(directory, self._pending)
            self._pending = [change for change in self._pending if change[0] is not directory]
        elif kind in ("write", "truncate", "sync"):
            file = self._find(path)
            assert isinstance(file, _File)
            if kind == "sync":
                file.durable[:] = file.after(file.pending)
                file.pending.clear()
            elif kind == "truncate":
                file.pending.append((rest[0], None))
            else:
                offset, data = rest
                file.pending += [(offset + at, data[at : at + PAGE]) for at in range(0, len(data), PAGE)]

    def crash(self, keep_writes: Choice, keep_entries: Choice, each_directory: bool = False) -> dict[str, bytes | None]:
        """Content by path below the root, None for a directory, had the power failed now."""
        if each_directory:
            changed = {id(directory): directory for directory, _ in self._pending}.values()
            groups = [[change for change in self._pending if change[0] is directory] for directory in changed]
            kept = [change for group in groups for change in keep_entries(group)]
        else:
            kept = keep_entries(self._pending)
        return dict(self._walk(self._top, "", kept, keep_writes))

    def _walk(
        self, directory: _Directory, prefix: str, kept: list[_Change], keep_writes: Choice
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, node in self._entries(directory, kept).items():
            if isinstance(node, _File):
                yield prefix + name, node.after(keep_writes(node.pending))
            else:
                yield prefix + name, None
                yield from self._walk(node, f"{prefix}{name}/", kept, keep_writes)

    def _entries(self, directory: _Directory, kept: list[_Change]) -> dict[str, _Node]:
        entries: dict[str, _Node | None] = {**directory.durable}
        for changed, change in kept:
            if changed is directory:
                entries |= change
        return {name: node for name, node in entries.items() if node is not None}

    def _change(self, nodes: dict[str, _Node | None]) -> None:
        """Change entries of one directory, by path, at once."""
        (parent,) = {str(Path(path).parent) for path in nodes}
        directory = self._find(parent)
        assert isinstance(directory, _Directory)
        self._pending.append((directory, {Path(path).name: node for path, node in nodes.items()}))

    def _find(self, path: str) -> _Node:
        node: _Node = self._top
        for name in Path(path).relative_to(self.root).parts:
            assert isinstance(node, _Directory), path
            node = self._entries(node, self._pending)[name]
        return node


def lay_out(files: dict[str, bytes | None], where: Path) -> None:
    """Make a tree of `CrashTree.crash` below a new directory."""
    where.mkdir(mode=0o700)
    for path, content in files.items():
        if content is None:
            (where / path).mkdir(mode=0o700)
        else:
            (where / path).write_bytes(content)
