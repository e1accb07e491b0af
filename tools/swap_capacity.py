"""What a run of a config needs on NVMe, on a host that has neither torch nor tiered_zero: Python 3.8 or newer will do.

    python tools/swap_capacity.py config.json --model gpt:layers=24,hidden=2048 --tbw 600 --step-seconds 1.5

The same answer as `tiered-zero swap capacity`. The formulas are the package's own, in one file that imports nothing:
to use it on a storage host, copy the two files side by side,

    scp tools/swap_capacity.py tiered_zero/layout/swap_bytes.py host:

It reads only the keys of the config that decide bytes on NVMe; `tiered-zero explain` checks the others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any


def load_formulas() -> Any:
    """swap_bytes.py: beside this file, or in the checkout that this file is part of."""
    here = Path(__file__).resolve().parent
    places = [here / "swap_bytes.py", here.parent / "tiered_zero" / "layout" / "swap_bytes.py"]
    found = [place for place in places if place.is_file()]
    if not found:
        sys.exit(f"swap_bytes.py of tiered_zero/layout is not beside {__file__}; copy it there.")
    spec = importlib.util.spec_from_file_location("swap_bytes", found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


formulas = load_formulas()

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.DOTALL)


def parse_json(text: str) -> Any:
    """As the package reads it: comments and trailing commas are allowed."""
    for pattern in (_COMMENT, _TRAILING_COMMA):
        text = pattern.sub(lambda match: match.group(1) or " ", text)
    return json.loads(text)


class Tree:
    """A JSON object, or what stands where one may be left out. "auto" and null are the default."""

    def __init__(self, node: Any) -> None:
        self._node = node if isinstance(node, dict) else {}

    def section(self, *names: str) -> Tree:
        return Tree(self.get(*names))

    def get(self, *names: str, default: Any = None) -> Any:
        """The value under the first of its names that is there."""
        values = (self._node.get(name) for name in names)
        return next((value for value in values if value not in (None, "auto")), default)

    def count(self, *names: str, default: int) -> int:
        """Elements: 1e9, "1e9" and 1.5 are counts; a fraction is rounded down."""
        value = self.get(*names, default=default)
        return value if isinstance(value, int) else int(float(value)) if not _is_digits(value) else int(value)

    def is_on(self, name: str) -> bool:
        return str(self.get(name)).lower() in ("true", "1", "on", "yes", "t", "y")

    def items(self) -> dict[str, Any]:
        return self._node


def _is_digits(value: Any) -> bool:
    """Digits in a string are exact beyond 2**53."""
    return isinstance(value, str) and value.strip().lstrip("+-").isdecimal()


def read_settings(config: Any) -> tuple[Any, str]:
    """The parsed config -> (SwapSettings, a note or ""). Raises ValueError for what cannot be told from it."""
    tree = Tree(config)
    zero, own = tree.section("zero_optimization"), tree.section("tiered_zero")
    param, state = zero.section("offload_param"), zero.section("offload_optimizer")
    if zero.get("cpu_offload_param") is True:
        param = Tree({"device": "cpu"})
    device = param.get("device", default="none")
    if device != "none" and zero.count("stage", default=0) != 3:
        raise ValueError("zero_optimization.offload_param needs zero_optimization.stage 3")
    half = any(tree.section(*names).is_on("enabled") for names in (("bf16", "bfloat16"), ("fp16",)))
    optimizer = tree.section("optimizer")
    name = optimizer.get("type")
    counted = formulas.count_state_arrays(name or "adamw", optimizer.section("params").items())
    if counted is None and state.get("device") == "nvme":
        raise ValueError(f"optimizer.type {name!r} is not known here; `tiered-zero swap capacity` can try it")
    arrays, whole = counted or (0, False)
    state_format = own.get("state_format", default="fp32")
    if state_format not in formulas.STATE_ITEMSIZES:
        raise ValueError(f"tiered_zero.state_format is one of {', '.join(formulas.STATE_ITEMSIZES)}")
    prefixed = ("stage3_param_persistence_threshold", "param_persistence_threshold")
    prefixed_max = ("stage3_model_persistence_threshold", "model_persistence_threshold")
    settings = formulas.SwapSettings(
        itemsize=2 if half else 4,
        param_paths=_paths(param, "offload_param"),
        state_paths=_paths(state, "offload_optimizer"),
        persistence_numel=zero.count(*prefixed, default=100_000) if device != "none" else 0,
        max_persistent_numel=zero.count(*prefixed_max, default=2**63 - 1),
        max_host_param_numel=param.count("max_in_cpu", default=1_000_000_000),
        unit_cap_numel=own.count("unit_size_cap", default=0) or None,
        state_arrays=arrays,
        whole_parameters=whole,
        delayed=own.get("update") == "delayed",
        state_format=state_format,
        sub_group_numel=formulas.sub_group_numel(zero.count("sub_group_size", default=0) or 1_000_000_000),
        ratio=float(state.get("ratio", default=1.0)),
        state_limits=_limits(own.section("state_limits")),
    )
    return settings, "" if name else formulas.NO_OPTIMIZER


def _paths(section: Tree, name: str) -> tuple[str, ...]:
    if section.get("device") != "nvme":
        return ()
    given = section.get("nvme_path", default=())
    paths = tuple(path.strip() for path in (given.split(",") if isinstance(given, str) else given) if path.strip())
    if not paths:
        raise ValueError(f"zero_optimization.{name}.nvme_path is missing")
    return paths


def _limits(section: Tree) -> dict[str, int]:
    """Tier -> bytes: a number, or text such as "1.5GiB"."""
    given = {tier: str(section.get(tier, default="")).lower().replace(" ", "") for tier in formulas.TIERS}
    parsed = {tier: re.fullmatch(r"([0-9.e+]+?)(?:([kmgt])(i?)b?|b?)", text) for tier, text in given.items() if text}
    limits = {}
    for tier, match in parsed.items():
        if match is None:
            raise ValueError(f"tiered_zero.state_limits.{tier}: {given[tier]!r} is no size")
        number, unit, binary = match.groups()
        limits[tier] = int(float(number) * (1024 if binary else 1000) ** (" kmgt".index(unit) if unit else 0))
    return limits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="the DeepSpeed-style JSON")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="gpt:...", help="such as gpt:layers=24,hidden=2048")
    model.add_argument("--params", type=float, metavar="7e9", help="a GPT of about that size")
    parser.add_argument("--tbw", type=float, metavar="TB", help="what one drive is rated to take, in 10**12 bytes")
    parser.add_argument("--step-seconds", type=float, metavar="S", help="measured time of a step")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if any(value is not None and not value > 0 for value in (options.tbw, options.step_seconds)):
        parser.error("--tbw and --step-seconds are above zero")
    try:
        shape = formulas.parse_gpt(options.model) if options.model else formulas.gpt_of_size(options.params)
        config = parse_json(Path(options.config).read_text(encoding="utf-8-sig"))
        settings, note = read_settings(config)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    need = formulas.gpt_need(shape, settings)
    count = shape.num_parameters
    report = formulas.capacity_report(str(shape), count, need, settings, options.tbw, options.step_seconds, note)
    print(json.dumps(report) if options.json else "\n".join(formulas.capacity_lines(report)))
    return 0 if report["fits"] else 1


if __name__ == "__main__":
    sys.exit(main())
