"""Bring the tree of a file to the schema's names: without comments and dotted keys, with old names replaced."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from tiered_zero.config.deepspeed_keys import OTHERS, Fate, Key
from tiered_zero.config.explain import Reading
from tiered_zero.config.values import shown
from tiered_zero.errors import ConfigError

_MAX_DEPTH = 64
_MAX_BITS = 1024


def named_tree(given: Mapping[str, Any], known: Container[str], reading: Reading) -> dict[str, Any]:
    """Copy `given` with the schema's names; `reading` notes what is dropped. `known`: paths of keys and sections.
    ConfigError."""
    tree: dict[str, Any] = _plain(given, "", reading)
    _drop_dotted(tree, known, reading)
    _rename(tree, reading)
    return tree


def idle_key(path: str, why: str, *, quiet: bool = False) -> Key:
    """A key of the file that does nothing here, though the table may have another fate for its name."""
    return Key(path=path, fate=Fate.NO_EFFECT, why=why, quiet=quiet)


def _plain(node: Any, path: str, reading: Reading, depth: int = 0) -> Any:
    """Copy plain dicts and lists, which the steps below change at will, without comments.

    Raises ConfigError on what no key takes.
    """
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{path[:80]}...: expected at most {_MAX_DEPTH} objects one inside another. Flatten it.")
    if isinstance(node, Mapping):
        for name in node:
            if not isinstance(name, str):
                raise ConfigError(f"{path}{shown(name)}: expected a string as key; found {type(name).__name__}.")
        comments = {name: value for name, value in node.items() if name.startswith("_")}
        for name, value in comments.items():
            text = value if isinstance(value, str) else shown(value)
            printable = (path + name).encode(errors="backslashreplace").decode()  # JSON may escape half a character
            reading.idle.append((idle_key(printable, "a comment", quiet=True), text))
        kept = {name: value for name, value in node.items() if name not in comments}
        return {name: _plain(value, f"{path}{name}.", reading, depth + 1) for name, value in kept.items()}
    if isinstance(node, int) and node.bit_length() > _MAX_BITS:
        raise ConfigError(f"{path.rstrip('.')}: expected a number that a float can hold; found {shown(node)}.")
    return [_plain(item, path, reading, depth + 1) for item in node] if isinstance(node, (list, tuple)) else node


def _drop_dotted(tree: dict[str, Any], known: Container[str], reading: Reading) -> None:
    """Drop "section.key" at the top level, which trainers write and DeepSpeed does not read."""
    for name in [name for name in tree if "." in name and name in known]:
        section, _, inner = name.rpartition(".")
        if name.startswith("tiered_zero."):
            raise ConfigError(f"{shown(name)}: expected {inner!r} inside of {section}; found a dotted key. Nest it.")
        why = f"DeepSpeed reads no dotted keys; to set it, write {inner!r} inside of {section}"
        reading.idle.append((idle_key(json.dumps(name), why), tree.pop(name)))


def _rename(tree: dict[str, Any], reading: Reading) -> None:
    if isinstance(tree.get("zero_optimization"), bool):
        stage = int(tree["zero_optimization"])
        reading.notices.append(f"zero_optimization: {bool(stage)} (deprecated) read as stage {stage}")
        tree["zero_optimization"] = {"stage": stage}
    for key in OTHERS:
        if key.fate is Fate.RENAMED:
            _rename_one(tree, key, reading)


def _rename_one(tree: dict[str, Any], key: Key, reading: Reading) -> None:
    *sections, name = key.path.split(".")
    node: Any = tree
    for section in sections:
        node = node.get(section) if isinstance(node, dict) else None
    if not isinstance(node, dict) or name not in node:
        return
    value = node.pop(name)
    if name in ("cpu_offload", "cpu_offload_param"):
        if not isinstance(value, bool) and value not in (None, "auto"):
            raise ConfigError(f"{key.path}: expected true or false; found {shown(value)}. Use {key.to} instead.")
        if value is not True:
            reading.idle.append((key, value))
            return
        value = {"device": "cpu"}
    *sections, name = key.to.split(".")
    target = tree
    for section in sections:
        if not isinstance(target.get(section), dict):
            target[section] = {}
        target = target[section]
    found = target.get(name)
    if found is not None and found != value and str(found) != str(value):  # 4 and "4" are one value
        raise ConfigError(
            f"{key.path}, {key.to}: expected one value; found {shown(value)} and {shown(found)}. Keep {key.to}."
        )
    target[name] = value
    reading.renamed.setdefault(key.to, key.path)
