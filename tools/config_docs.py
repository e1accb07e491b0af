"""Write docs/config.md from the schema: every key, its type, its default, and what it does.

python tools/config_docs.py [--check]    --check: write nothing; exit 1 if the page is not current
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tiered_zero.config import Config
from tiered_zero.config.deepspeed_keys import Fate, Key, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"

_HEAD = """# The config

<!-- Written by tools/config_docs.py from the schema; do not edit. -->

One JSON file, shaped as DeepSpeed's (0.19), with its names and its defaults. Every key of it is honoured, read under
another name, accepted without effect, or refused because ignoring it would change numbers; an unknown key is an error
that names the nearest one. `tiered-zero explain CONFIG` prints value, source and effect of each key of a file. Any key
may also be `"auto"`, which is its default, or what a trainer (Transformers, Accelerate) fills in before it hands the
config over: batch sizes that are all `"auto"` are its to fill. A key that begins with `_` is a comment. A dotted key at
the top level, as `"zero_optimization.reduce_bucket_size"`, is not read, as in DeepSpeed, with a notice.
"""


def type_of(node: dict[str, Any]) -> str:
    """JSON schema of a value -> its type in words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(map(type_of, node["anyOf"])))
    if "enum" in node or "const" in node:
        return ", ".join(json.dumps(value) for value in node.get("enum", [node.get("const")]))
    kinds = node.get("type", "value")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def type_at(schema: dict[str, Any], path: str) -> str:
    """Of the key at `path` in the JSON schema of the whole config."""
    node = schema
    for name in path.split("."):
        sections = [option["$ref"] for option in (node, *node.get("anyOf", ())) if "$ref" in option]
        node = schema["$defs"][sections[0].rpartition("/")[2]] if sections else node
        node = node["properties"][name]
    return type_of(node)


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in cells) + "\n"


def default_of(key: Key) -> str:
    """`null` stands for no value; a key whose value follows from others, or must be given, has no default."""
    return "" if "Undefined" in repr(key.default) else f"`{json.dumps(key.default, default=str)}`"


def allowed_by(key: Key) -> str:
    """What a refused key may still hold."""
    if isinstance(key.default, dict):
        return "off"
    return ", ".join(f"`{json.dumps(value)}`" for value in key.allowed)


def page() -> str:
    """The whole text of docs/config.md."""
    schema, keys = Config.model_json_schema(), table(Config).values()
    parts = [_HEAD, "## Honoured keys\n"]
    sections: dict[str, list[Key]] = {}
    for key in keys:
        if key.fate is Fate.HONOURED:
            sections.setdefault(key.path.rpartition(".")[0], []).append(key)
    for section, own in sections.items():
        parts.append(f"### {f'`{section}`' if section else 'Top level'}\n")
        honoured = ((f"`{key.path}`", type_at(schema, key.path), default_of(key), key.why) for key in own)
        parts.append(rows(("key", "type", "default", "effect"), honoured))
    by_fate = {fate: [key for key in keys if key.fate is fate] for fate in Fate}
    parts.append("## Read under another name\n\nA notice at start says so.\n")
    lines = ((f"`{key.path}`", f"`{key.to}`", key.why) for key in by_fate[Fate.RENAMED])
    parts.append(rows(("key", "read as", "why"), lines))
    parts.append("## Accepted without effect\n\nReported at start where the value asks for something.\n")
    lines = ((f"`{key.path}`", default_of(key), key.why) for key in by_fate[Fate.NO_EFFECT])
    parts.append(rows(("key", "DeepSpeed's default", "why"), lines))
    parts.append("## Refused\n\nAny other value than the allowed one is an error.\n")
    lines = ((f"`{key.path}`", allowed_by(key), key.why) for key in by_fate[Fate.REFUSED])
    parts.append(rows(("key", "allowed", "why"), lines))
    return "\n".join(parts)


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is not what the schema says: run python tools/config_docs.py")
