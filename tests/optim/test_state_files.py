"""Files of save_state() that were changed, cut, exchanged or added to: the state that was saved, or one clear error."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.json_files import read_body, with_body
from tiered_zero.errors import ModelError, StoreError
from tiered_zero.optim import OffloadedOptimizer, state_files
from tiered_zero.optim.state_files import StateFiles, write_state

FORMAT = "tiered_zero.optimizer_state"
NAME = "optimizer.safetensors"


def params() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [
        nn.Parameter(torch.randn(shape, dtype=dtype))
        for shape in ((5,), (3, 4), ())
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for param in found:
        param.grad = torch.randn_like(param)
    return found


@pytest.fixture
def optimizer() -> Iterator[OffloadedOptimizer]:
    with OffloadedOptimizer(params(), torch.optim.AdamW, {"device": "cpu"}, lr=torch.tensor(0.1)) as found:
        found.step()
        yield found


def bits(optimizer: OffloadedOptimizer) -> list[bytes]:
    states = optimizer.state_dict()["state"].values()
    return [value.view(-1).view(torch.uint8).numpy().tobytes() for state in states for value in state.values()]


def refused(directory: Path, optimizer: OffloadedOptimizer) -> str:
    """Return the error of a load, after which the optimizer has the state that it had."""
    before = bits(optimizer)
    with pytest.raises(StoreError) as found:
        optimizer.load_state(directory)
    assert str(directory) in str(found.value) and bits(optimizer) == before
    return str(found.value)


def test_a_directory_without_its_files_is_refused(optimizer: OffloadedOptimizer, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no file there has an index"):
        optimizer.load_state(tmp_path)


def test_no_flipped_bit_and_no_cut_passes(optimizer: OffloadedOptimizer, tmp_path: Path) -> None:
    (path,) = optimizer.save_state(tmp_path)
    whole, random, num_refused = path.read_bytes(), Random(0), 0
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 31), *range(header, len(whole), 23)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << random.randrange(8)]) + whole[place + 1 :])
        saved = bits(optimizer)
        try:
            optimizer.load_state(tmp_path)
            assert bits(optimizer) == saved and place < header, "a space of the header"
        except StoreError as error:
            assert str(tmp_path) in str(error)
            num_refused += 1
    assert num_refused > 100
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(tmp_path, optimizer)


def test_what_is_not_of_one_save_is_refused(
    optimizer: OffloadedOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = optimizer.save_state(tmp_path)
    whole = path.read_bytes()
    (tmp_path / "optimizer-old.safetensors").write_bytes(whole)
    optimizer.load_state(tmp_path)  # of another name: nobody's
    (extra := tmp_path / "optimizer-00001-of-00002.safetensors").write_bytes(whole)
    assert extra.name in refused(tmp_path, optimizer)
    extra.unlink()
    path.unlink()
    os.mkfifo(path)
    assert "is no file; expected a file" in refused(tmp_path, optimizer)
    path.unlink()
    assert "save_state" in refused(tmp_path, optimizer)
    monkeypatch.setattr(state_files, "write_weights", partial(state_files.write_weights, max_shard_nbytes=300))
    *files, _ = optimizer.save_state(tmp_path)
    assert len(files) == 3
    optimizer.load_state(tmp_path)
    files[1].rename(tmp_path / "aside")
    assert "Copy the files of one save" in refused(tmp_path, optimizer)
    files[0].rename(files[1])
    refused(tmp_path, optimizer)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": []},
        {"state": None},
        {"state": [{"$dict": [5]}] * 6},
        {"state": [[]] * 6},
        {"groups": []},
        {"groups": ["lr"]},
        {"groups": {"$tensor": ["float32", [], ""]}},
        {"tensors": {"0/step": "0" * 16}},
        {"tensors": {"step": "0" * 16}},
        {"tensors": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_an_index_that_no_save_makes_is_refused(
    changes: dict[str, Any], optimizer: OffloadedOptimizer, tmp_path: Path
) -> None:
    """Its own checksum is right."""
    (path,) = optimizer.save_state(tmp_path)
    tensors = load_file(path)
    index = read_body(bytes(tensors["index"].numpy()))
    text = with_body(FORMAT, {**index, **changes})
    save_file({**tensors, "index": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, path)
    refused(tmp_path, optimizer)


def test_nested_state_comes_back_as_it_was(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(2))
    groups = [{"params": [param], "lr": torch.tensor(0.5), "betas": (0.9, 0.99)}]
    state: dict[str, Any] = {
        "step": torch.tensor(3.0),
        "history": [torch.arange(4), (1, 2.5, None), {"inner": torch.ones(2, 0, dtype=torch.bfloat16), 7: True}],
        "rate": math.nan,
        "name": "x",
    }
    write_state(tmp_path, {param: state}, groups)
    with StateFiles(tmp_path, groups) as files:
        found = files[param]
        assert files.groups[0].keys() == groups[0].keys() and files.groups[0]["lr"] == 0.5
        assert files.groups[0]["betas"] == (0.9, 0.99)
    assert found.keys() == state.keys() and found["step"] == 3 and math.isnan(found["rate"]) and found["name"] == "x"
    assert torch.equal(found["history"][0], torch.arange(4)) and found["history"][1] == (1, 2.5, None)
    inner = found["history"][2]
    assert list(inner) == ["inner", 7] and inner["inner"].shape == (2, 0) and inner["inner"].dtype is torch.bfloat16
    with pytest.raises(ModelError, match="type set"):
        write_state(tmp_path, {param: {"x": {1}}}, groups)


def test_a_state_dict_that_stands_for_files_is_read_before_the_next_step(
    optimizer: OffloadedOptimizer, tmp_path: Path
) -> None:
    """It has no tensors, a plain optimizer refuses it, and only the files of its save do."""
    other = tmp_path / "other"
    optimizer.save_state(other)
    optimizer.step()
    expected = bits(optimizer)
    saved = optimizer.save_state_dict(tmp_path / "own")
    assert saved["state"] == {} and saved["param_groups"] == []
    with pytest.raises(ValueError, match="param"):
        torch.optim.AdamW(params()).load_state_dict(saved)
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert optimizer.awaits_files
    for call in (optimizer.step, optimizer.state_dict, partial(optimizer.save_state, other)):
        with pytest.raises(ModelError, match="load_state"):
            call()
    with pytest.raises(StoreError, match="saved with it"):
        optimizer.load_state(other)
    optimizer.load_state(tmp_path / "own")
    assert not optimizer.awaits_files and bits(optimizer) == expected
