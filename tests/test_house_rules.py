"""The rules of the house, read off the source: who may import whom, what lives only at home, how things are named.

Each rule yields (line, what is wrong) for one file. It comes with planted violations, one for every way in which it can
bite, and with innocent code that it must let pass, so that no rule holds only because it never looks.
"""

import ast
import re

import pytest

from tests.house import ROOT, RULES, Found, Source, rule, whole_tree

# Lowest first. Imports only point down; a bar parts neighbours, who do not import each other.
# `tiered_zero` is the package's own __init__, the public names.
FLOORS = (
    "errors sizes version",
    "concurrency system",
    "config | layout | telemetry",
    "plan | native",
    "io | hardware | rules",
    "record | data",
    "tiers",
    "unit",
    "grads | update | activations",
    "checkpoint",
    "engine",
    "assembly",
    "api | optim | stopping",
    "deepspeed",
    "tiered_zero",
    "cli __main__ demo | integrations",
)
ADDRESS = {
    name: (floor, side)
    for floor, row in enumerate(FLOORS)
    for side, names in enumerate(row.split("|"))
    for name in names.split()
}

MAX_LINES = 700
MAX_CONSTRUCTOR_ARGUMENTS = 7
MAX_DESIGN_LINES = 30

PURE = frozenset(
    "abs align_up all any bool bytes data_ptr dim divmod done element_size endswith equal float frozenset get getattr "
    "hasattr id int is_contiguous is_floating_point is_pinned isdisjoint isinstance issubclass issubset issuperset "
    "items keys len list max min numel range set size sorted startswith storage_offset str sum tuple type values "
    "zip".split()
)
"""What an assert may call: functions and methods that change nothing, so that `python -O` changes nothing."""


PACKAGE = ("tiered_zero/",)
CODE = ("tiered_zero/", "tests/", "tools/", "setup.py")
EVERYTHING = ("",)


@rule(
    CODE,
    planted={"tools/a.py": ["x = 1\n" * (MAX_LINES + 1)], "tiered_zero/native/a.c": [";\n" * (MAX_LINES + 1)]},
    innocent={"tests/a.py": ["x = 1\n" * MAX_LINES]},
)
def files_are_short(source: Source) -> Found:
    if (num_lines := len(source.text.splitlines())) > MAX_LINES:
        yield num_lines, f"{num_lines} lines; at most {MAX_LINES}: split the file by what it is about"


@rule(
    PACKAGE,
    planted={
        "tiered_zero/io/a.py": [
            "from tiered_zero.record import x",
            "from tiered_zero import tiers",
            "from .. import tiers",
            "from ..record.extents import x",
            "import tiered_zero",
            "from tiered_zero import initialize",
            "def f():\n    import tiered_zero.engine.engine",
        ],
        "tiered_zero/config/a.py": ["from tiered_zero.telemetry import x"],
        "tiered_zero/engine/engine.py": ["from tiered_zero.assembly import x"],
        "tiered_zero/__init__.py": ["from tiered_zero.demo import x"],
        "tiered_zero/sizes.py": ["from .plan import x"],
        "tiered_zero/nowhere.py": ["x = 1"],
    },
    innocent={
        "tiered_zero/io/a.py": ["from tiered_zero.io.b import x", "from .b import x", "from ..sizes import x"],
        "tiered_zero/__init__.py": ["from .engine import Engine"],
        "tiered_zero/cli/main.py": ["import tiered_zero", "from tiered_zero.demo.gpt import x"],
    },
)
def imports_point_down(source: Source) -> Found:
    name = source.path.split("/")[1].removesuffix(".py").replace("__init__", "tiered_zero")
    if name not in ADDRESS:
        yield 1, f"{name} has no floor: give it one in FLOORS, or put it into a package that has one"
        return
    floor, side = ADDRESS[name]
    for line, full in source.imports:
        top, *rest = full.split(".")
        if top != "tiered_zero":
            continue
        other = rest[0] if rest and rest[0] in ADDRESS else "tiered_zero"
        if ADDRESS[other] != (floor, side) and ADDRESS[other][0] >= floor:
            yield line, f"{name} (floor {floor}) imports {other} (floor {ADDRESS[other][0]})"


