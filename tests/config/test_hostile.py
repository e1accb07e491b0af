"""Whatever a config holds, `load` gives a Config that can be explained, or a ConfigError. Run long with FUZZ=100000."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.config.shipped_configs import SHIPPED
from tiered_zero.config.deepspeed_keys import table
from tiered_zero.config.load import load, parse_json
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError, TieredZeroError

BASES = [json.loads(path.read_text()) for path in sorted((Path(__file__).parents[2] / "configs").glob("*.json"))]
BASES += SHIPPED.values()
LONG = 1 + int(os.environ.get("FUZZ", "0"))


SCALARS: list[Any] = [None, True, False, 0, 1, -1, 2, 0.5, 1e9, 1e308, float("nan"), float("inf"), 2**63]
SCALARS += [
    "",
    "auto",
    "8",
    "1e400",
    "9" * 5000,
    "-1",
    "cpu",
    "nvme",
    "none",
    "1e400GiB",
    "infGiB",
]
SCALARS += ["Adam", "OneCycle", "WarmupLR", "x" * 10_000, b"bytes", object(), {1, 2}, 1j]
CONTAINERS: list[Any] = [[], {}, [1], [[]], ["auto"], {"enabled": True}, {"device": "nvme"}, {"": 1}, {1: 2}, (1, 2)]
VALUES = st.sampled_from([*SCALARS, *CONTAINERS])
PATHS = st.sampled_from(
    [*table(Config), "a", "zero_optimization", "optimizer", "fp16", "aio", "tiered_zero", "scheduler"]
)


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        if not isinstance(tree.get(section), dict):
            tree[section] = {}
        tree = tree[section]
    tree[name] = dict(value) if isinstance(value, dict) else value


@settings(max_examples=300 * LONG, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    base=st.sampled_from(range(len(BASES))),
    changes=st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=4),
    to_train=st.booleans(),
)
def test_any_mutated_config(base: int, changes: list[tuple[str, Any]], to_train: bool) -> None:
    tree = copy.deepcopy(BASES[base])
    for path, value in changes:
        put(tree, path, value)
    try:
        config = load(tree, to_train=to_train)
    except ConfigError as error:
        assert str(error) and len(str(error)) < 10_000
        return
    assert config.explain()
    assert all(isinstance(line, str) for line in config.notices)


@settings(max_examples=200 * LONG, deadline=None, derandomize=True)
@given(
    base=st.sampled_from(range(len(BASES))),
    place=st.floats(0, 1),
    text=st.one_of(st.text(max_size=4), st.sampled_from(["[", '{"a":', "1e999", "NaN", "\0"])),
    removed=st.integers(0, 6),
)
def test_any_mutated_text(base: int, place: float, text: str, removed: int) -> None:
    whole = json.dumps(BASES[base], indent=1)
    at = int(place * len(whole))
    try:
        assert load(parse_json(whole[:at] + text + whole[at + removed :], "a test")).explain()
    except ConfigError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"train_batch_size": "9" * 5000}, "train_batch_size: expected a finite number; found '999"),
        ({"tiered_zero": {"host_memory_limit": float("inf")}}, "tiered_zero.host_memory_limit: "),
        ({"tiered_zero": {"host_memory_limit": "1e400GiB"}}, "tiered_zero.host_memory_limit: '1e400GiB' is no size"),
        ({"tiered_zero": {"host_memory_limit": "-1GiB"}}, "tiered_zero.host_memory_limit: '-1GiB' is no size"),
    ],
)
def test_hostile_values(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 8, **sections})
    assert text in str(caught.value)


def test_a_config_error_is_a_value_error_and_ours() -> None:
    with pytest.raises(ValueError, match="train_batch_size") as caught:
        load({"train_batch_size": 0})
    assert isinstance(caught.value, TieredZeroError)


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load(f"{tmp_path}/a\0b")
