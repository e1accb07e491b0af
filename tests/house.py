"""How the rules of the house read the source: files, what they import and use, rules with their samples."""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tiered_zero", "tests", "tools", "configs", "docs", ".ci", ".github")
SUFFIXES = {".py", ".c", ".h", ".md", ".toml", ".txt", ".json", ".yml", ".cff"}
NAMES = {"run", "LICENSE", ".gitignore"}

Found = Iterator[tuple[int, str]]
"""(line, what is wrong there)"""

Samples = Mapping[str, Sequence[str]]
"""path -> pieces of code that stand there"""


@dataclass(frozen=True)
class Source:
    """One text file; `path` is relative to the root of the checkout."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text if self.path.endswith(".py") else "")

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[Any]:
        return (node for node in ast.walk(self.tree) if isinstance(node, kinds))

    def matches(self, pattern: str) -> Found:
        for number, line in enumerate(self.text.splitlines(), start=1):
            for match in re.finditer(pattern, line):
                yield number, match[0]

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """(line, full name) of everything imported, inside functions too."""
        return [(line, full) for line, _, _, full in self._bindings]

    @cached_property
    def uses(self) -> list[tuple[int, str]]:
        """`imports`, and every dotted chain that starts at one."""
        chains = ((node.lineno, self.full_name(node)) for node in self.nodes(ast.Attribute))
        return [*self.imports, *((line, full) for line, full in chains if full)]

    def full_name(self, node: ast.expr) -> str:
        """What a dotted chain stands for: F.linear -> torch.nn.functional.linear; "" if it starts at no import."""
        root, dot, rest = ast.unparse(node).partition(".")
        return self._meanings[root] + dot + rest if root in self._meanings else ""

    @cached_property
    def _meanings(self) -> dict[str, str]:
        return {local: means for _, local, means, _ in self._bindings}

    @cached_property
    def _bindings(self) -> list[tuple[int, str, str, str]]:
        """(line, local name, what it stands for, full name imported); relative imports are resolved."""
        found = []
        package = self.path.split("/")[:-1]
        for node in self.nodes(ast.Import, ast.ImportFrom):
            for alias in node.names:
                if isinstance(node, ast.ImportFrom):
                    above = package[: len(package) + 1 - node.level] if node.level else []
                    full = ".".join([*above, *filter(None, [node.module]), alias.name])
                    found.append((node.lineno, alias.asname or alias.name, full, full))
                else:
                    means = alias.name if alias.asname else alias.name.split(".")[0]
                    found.append((node.lineno, alias.asname or means, means, alias.name))
        return found


@dataclass(frozen=True)
class Rule:
    """`scope`: the beginnings of the paths that it reads. `planted`, `innocent`: (path, code) to catch, to let pass."""

    check: Callable[[Source], Found]
    scope: tuple[str, ...]
    planted: list[tuple[str, str]]
    innocent: list[tuple[str, str]]

    def violations(self, sources: Sequence[Source]) -> list[str]:
        read = (source for source in sources if source.path.startswith(self.scope))
        return [f"{source.path}:{line}: {what}" for source in read for line, what in self.check(source)]


RULES: dict[str, Rule] = {}


def rule(scope: tuple[str, ...], *, planted: Samples, innocent: Samples) -> Callable[[Callable[[Source], Found]], None]:
    """Enter a check into RULES under its name."""

    def enter(check: Callable[[Source], Found]) -> None:
        pairs = ([(path, code) for path, codes in samples.items() for code in codes] for samples in (planted, innocent))
        RULES[check.__name__] = Rule(check, scope, *pairs)

    return enter


def whole_tree() -> list[Source]:
    """Every text file of the project."""
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    texts = sorted(path for path in paths if (path.suffix in SUFFIXES or path.name in NAMES) and path.is_file())
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in texts]