@rule(
    PACKAGE,
    planted={"tiered_zero/io/__init__.py": ["", '""""""', '"""a' + "\n" * MAX_DESIGN_LINES + 'a"""']},
    innocent={"tiered_zero/io/__init__.py": ['"""Promise, owner, never."""'], "tiered_zero/io/a.py": [""]},
)
def a_package_says_its_design(source: Source) -> Found:
    if source.path.endswith("/__init__.py"):
        num_lines = len((ast.get_docstring(source.tree, clean=False) or "").splitlines())
        if not 1 <= num_lines <= MAX_DESIGN_LINES:
            yield 1, f"a docstring of {num_lines} lines; 1 to {MAX_DESIGN_LINES}: promise, owner, never"


@rule(
    PACKAGE,
    planted={"tiered_zero/a.py": ["class A:\n    def __init__(self, a, b, c, d, *, e, f, g, h): ..."]},
    innocent={"tiered_zero/a.py": ["class A:\n    def __init__(self, a, b, c, d, *, e, f, g): ..."]},
)
def constructors_take_few_arguments(source: Source) -> Found:
    for node in source.nodes(ast.FunctionDef):
        if node.name == "__init__":
            num_arguments = len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1
            if num_arguments > MAX_CONSTRUCTOR_ARGUMENTS:
                yield node.lineno, f"{num_arguments} constructor arguments; at most {MAX_CONSTRUCTOR_ARGUMENTS}"


POSITIONAL_RECORDS = {
    "Finding": "a line of a printed table, written as such",
    "FlatEntry": "what, and where it starts",
    "Home": "what, and where it starts",
}
"""Records that may be built by position, and why their parts cannot be swapped unseen."""


@rule(
    PACKAGE,
    planted={
        "tiered_zero/a.py": [
            "@dataclass\nclass A:\n    x: int",
            "@dataclass(frozen=True)\nclass A:\n    x: int",
            "import dataclasses\n@dataclasses.dataclass(kw_only=False)\nclass A:\n    x: int\n    _y: int = 0",
        ]
    },
    innocent={
        "tiered_zero/a.py": [
            "@dataclass(frozen=True, kw_only=True)\nclass A:\n    x: int",
            "@dataclass(eq=False)\nclass Service:\n    _inventory: object\n    changing: bool = False",
            "@dataclass(frozen=True)\nclass Home:\n    tier: object",
        ]
    },
)
def records_are_keyword_only(source: Source) -> Found:
    """A class whose first field is private is a service: `dataclass` writes its constructor, not a record's."""
    for node in source.nodes(ast.ClassDef):
        fields = [item.target for item in node.body if isinstance(item, ast.AnnAssign)]
        is_service = bool(fields) and ast.unparse(fields[0]).startswith("_")
        for decorator in map(ast.unparse, node.decorator_list):
            is_open = re.match(r"(dataclasses\.)?dataclass\b", decorator) and "kw_only=True" not in decorator
            if is_open and not is_service and node.name not in POSITIONAL_RECORDS:
                yield node.lineno, f"{node.name}: a record takes keywords only (kw_only=True)"


def outside(source: Source, *names: str, home: str = "") -> Found:
    """Uses of `names`, and of what is under them, outside `home`; everywhere if there is none."""
    if home and source.path.startswith(home):
        return
    for line, full in source.uses:
        if full in names or full.startswith(tuple(f"{name}." for name in names)):
            yield line, f"{full}, which {f'lives in {home}' if home else 'has no place here'}"


_DEVICES = ("torch.cuda", "torch.xpu", "torch.accelerator", "torch.Stream", "torch.Event")


