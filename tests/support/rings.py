"""Two rings of tests: `pytest` shows each promise once, in minutes; `pytest -m full` runs all the rest."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

PROMISES = {
    "the numbers of plain PyTorch, bit for bit": (
        "parity/test_fp32.py parity/test_half.py parity/test_optimizers.py parity/test_overflow.py "
        "parity/test_offloaded.py parity/test_architectures.py parity/test_direct_backward.py rules/test_adam.py "
        "rules/test_from_config.py optim test_data.py"
    ),
    "on several ranks too": "ranks/test_stage3.py",
    "nothing lost, nothing silent": (
        "crash/test_checkpoint_save.py checkpoint/test_resume.py checkpoint/test_damage.py "
        "checkpoint/test_full_disk.py checkpoint/test_versions.py checkpoint/test_directory.py "
        "faults/test_gradients.py parity/test_failures.py io/test_disk_engine.py test_stopping.py"
    ),
    "it fits, or says why before it starts": (
        "plan/test_planner.py plan/test_remedies.py plan/test_host_device.py memory/test_lifecycle.py "
        "tiers/test_tier.py"
    ),
    "what was asked is what runs": (
        "config/test_load.py config/test_hostile.py config/test_explain.py telemetry/test_report.py deepspeed "
        "engine/test_engine.py test_api.py"
    ),
    "commands, pages and the rules of the house": (
        "cli/test_main.py cli/test_plan.py cli/test_train.py cli/test_doctor.py cli/test_checkpoint.py docs "
        "demo/test_gpt.py test_house_rules.py test_failed_tests.py"
    ),
}
"""Promise -> the files and folders below tests/ that show it."""

FIRST = tuple(TESTS / name for names in PROMISES.values() for name in names.split())
_NOT_FULL = "not full and "
_BY_NAME = ("clients", "cuda_wheel", "gpu", "thorough")


def choose_ring(config: pytest.Config) -> None:
    """Let a plain `pytest` collect the first ring alone, `-m full` all but that, and paths that are named all their
    tests."""
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    if _NOT_FULL in config.option.markexpr and is_named:
        config.option.markexpr = config.option.markexpr.replace(_NOT_FULL, "")
    elif _NOT_FULL in config.option.markexpr:
        config.args[:] = map(str, FIRST)
    elif config.option.markexpr == "full" and not is_named:
        config.args[:] = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if not _is_first(path)]


@cache
def _is_first(path: Path) -> bool:
    return any(path.is_relative_to(first) for first in FIRST)


def mark_full(item: pytest.Item) -> None:
    """Mark a test `full` that the first ring lacks, and that no other marker names."""
    if not _is_first(item.path) and not any(item.get_closest_marker(name) for name in _BY_NAME):
        item.add_marker("full")
