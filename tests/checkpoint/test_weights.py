"""engine.save_16bit_model: what from_pretrained and plain torch read back is what the engine held, to the bit."""

from __future__ import annotations

import errno
import json
import os
import socket
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.support.models import ParityGPT, batch
from tests.support.trainers import same_bits, tiered, train
from tiered_zero.checkpoint import weights as weights_module
from tiered_zero.checkpoint.weights import WeightTensor, copy_config, write_weights
from tiered_zero.errors import InternalError, ModelError, StoreError

BF16 = {"bf16": {"enabled": True}}
PLACEMENTS = [("none", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")]


def load_directory(path: Path) -> dict[str, torch.Tensor]:
    """By the index where there is one."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return load_file(path / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {name: load_file(path / file) for file in set(weight_map.values()) for name in [file]}
    return {name: found[file][name] for name, file in weight_map.items()}


@pytest.mark.parametrize("max_shard_size", ["5GB", 20_000])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_the_files_hold_the_models_state_dict(
    placement: tuple[str, str], max_shard_size: Any, swap_path: Path, tmp_path: Path
) -> None:
    """Each of the names of a tied weight, frozen ones, uint8, integer and boolean buffers; after updates that may still
    run."""
    torch.manual_seed(0)
    with tiered(ParityGPT(), swap_path, placement, **BF16) as engine:
        train(engine, batch, 2)
        assert engine.save_16bit_model(tmp_path / "out", max_shard_size=max_shard_size) is True
        expected = engine.module.state_dict()
        train(engine, batch, 1)
    found = load_directory(tmp_path / "out")
    ParityGPT().to(torch.bfloat16).load_state_dict(found, strict=True)
    assert expected.keys() == found.keys() and same_bits(found["head.weight"], found["tokens.weight"])
    assert all(same_bits(value, expected[name]) for name, value in found.items())
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    if max_shard_size == "5GB":
        assert files == ["model.safetensors"]
    else:
        assert files[-1] == "model.safetensors.index.json" and len(files) > 3
        sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / name).values()) for name in files[:-1]]
        assert max(sizes) <= 20_000
        index = json.loads((tmp_path / "out" / files[-1]).read_text())
        assert index["metadata"]["total_size"] == sum(sizes) == sum(t.nbytes for t in found.values())
    for name in files:
        assert (tmp_path / "out" / name).stat().st_mode & 0o777 == 0o600
        if name.endswith(".safetensors"):
            with safe_open(tmp_path / "out" / name, framework="pt") as file:
                assert file.metadata() == {"format": "pt"}


def test_frozen_parameters_can_be_left_out(swap_path: Path, tmp_path: Path) -> None:
    with tiered(ParityGPT(), swap_path) as engine:
        assert engine.save_fp16_model(tmp_path, exclude_frozen_parameters=True)
        expected = engine.module.state_dict()
    found = load_file(tmp_path / "model.safetensors")
    assert expected.keys() - found.keys() == {"scale", "codes"}


def test_order_in_memory_is_no_order_of_the_file(swap_path: Path, tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = nn.Parameter(torch.randn(40, 32).t())
            self.scalar = nn.Parameter(torch.tensor(2.5))
            self.register_buffer("turned", torch.arange(12).view(3, 4).t())
            self.register_buffer("unsaved", torch.ones(3), persistent=False)

    with tiered(Net(), swap_path) as engine:
        engine.save_16bit_model(tmp_path)
        expected = engine.module.state_dict()
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"mixed", "scalar", "turned"}
    assert all(torch.equal(found[name], value) and found[name].shape == value.shape for name, value in expected.items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "untied"])
def test_from_pretrained_loads_it_with_equal_bits(family: str, swap_path: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=family == "llama",
        )
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (2, 8))
    with tiered(model, swap_path, ("nvme", "nvme"), **BF16) as engine:
        for _ in range(2):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.save_16bit_model(tmp_path, max_shard_size=15_000)
        expected = engine.module.state_dict()
    assert (tmp_path / "model.safetensors.index.json").exists()
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(same_bits(value, found[name]) for name, value in expected.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model) and again.dtype == torch.bfloat16


def values(**tensors: torch.Tensor) -> list[WeightTensor]:
    return [
        WeightTensor(name=name, dtype=value.dtype, shape=tuple(value.shape), read=lambda value=value: [value])  # type: ignore[misc]
        for name, value in tensors.items()
    ]


def test_earlier_weights_are_replaced_as_a_whole(tmp_path: Path) -> None:
    first = values(a=torch.ones(100), b=torch.ones(100), c=torch.ones(100))
    assert len(write_weights(tmp_path, first, max_shard_nbytes=400)) == 4
    (tmp_path / "notes.txt").write_text("mine")
    second = values(a=torch.zeros(100), b=torch.zeros(100))
    write_weights(tmp_path, second, max_shard_nbytes=400)
    assert load_directory(tmp_path).keys() == {"a", "b"} and len(list(tmp_path.iterdir())) == 4
    write_weights(tmp_path, first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "notes.txt"]
    write_weights(tmp_path, second, max_shard_nbytes=400)
    assert load_directory(tmp_path).keys() == {"a", "b"} and not (tmp_path / "model.safetensors").exists()


def test_widths_are_mixed_and_tensors_are_empty(tmp_path: Path) -> None:
    tensors = values(
        flag=torch.tensor(True),
        wide=torch.arange(3, dtype=torch.float64),
        none=torch.empty(0, 4),
        half=torch.arange(5).bfloat16(),
        word=torch.tensor([1, -1], dtype=torch.int16),
    )
    write_weights(tmp_path, tensors)
    found = load_file(tmp_path / "model.safetensors")
    for tensor in tensors:
        (expected,) = tensor.read()
        assert same_bits(found[tensor.name], expected)


@pytest.mark.parametrize("at", ["write", "replace"])
def test_what_fails_leaves_what_was_there(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path, values(a=torch.ones(100)))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(weights_module.os, "fsync" if at == "write" else "replace", full)
    with pytest.raises(StoreError, match=r"weights \(400 B\) cannot be written to .*No space left on device"):
        write_weights(tmp_path, values(a=torch.zeros(100)))
    monkeypatch.undo()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.ones(100))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_room_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 399}))
    with pytest.raises(StoreError, match=r"The weights take 400 B; 399 B are free in .* Nothing was written"):
        write_weights(tmp_path, values(a=torch.zeros(100)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", ["export", "config"])
def test_what_a_killed_process_of_this_host_has_left_is_removed(tmp_path: Path, by: str) -> None:
    """Another host may export to the same shared directory, under a process id that is unknown or another's here."""
    host, out, model = socket.gethostname(), tmp_path / "out", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    kept = sorted([f".part-{host}-{os.getpid()}-ab", ".part-other-999999999-ab", f".part-{host}-7-999999999-ab"])
    for name in (f".part-{host}-999999999-ab", *kept):
        (out / name).mkdir(parents=True)
        (out / name / "model.safetensors").write_bytes(b"x")
    if by == "export":
        (made,) = write_weights(out, values(a=torch.zeros(100)))
    else:
        (made,) = copy_config(model, out, "float32")
    assert sorted(path.name for path in out.iterdir()) == [*kept, made.name]


def test_a_killed_copy_of_a_config_leaves_what_the_next_export_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model, left = tmp_path / "out", tmp_path / "model", list[str]()
    for path in (out, model):
        path.mkdir()
    (model / "config.json").write_text("{}")

    def note(source: Path, target: Path) -> None:
        left.extend(os.listdir(out))

    monkeypatch.setattr(weights_module.os, "replace", note)
    copy_config(model, out, "float32")
    assert len(left) == 1 and left[0].startswith(f".part-{socket.gethostname()}-{os.getpid()}-")


def test_a_tensor_that_is_short_is_never_published(tmp_path: Path) -> None:
    short = WeightTensor(name="a", dtype=torch.float32, shape=(5,), read=lambda: [torch.ones(4)])
    with pytest.raises(InternalError, match="a was to be written with 20 bytes; found 16"):
        write_weights(tmp_path, [short])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"), [("x.bin", "ends with .safetensors; found 'x.bin'"), ("../m.safetensors", "expected a name")]
)
def test_names_of_other_formats_and_places_are_refused(
    name: str, message: str, swap_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiered(ParityGPT(), swap_path) as engine:
        with pytest.raises(ModelError, match=message):
            engine.save_16bit_model(tmp_path / "out", name)
        engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
    assert "writes safetensors: model.safetensors, not pytorch_model.bin" in caplog.text
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    """Eight tensors of 4 MB, each made as it is read; numpy's and Python's allocations are traced."""
    import numpy

    def one() -> list[torch.Tensor]:
        return [torch.from_numpy(numpy.ones(1_000_000, dtype=numpy.float32))]

    tensors = [WeightTensor(name=str(n), dtype=torch.float32, shape=(1_000_000,), read=one) for n in range(8)]
    tracemalloc.start()
    write_weights(tmp_path, tensors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 4_000_000 <= peak < 9_000_000, "one that is written, and the next one as it is made"