@rule(
    PACKAGE,
    planted={
        "tiered_zero/unit/a.py": [
            "import torch\ntorch.cuda.synchronize()",
            "import torch.distributed as dist",
            "from torch import cuda",
            "from torch.cuda import Stream",
            "def f():\n    import torch as t\n    return t.cuda.is_available()",
            "import torch.distributed.checkpoint as dcp",
            "import torch\ntorch.accelerator.synchronize()",
            "import torch\nstream = torch.Stream()",
            "from torch import Event",
        ],
        "tiered_zero/checkpoint/a.py": ["import torch.distributed as dist"],
    },
    innocent={
        "tiered_zero/hardware/a.py": ["from torch.cuda import Stream"],
        "tiered_zero/unit/a.py": ["import torch\ntorch.device('cuda')"],
        "tiered_zero/checkpoint/a.py": ["from torch.distributed.checkpoint import StorageReader"],
    },
)
def devices_and_collectives_live_in_hardware(source: Source) -> Found:
    for line, what in outside(source, *_DEVICES, "torch.distributed", home="tiered_zero/hardware/"):
        if not (source.path.startswith("tiered_zero/checkpoint/") and what.startswith("torch.distributed.checkpoint")):
            yield line, what


@rule(
    ("tiered_zero/io/", "tiered_zero/record/", "tiered_zero/plan/", "tiered_zero/layout/"),
    planted={
        "tiered_zero/io/a.py": ["import torch", "def f():\n    from torch import Tensor"],
        "tiered_zero/record/a.py": ["import torch.nn as nn", "from safetensors.torch import load_file"],
        "tiered_zero/plan/a.py": ["from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"],
        "tiered_zero/layout/a.py": ["from torch import dtype"],
    },
    innocent={
        "tiered_zero/io/a.py": ["import numpy"],
        "tiered_zero/plan/a.py": ["from tiered_zero.layout.flat import Unit"],
        "tiered_zero/tiers/a.py": ["import torch"],
    },
)
def bytes_and_plans_know_no_torch(source: Source) -> Found:
    return outside(source, "torch", "safetensors.torch")


@rule(
    PACKAGE,
    planted={
        "tiered_zero/checkpoint/a.py": [
            "import pickle",
            "from pickle import loads",
            "import torch\ntorch.load('x')",
            "from torch import load",
            "import dill, shelve",
        ]
    },
    innocent={"tiered_zero/checkpoint/a.py": ["import json\njson.load(f)"]},
)
def nothing_is_unpickled(source: Source) -> Found:
    return outside(source, "pickle", "torch.load", "dill", "cloudpickle", "shelve", "marshal", "joblib")


@rule(
    PACKAGE,
    planted={"tiered_zero/tiers/a.py": ["x.resize_(0)", "x.untyped_storage().resize_(0)"]},
    innocent={"tiered_zero/unit/unit.py": ["x.resize_(0)"], "tiered_zero/tiers/a.py": ["x.resize(0)"]},
)
def storages_are_resized_in_one_file(source: Source) -> Found:
    if source.path != "tiered_zero/unit/unit.py":
        for node in source.nodes(ast.Attribute):
            if node.attr == "resize_":
                yield node.lineno, "resize_, which lives in unit/unit.py"


TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "register_multi_grad_hook")


@rule(
    PACKAGE,
    planted={
        "tiered_zero/engine/engine.py": [
            "m.register_forward_pre_hook(f)",
            "m._register_state_dict_hook(f)",
            "m.register_load_state_dict_post_hook(f)",
            "from torch.nn.modules.module import register_module_forward_hook",
            "p.register_hook(f)",
        ],
        "tiered_zero/grads/a.py": ["m.register_full_backward_hook(f)"],
    },
    innocent={
        "tiered_zero/unit/hooks.py": ["m.register_forward_hook(f)\np.register_post_accumulate_grad_hook(f)"],
        "tiered_zero/grads/a.py": ["p.register_post_accumulate_grad_hook(f)"],
    },
)
def hooks_are_set_in_one_file(source: Source) -> Found:
    if source.path == "tiered_zero/unit/hooks.py":
        return
    used = [(node.lineno, node.attr) for node in source.nodes(ast.Attribute)]
    for line, name in [*used, *((line, full.split(".")[-1]) for line, full in source.imports)]:
        tensor_hook_at_home = name in TENSOR_HOOKS and source.path.startswith("tiered_zero/grads/")
        if re.fullmatch(r"_?register_\w*hook", name) and not tensor_hook_at_home:
            yield line, f"{name}, which lives in unit/hooks.py" + " (or grads/)" * (name in TENSOR_HOOKS)


