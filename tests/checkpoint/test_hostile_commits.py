"""In-place commits from strangers: whatever their manifest says, one error, and nothing read outside of them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.crash.run_commits import config
from tests.support.inspection.insides import MANIFEST_NAME, OWNER_NAME
from tests.support.json_files import read_body, with_body
from tests.support.tags import load_commit
from tiered_zero.checkpoint.tag import find_checkpoint, open_commit
from tiered_zero.errors import StoreError, TieredZeroError

STRANGE: list[Any] = [None, True, -1, 0, 3, 2**40, 2**63, 2**64, 1.5, "", "x", "/etc/passwd", "../x", [], [[]], {}]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has committed one step; its tags are beside it."""
    path = tmp_path_factory.mktemp("strangers")
    swap_path = path / "swap"
    swap_path.mkdir(mode=0o700)
    settings = config(swap_path, "barrier", "fp32", {"in_place": True})
    with tiered_zero.initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=settings)[0] as engine:
        engine.backward(engine(torch.randn(2, 8, dtype=torch.bfloat16)).square().mean())
        engine.step()
        engine.save_checkpoint(path / "saved")
    (found,) = swap_path.iterdir()
    return found


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) of a tree of JSON."""
    for key in [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from nodes(value[key])


def test_changed_manifests(saved: Path) -> None:
    path = saved / MANIFEST_NAME
    original = path.read_bytes()
    body = read_body(original)
    chance = random.Random(0)
    refused = 0
    try:
        load_commit(saved)
        for _ in range(400):
            changed = json.loads(json.dumps(body))
            places = list(nodes(changed))
            for _ in range(chance.randint(1, 2)):
                container, key = chance.choice(places)
                if chance.random() < 0.2 and isinstance(container, dict):
                    container.pop(key, None)
                elif not isinstance(container, list) or key < len(container):
                    container[key] = chance.choice(STRANGE)
            path.write_bytes(with_body("tiered_zero.store", changed))
            try:
                load_commit(saved)
            except TieredZeroError:
                refused += 1
    finally:
        path.write_bytes(original)
    assert refused > 100


@pytest.mark.parametrize("number", range(40))
def test_a_manifest_cut_or_changed_anywhere_is_damaged(saved: Path, number: int) -> None:
    path = saved / MANIFEST_NAME
    original = path.read_bytes()
    at = len(original) * number // 40
    flipped = original[:at] + bytes([original[at] ^ 4]) + original[at + 1 :]
    try:
        for data in (original[:at], flipped):
            path.write_bytes(data)
            with pytest.raises(StoreError):
                load_commit(saved)
    finally:
        path.write_bytes(original)


def test_what_is_no_commit_is_refused_with_the_reason(saved: Path, tmp_path: Path) -> None:
    tags = saved.parents[1] / "saved"
    assert find_checkpoint(tags).swap == saved
    for name in (MANIFEST_NAME, OWNER_NAME):
        hidden = saved / f"{name}.hidden"
        (saved / name).rename(hidden)
        try:
            with pytest.raises(StoreError):
                open_commit(saved)
        finally:
            hidden.rename(saved / name)
    with pytest.raises(StoreError):
        find_checkpoint(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(StoreError):
        find_checkpoint(tmp_path)
