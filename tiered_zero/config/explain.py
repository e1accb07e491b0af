"""Explain the source and effect of each value: the rows of `tiered-zero explain`, and the notices at start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel

from tiered_zero.config.deepspeed_keys import Fate, Key, asks_for_something, table

Source = Literal["file", "default", "auto", "derived", "renamed"]
FILLED = "the trainer that reads the file fills it: Transformers, Accelerate, Lightning"


@dataclass(frozen=True, kw_only=True)
class KeyReport:
    """One key: its value as understood, its origin, and its effect here."""

    path: str
    value: Any
    source: Source
    fate: Fate
    effect: str


@dataclass(kw_only=True)
class Reading:
    """What the loader finds out about the keys of a file while it reads them, for `reports` and `notices`."""

    auto: dict[str, Any] = field(default_factory=dict)
    """Path of a key that is "auto" in the file -> the value that the key got."""
    derived: set[str] = field(default_factory=set)
    """Batch sizes that follow from the others."""
    unfilled: set[str] = field(default_factory=set)
    """Paths of keys that are "auto" and have no default: a trainer fills them before a run."""
    idle: list[tuple[Key, Any]] = field(default_factory=list)
    """Keys in the file that do nothing, with their values."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Path as understood -> path as written."""
    notices: list[str] = field(default_factory=list)
    """Further lines to log: values that were rounded, names that mean something else here."""

    def written_as(self, path: str) -> str:
        """Return the other name that the file uses for `path` or a section around it; "" if none."""
        return next((old for new, old in self.renamed.items() if path == new or path.startswith(f"{new}.")), "")


def reports(config: BaseModel, reading: Reading) -> list[KeyReport]:
    """Return a report for every honoured key, then one for every key of the file that has no effect."""
    keys = table(type(config))
    rows = list(_honoured(config, reading, "", keys))
    rows += [_idle(key, value, reading) for key, value in reading.idle]
    return rows


def notices(reading: Reading, keys: Mapping[str, Key]) -> tuple[str, ...]:
    """Return the lines to log once at start: at most one of each kind, only about keys of the file."""
    renamed = [f"{old} -> {new}" for new, old in reading.renamed.items() if not keys[old].quiet]
    resolved = [f"{path} = {value}" for path, value in reading.auto.items() if path not in reading.unfilled]
    idle = [key.path for key, value in reading.idle if not key.quiet and asks_for_something(key, value)]
    lines = []
    if renamed:
        lines.append(f"config: read under another name: {', '.join(renamed)}")
    if resolved:
        lines.append(f'config: "auto" resolved: {", ".join(resolved)}')
    if reading.unfilled:
        lines.append(
            f'config: "auto" is left to the trainer that reads the file: {", ".join(sorted(reading.unfilled))}'
        )
    if idle:
        lines.append(f"config: accepted without effect (tiered-zero explain says why): {', '.join(idle)}")
    return (*lines, *(f"config: {line}" for line in reading.notices))


def _honoured(node: BaseModel, reading: Reading, prefix: str, keys: Mapping[str, Key]) -> Iterator[KeyReport]:
    for name, field_info in type(node).model_fields.items():
        value, path = getattr(node, name), prefix + (field_info.alias or name)
        if isinstance(value, BaseModel):
            yield from _honoured(value, reading, f"{path}.", keys)
        elif path not in keys:  # the file leaves this section out
            continue
        elif isinstance(value, dict):
            arguments = {f"{path}.{argument}": given for argument, given in value.items()}
            arguments |= {auto: given for auto, given in reading.auto.items() if auto.startswith(f"{path}.")}
            for argument, given in arguments.items():
                source: Source = "auto" if argument in reading.auto else "file"
                key = replace(keys[path], path=argument)
                yield _live(key, given, True, reading) if argument in reading.unfilled else _row(key, given, source)
        else:
            yield _live(keys[path], value, name in node.model_fields_set, reading)


def _live(key: Key, value: Any, given: bool, reading: Reading) -> KeyReport:
    is_auto = key.path in reading.auto
    written_as = reading.written_as(key.path) if given or is_auto else ""
    if key.path in reading.unfilled:
        return _row(replace(key, why=f"{key.why} ({FILLED})"), "auto", "auto")
    if is_auto or key.path in reading.derived:
        return _row(key, value, "auto" if is_auto else "derived", written_as)
    return _row(key, value, "renamed" if written_as else "file" if given else "default", written_as)


def _idle(key: Key, value: Any, reading: Reading) -> KeyReport:
    if key.fate is Fate.REFUSED:
        what = "switched off; on, it" if False in key.allowed else "any other value"
        key = replace(key, why=f"{what} is refused: {key.why}")
    written_as = reading.written_as(key.path)
    return _row(replace(key, fate=Fate.NO_EFFECT), value, "renamed" if written_as else "file", written_as)


def _row(key: Key, value: Any, source: Source, written_as: str = "") -> KeyReport:
    effect = f"{key.why} (written as {written_as})" if written_as else key.why
    return KeyReport(path=key.path, value=value, source=source, fate=key.fate, effect=effect)
