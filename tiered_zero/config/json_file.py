"""Read JSON as people write it: with comments (`//`, `#`, `/* */`) and trailing commas, but no key given twice."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from tiered_zero.errors import ConfigError

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)


class _Object(dict[str, Any]):
    """A JSON object that also keeps the names of the keys that its text gives twice."""

    twice: tuple[str, ...] = ()


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the object in the file. Raises ConfigError if the file cannot be read, is no JSON, holds no object, or
    gives a key twice."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"expected a JSON file; {os.fspath(path)}: {reason}. Give the path of a readable file."
        ) from error
    return parse_json(text, os.fspath(path))


def parse_json(text: str, name: str) -> dict[str, Any]:
    """Parse JSON text. `name`: the text's name in errors. Comments are replaced by blanks, so that line numbers stay
    right."""
    plain = _TRAILING_COMMA.sub(_blank, _COMMENT.sub(_blank, text))
    try:
        tree = json.loads(plain, object_pairs_hook=_object)
        if isinstance(tree, dict):
            _refuse_twice(tree, "", name)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"expected JSON in {name}; {error}. Comments and trailing commas are fine.") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"expected a JSON object in {name}; found {type(tree).__name__}.")
    return tree


def _blank(match: re.Match[str]) -> str:
    return match.group(1) or re.sub(r"[^\n]", " ", match.group())


def _object(pairs: list[tuple[str, Any]]) -> _Object:
    result = _Object(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        result.twice = tuple(dict.fromkeys(name for name in names if names.count(name) > 1))
    return result


def _refuse_twice(node: Any, path: str, name: str) -> None:
    if isinstance(node, _Object):
        if node.twice:
            raise ConfigError(f"{path}{node.twice[0]}: expected once, found twice in {name}. Remove one of the two.")
        for key, value in node.items():
            _refuse_twice(value, f"{path}{key}.", name)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            _refuse_twice(value, f"{path}{index}.", name)
