"""Write docs/config.md from the schema, docs/reference.md from the commands and the errors, and the list of files in
docs/architecture.md from the files' first sentences.

python tools/config_docs.py [--check]    --check: write nothing; exit 1 if a page is not current
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from tiered_zero import errors
from tiered_zero.cli.main import COMMANDS, main
from tiered_zero.config.deepspeed_keys import Fate, Key, table
from tiered_zero.config.schema import Config

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "tiered_zero"

_HEAD = """# The config

<!-- Written by tools/config_docs.py from the schema; do not edit. -->

The config is one JSON file with the names and defaults of DeepSpeed 0.19. Each key is honoured, read under another
name, accepted without effect, or refused because ignoring it would change numbers. An unknown key is an error that
names the nearest one. `tiered-zero explain CONFIG` prints value, source and effect of each key of a file.

* `"auto"` is allowed for any key: Transformers and Accelerate fill it in; otherwise it is the default.
* A key that begins with `_` is a comment.
* A dotted key at the top level, as `"zero_optimization.reduce_bucket_size"`, is not read, as in DeepSpeed; a notice
  says so.
"""

_FILES = "<!-- Written by tools/config_docs.py from the first sentence of each file; do not edit. -->\n"


def type_of(node: dict[str, Any]) -> str:
    """Return the type of a JSON schema in words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(map(type_of, node["anyOf"])))
    if "enum" in node or "const" in node:
        return ", ".join(json.dumps(value) for value in node.get("enum", [node.get("const")]))
    kinds = node.get("type", "value")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


def type_at(schema: dict[str, Any], path: str) -> str:
    """Return the type of the key at `path`. `schema`: that of the whole config."""
    node = schema
    for name in path.split("."):
        sections = [option["$ref"] for option in (node, *node.get("anyOf", ())) if "$ref" in option]
        node = schema["$defs"][sections[0].rpartition("/")[2]] if sections else node
        node = node["properties"][name]
    return type_of(node)


def rows(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Make a table of Markdown."""
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in cells) + "\n"


def default_of(key: Key) -> str:
    """Return the default as text: "" if the value follows from others, or must be given."""
    return "" if "Undefined" in repr(key.default) else f"`{json.dumps(key.default, default=str)}`"


def allowed_by(key: Key) -> str:
    """List the values that a refused key may still have."""
    if isinstance(key.default, dict):
        return "off"
    return ", ".join(f"`{json.dumps(value)}`" for value in key.allowed)


def page() -> str:
    """Return the whole text of docs/config.md."""
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


_REFERENCE_HEAD = """# Commands and errors

<!-- Written by tools/config_docs.py from the commands and tiered_zero.errors; do not edit. -->

Each command has `--help`. The exit code is 1, with one message, if a command fails, and 2 if it was called wrongly.
[The config](config.md) has every key.
"""


def leaf_commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that does something, with its words, as "swap ls"."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    for inner, found in command.commands.items():
        yield from leaf_commands(f"{name} {inner}", found)


def command_section(name: str, command: click.Command) -> str:
    """Make a heading with the arguments, the help text, and a table of the options."""
    context = click.Context(command, info_name=name)
    arguments = [param.make_metavar(context) for param in command.params if isinstance(param, click.Argument)]
    text = f"### {' '.join(['tiered-zero', name, *arguments])}\n\n"
    text += re.sub(r"\s*\n\s*\n\s*", "\n\n", inspect.cleandoc(command.help or "").replace("\b\n", "")) + "\n"
    options = [param.get_help_record(context) for param in command.params if isinstance(param, click.Option)]
    lines = ((f"`{names}`", " ".join(what.split())) for names, what in filter(None, options))
    return text + ("\n" + rows(("option", "effect"), lines) if options else "")


def reference() -> str:
    """Return the whole text of docs/reference.md."""
    parts, shown = [_REFERENCE_HEAD, "## Commands\n"], set()
    for top in COMMANDS:
        group = main.get_command(click.Context(main), top)
        assert group is not None
        for name, command in leaf_commands(top, group):
            if command not in shown:  # `swap capacity` is `plan`
                shown.add(command)
                parts.append(command_section(name, command))
    parts.append("## Errors\n\n[Troubleshooting](troubleshooting.md) explains messages.\n")
    family = [found for found in vars(errors).values() if inspect.isclass(found)]
    lines = (
        (
            f"`{found.__name__}`",
            ", ".join(f"`{base.__name__}`" for base in found.__bases__),
            inspect.cleandoc(found.__doc__ or ""),
        )
        for found in family
    )
    parts.append(
        rows(("error", "is a", "when"), ((name, bases, " ".join(text.split())) for name, bases, text in lines))
    )
    return "\n".join(parts)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a file: of a Python module's docstring, or of a C file's comment."""
    source = path.read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or "" if path.suffix == ".py" else source.partition("*/")[0]
    lines = text.replace("/*", "").replace("\n *", "\n").strip().partition("\n\n")[0]
    return re.split(r"(?<=[.;])\s", " ".join(lines.split()))[0].rstrip(".;")


def with_files(page: str) -> str:
    """Return the page of the architecture with the section "The files" written anew."""
    paths = sorted(path for kind in ("py", "c", "h") for path in PACKAGE.rglob(f"*.{kind}"))
    names = ((path.relative_to(PACKAGE).as_posix(), path) for path in paths if path.stem != "__init__")
    text = rows(("file", "what it does"), ((f"`{name}`", first_sentence(path)) for name, path in names))
    head, _, rest = page.partition(_FILES)
    return f"{head}{_FILES}\n{text}\n## {rest.partition('## ')[2]}"


if __name__ == "__main__":
    architecture = DOCS / "architecture.md"
    for path, text in (
        (DOCS / "config.md", page()),
        (DOCS / "reference.md", reference()),
        (architecture, with_files(architecture.read_text(encoding="utf-8"))),
    ):
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not current: run python tools/config_docs.py")
