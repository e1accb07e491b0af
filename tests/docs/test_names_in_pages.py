"""What the pages name exists: files, functions, messages, settings, links."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import tiered_zero
import tiered_zero.deepspeed
from tests.house import ROOT
from tests.support.inspection.insides import LEGAL_CHANGES, UnitState, WeightState
from tiered_zero.cli.main import COMMANDS, main
from tiered_zero.config.deepspeed_keys import table
from tiered_zero.config.schema import Config

PACKAGE = ROOT / "tiered_zero"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOT_OURS = set(
    "torch numpy safetensors copy Function p loss param module model scheduler storage deepspeed param_groups".split()
)
PLAIN = {
    "scripted",
    "clip_grad_norm_",
    "named_parameters",
    "vars",
    "save_on_cpu",
    "gradient_checkpointing_enable",
    "reset_parameters",
    "fsync",
    "fdatasync",
    "rename",
    "print",
}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@cache
def definitions(path: Path) -> frozenset[str]:
    """Functions and classes of a file: "f", "Class", "Class.method", and attributes as "Class.attribute"."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(f"{node.name}.{inner.name}")
            elif isinstance(inner, ast.AnnAssign | ast.Assign):
                targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                found.update(f"{node.name}.{ast.unparse(target)}" for target in targets)
    return frozenset(found)


@cache
def all_definitions() -> frozenset[str]:
    return frozenset().union(*(definitions(path) for path in PACKAGE.rglob("*.py")))


def find_file(name: str) -> Path | None:
    """`name` is relative to the checkout or to the package."""
    return next((base / name for base in (ROOT, PACKAGE) if (base / name).exists()), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_exists(page: Path) -> None:
    named = [span for span in code_spans(page.read_text()) if re.fullmatch(r"[\w./]+\.(py|c|h|toml)|[\w./]+/", span)]
    assert [name for name in named if find_file(name) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_function_exists(page: Path) -> None:
    known = all_definitions()
    bare = {name.rsplit(".", 1)[-1] for name in known} | PLAIN
    wrong = []
    for span in code_spans(page.read_text()):
        if (call := re.match(r"((?:\w+\.)*)(\w+)\(.*\)$", span)) is None:
            continue
        holders, name = call[1].split(".")[:-1], call[2]
        if NOT_OURS.intersection(holders):
            continue
        if holders == ["engine"]:
            exists = hasattr(tiered_zero.Engine, name)
        elif holders and holders[-1][0].isupper():
            exists = f"{holders[-1]}.{name}" in known
        else:
            exists = name in bare
        if not exists:
            wrong.append(span)
    assert wrong == []


def test_a_function_is_in_the_file_beside_it() -> None:
    """Rows of the architecture's walks: a cell with one file, then a cell with functions of that file."""
    rows, wrong = 0, []
    page = (ROOT / "docs" / "architecture.md").read_text()
    for line in page[page.index("## The walk of one parameter") :].splitlines():
        for left, right in zip(cells(line), cells(line)[1:], strict=False):
            if (name := re.fullmatch(r"`([\w/]+\.py)`", left)) and (path := find_file(name[1])):
                spans = re.findall(r"`([\w.]+)(?:\(\))?`", right)
                rows += bool(spans)
                wrong += [f"{span} in {name[1]}" for span in spans if span not in definitions(path)]
    assert rows > 20
    assert wrong == []


def test_the_events_of_a_step_are_methods() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    found = re.findall(r"^\| `(\w+)`(?: \(of `(\w+)`\))? \| ", page[page.index("| event |") :], re.MULTILINE)[:9]
    events = {f"{owner or 'TrainStep'}.{event}" for event, owner in found}
    assert {"TrainStep.unit_grads_complete", "TrainStep.before_weights_read", "TrainStep.abort"} <= events
    assert events <= definitions(PACKAGE / "engine" / "train_step.py")


def test_the_house_has_every_room() -> None:
    """The map of the architecture's page names everything that is in the package."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    house = page[page.index("## The house") : page.index("## One step")]
    rooms = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert {room for room in rooms if not room.startswith("__")} - set(code_spans(house)) == set()


def test_the_changes_of_state_are_those_of_the_table() -> None:
    """Of current weights; the glossary lists the states."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) → ([\w ]+) \| (\w+) \|$", page, re.MULTILINE)
    current = WeightState.CURRENT
    legal = {
        (before.value, after.value, act)
        for ((before, weights), (after, later)), act in LEGAL_CHANGES.items()
        if weights is later is current and before is not after
    }
    assert set(rows) == legal
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert all(f"| **{state.value}** |" in glossary for state in UnitState)


@cache
def message_templates() -> tuple[str, ...]:
    """Every text of the source, with "..." where a value is filled in."""
    texts = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                texts.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(re.sub(r"%[sdg]", "...", node.value))
    return tuple(texts)


def quoted_messages() -> Iterator[str]:
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        if (row := cells(line)) and len(row) == 3:
            yield from re.findall(r'"([^"]+)"', row[0])


def test_every_quoted_message_is_raised() -> None:
    quoted = list(quoted_messages())
    assert len(quoted) > 15
    gone = []
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(part) for part in message.split("...")), re.DOTALL)
        if not any(pattern.search(text) for text in message_templates()):
            gone.append(message)
    assert gone == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_exists(page: Path) -> None:
    keys = set(table(Config))
    sections = {key.rpartition(".")[0] for key in keys} | {"tiered_zero", "aio", "optimizer.params"}
    wrong = []
    for span in code_spans(page.read_text()):
        match = re.match(
            r"(tiered_zero|zero_optimization|offload_param|offload_optimizer|aio|bf16|fp16)\.([a-z_.0-9]+)", span
        )
        if match is None or "(" in span or span in ("tiered_zero.record", "tiered_zero.gathered"):
            continue
        path = match[0] if not match[1].startswith("offload") else f"zero_optimization.{match[0]}"
        names_python = match[1] == "tiered_zero" and hasattr(tiered_zero, match[2].split(".")[0])
        if path not in keys | sections and not names_python:
            wrong.append(span)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_exists(page: Path) -> None:
    for span in re.findall(r"\btiered-zero ([^`\n]+)", page.read_text()):
        words = span.replace("\\|", "|").split()
        assert words[0] in COMMANDS, span
        command = main.get_command(click.Context(main), words.pop(0))
        if isinstance(command, click.Group) and words:
            commands = command.commands
            *_, command = [commands[name] for name in words.pop(0).split("|")]
        assert command is not None
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, span


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        if not path.startswith("http"):
            target = page.parent / path if path else page
            assert target.exists(), path
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{path}#{anchor}"