@rule(
    PACKAGE,
    planted={
        "tiered_zero/a.py": [
            "import torch\ntorch.nn.Linear.forward = f",
            "import torch.nn.functional as F\nF.linear = f",
            "from torch import Tensor\nsetattr(Tensor, 'cuda', f)",
        ]
    },
    innocent={
        "tiered_zero/a.py": ["import torch\nx = torch.ones(2)\nself.x = torch.ones"],
        "tiered_zero/deepspeed/a.py": ["import torch\ntorch.Tensor.ds_status = 1"],
    },
)
def torch_is_not_patched(source: Source) -> Found:
    """DeepSpeed's own attributes, `ds_...`, replace nothing: tiered_zero.deepspeed may add them."""
    stored = [node for node in source.nodes(ast.Attribute) if not isinstance(node.ctx, ast.Load)]
    setattrs = [node.args[0] for node in source.nodes(ast.Call) if ast.unparse(node.func) == "setattr"]
    for node in [*stored, *setattrs]:
        is_of_deepspeed = source.path.startswith(DEEPSPEED) and getattr(node, "attr", "").startswith("ds_")
        if source.full_name(node).startswith("torch.") and not is_of_deepspeed:
            yield node.lineno, f"{ast.unparse(node)} is torch's own: wrap it, do not replace it"


@rule(
    PACKAGE,
    planted={"tiered_zero/a.py": ["assert f.write(b'') == 3", "assert (n := 3)", "assert not queue.pop(), 'x'"]},
    innocent={"tiered_zero/a.py": ["assert len(x.keys()) == 3, describe(x)"]},
)
def asserts_change_nothing(source: Source) -> Found:
    for statement in source.nodes(ast.Assert):
        for node in ast.walk(statement.test):
            called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else None
            if isinstance(node, ast.NamedExpr | ast.Await) or (called and called not in PURE):
                yield node.lineno, f"{ast.unparse(node)} inside an assert: `python -O` drops it"


NAMED = {ast.ClassDef: "name", ast.FunctionDef: "name", ast.AsyncFunctionDef: "name", ast.arg: "arg"}
NAMED |= {ast.alias: "asname", ast.Name: "id", ast.Attribute: "attr"}
DEEPSPEED = "tiered_zero/deepspeed/"
"""Files that scripts import by their names."""
EMPTY_WORDS = {"manager", "managers", "helper", "helpers", "util", "utils"}


@rule(
    CODE,
    planted={
        "tiered_zero/a.py": [
            "class SwapManager: ...",
            "def get_helper(): ...",
            "def f(utils): ...",
            "import x as util",
            "self.helper = 1",
        ],
        "tests/test_utils.py": [""],
    },
    innocent={
        "tiered_zero/a.py": [
            "from contextlib import AbstractContextManager, contextmanager\nx: AbstractContextManager",
            "import torch.utils.checkpoint\nx = torch.utils.checkpoint",
        ]
    },
)
def names_say_what_a_thing_is(source: Source) -> Found:
    names = [(1, part) for part in re.split(r"[/.]", source.path) if not source.path.startswith(DEEPSPEED)]
    for node in source.nodes(*NAMED):
        if not isinstance(getattr(node, "ctx", None), ast.Load):
            names.append((node.lineno, getattr(node, NAMED[type(node)]) or ""))
    for line, name in names:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
        if empty := EMPTY_WORDS.intersection(words):
            yield line, f"{name}: {min(empty)!r} says nothing; name what it holds or does"


DOOR = "tests/support/inspection/"
INSIDES = frozenset("assembly checkpoint engine grads unit record tiers update".split())
"""Folders whose files move: what tests of other folders need of them goes through DOOR."""


@rule(
    ("tests/",),
    planted={"tests/a.py": ["engine._inspect().pager", "engine._step.policy"]},
    innocent={"tests/support/inspection/__init__.py": ["engine._inspect()"], "tests/a.py": ["inspect.stack()"]},
)
def tests_look_inside_engines_in_one_file(source: Source) -> Found:
    if not source.path.startswith(DOOR):
        for node in source.nodes(ast.Attribute):
            if node.attr == "_inspect" or ast.unparse(node) == "engine._step":
                yield node.lineno, f"{node.attr}: ask {DOOR}"


@rule(
    ("tests/",),
    planted={
        "tests/crash/a.py": [
            "from tiered_zero.record.directory import list_runs",
            "from tiered_zero import record",
            "def f():\n    import tiered_zero.checkpoint.tag",
            "import tiered_zero\ntiered_zero.unit.pager.Pager",
            "CHILD = 'import sys; from tiered_zero.engine.engine import Engine'",
            "patch('tiered_zero.tiers.rack.SwapStore')",
        ],
        "tests/checkpoint/a.py": ["from tiered_zero.record.directory import list_runs"],
    },
    innocent={
        "tests/support/inspection/insides.py": ["from tiered_zero.record.directory import list_runs"],
        "tests/record/a.py": ["from tiered_zero.record.directory import list_runs"],
        "tests/crash/a.py": [
            "from tests.support.inspection.insides import list_runs",
            "from tiered_zero.io.select import select_engine",
            "'set tiered_zero.checkpoint.in_place'",
        ],
    },
)
def tests_import_insides_through_one_door(source: Source) -> Found:
    """A folder's own tests may import it. Programs of children and names to patch, which are strings, count too."""
    if source.path.startswith((DOOR, "tests/test_house_rules.py")):
        return
    found = [(line, full) for line, full in source.uses if full.startswith("tiered_zero.")]
    for node in source.nodes(ast.Constant):
        if isinstance(node.value, str):
            named = re.findall(r"(?:from|import) (tiered_zero\.[\w.]+)|^(tiered_zero(?:\.\w+){3,})$", node.value)
            found += [(node.lineno, name) for names in named for name in names if name]
    own = source.path.split("/")[1]
    for line, full in sorted(set(found)):
        folder = full.split(".")[1]
        if folder in INSIDES and folder != own:
            yield line, f"{full}: take it from {DOOR}insides.py"


@rule(
    PACKAGE,
    planted={"tiered_zero/engine/engine.py": ["print('x')"], "tiered_zero/client.py": ["def f():\n    print()"]},
    innocent={
        "tiered_zero/cli/a.py": ["print('x')"],
        "tiered_zero/demo/a.py": ["print('x')"],
        "tiered_zero/a.py": ["'print()'"],
    },
)
def only_the_command_line_prints(source: Source) -> Found:
    steps_per_print = "tiered_zero/telemetry/monitors.py"
    if not source.path.startswith(
        ("tiered_zero/__main__.py", "tiered_zero/cli/", "tiered_zero/demo/", steps_per_print)
    ):
        for node in source.nodes(ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "print":
                yield node.lineno, "print: log it, or return it to the command line"


@rule(
    EVERYTHING,
    planted={"tools/a.py": ["# TO" + "DO: x"], "tiered_zero/native/a.c": ["// FIX" + "ME", "/* XX" + "X */"]},
    innocent={"README.md": ["XXXL, mastodon, to do"]},
)
def nothing_is_left_for_later(source: Source) -> Found:
    for line, word in source.matches(r"\b(?:TO[D]O|FIX[M]E|X{3})\b"):
        yield line, f"{word}: do it, or write it where work is planned"


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return whole_tree()


@pytest.mark.parametrize("name", RULES)
def test_the_tree_obeys(name: str, sources: list[Source]) -> None:
    if found := RULES[name].violations(sources):
        pytest.fail("\n".join([f"{name}:", *found]), pytrace=False)


@pytest.mark.parametrize("name", RULES)
def test_the_rule_bites(name: str) -> None:
    rule = RULES[name]
    assert rule.planted and rule.innocent
    assert [sample for sample in rule.planted if not rule.violations([Source(*sample)])] == []
    assert [sample for sample in rule.innocent if rule.violations([Source(*sample)])] == []


def test_the_rules_read_the_whole_tree(sources: list[Source]) -> None:
    read = {source.path for source in sources}
    assert {"pyproject.toml", ".ci/run", "tools/check.py", "tests/test_house_rules.py"} <= read
    assert {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tiered_zero/**/*.py")} <= read
