"""QLoRA with its base on NVMe: transformers, bitsandbytes and PEFT over a paged base; the bits of plain PyTorch."""

from __future__ import annotations

import copy
import itertools
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.qlora import adapt, deepen, quantize, save_first, train
from tests.house import ROOT
from tests.support.inspection import Traffic, param_slots, units
from tests.support.inspection.insides import OffloadedParameter, is_4bit, statistics
from tests.support.trainers import FAR, Plain, assert_same_bits, follow, same_bits, tiered
from tiered_zero.sizes import MIB

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

FORMATS: dict[str, tuple[bool, torch.dtype]] = {
    "nf4": (False, torch.float32),
    "double": (True, torch.float32),
    "bf16": (True, torch.bfloat16),
}
"""Whether the scales are quantized too, and what is computed in."""
CHECKPOINTS = ("none", "default", "reentrant")


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> None:
    """See `one_thread`."""


@pytest.fixture(scope="module")
def firsts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: save_first(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "moe")}


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_adapters_have_the_bits_of_plain_training(kind, name, checkpoints, firsts, swap_path) -> None:
    double, dtype = FORMATS[name]
    bf16 = {"bf16": {"enabled": True}} if name == "bf16" else {}

    def build() -> Any:
        return adapt(quantize(firsts[kind], double, dtype), checkpoints)

    expected = follow(train, Plain(build(), dtype=dtype if bf16 else None))
    first = dict(build().named_parameters())
    trained = [key for key in first if "lora_" in key and not same_bits(first[key], expected.weights[key])]
    assert len(trained) == sum("lora_" in key for key in first), "plain training changes every adapter"
    for placement in FAR:
        assert_same_bits(expected, follow(train, tiered(build(), swap_path, placement, **bf16)))


def layer_nbytes(engine: Any) -> int:
    by_module: dict[str, int] = {}
    for unit in units(engine):
        by_module[unit.module] = by_module.get(unit.module, 0) + unit.nbytes
    return max(nbytes for module, nbytes in by_module.items() if ".layers." in module)


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", ["llama", "moe"])
@pytest.mark.parametrize("double", [False, True])
def test_two_layers_on_the_device_and_nothing_of_the_base_written(
    double, kind, checkpoints, firsts, swap_path, monkeypatch, caplog
) -> None:
    model = adapt(quantize(firsts[kind], double), checkpoints)
    scales = [param for module in model.modules() for param in statistics(module).values()]
    layers = [module for module in model.modules() if is_4bit(module)]
    assert len(scales) == len(layers) * (1 + double)
    base_nbytes = sum(param.nbytes for param in (*model.parameters(), *scales) if not param.requires_grad)
    with tiered(model, swap_path, zero={"stage3_max_live_parameters": 1}) as engine:
        frozen = {slot: unit for slot, unit in param_slots(engine).items() if not unit.trainable}
        assert base_nbytes <= sum(unit.nbytes for unit in frozen.values()) <= engine.plan.nbytes("nvme", "param")
        assert all(isinstance(param, OffloadedParameter) for param in scales)
        traffic = Traffic(monkeypatch)
        train(engine)
        engine.flush()
        assert frozen.keys() <= traffic.fetched.keys()
        assert frozen.keys().isdisjoint(traffic.written)
        assert engine.memory_report()["device"]["param_window"]["peak"] <= 2 * layer_nbytes(engine)
    assert "more on the device" not in caplog.text


def test_state_dict_copies_and_checkpoints_have_the_scales(firsts, swap_path) -> None:
    plain = Plain(adapt(quantize(firsts["llama"], True)))
    first = {name: value.clone() for name, value in plain.module.state_dict().items()}
    tokens = torch.arange(1, 17)[None]

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens).logits

    with tiered(adapt(quantize(firsts["llama"], True)), swap_path / "one") as engine:
        found = engine.module.state_dict()
        assert found.keys() == first.keys() and all(same_bits(found[name], first[name]) for name in first)
        assert [name for name, _ in engine.module.named_parameters()] == [n for n, _ in plain.module.named_parameters()]
        train(engine), train(plain)
        expected = logits(plain)
        assert same_bits(expected, logits(copy.deepcopy(engine.module)))
        engine.save_checkpoint(str(swap_path / "saved"))
        with tiered(adapt(quantize(firsts["llama"], True)), swap_path / "two", FAR[0]) as other:
            other.load_checkpoint(str(swap_path / "saved"))
            assert same_bits(expected, logits(other))
    assert not any("forward" in vars(module) for module in engine.module.modules())


def test_in_autocast_and_compiled(firsts, swap_path) -> None:
    def script(trainer: Any) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return train(trainer, 1)

    def compiled() -> Any:
        model = adapt(quantize(firsts["llama"], False))
        for layer in model.base_model.model.model.layers:
            layer.compile(backend="eager")
        return model

    for run, build in ((script, lambda: adapt(quantize(firsts["llama"], False))), (train, compiled)):
        expected = follow(run, Plain(adapt(quantize(firsts["llama"], False))))
        assert_same_bits(expected, follow(run, tiered(build(), swap_path)))


def test_the_example_learns_and_saves_its_adapters(firsts, tmp_path, monkeypatch) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    quantize(firsts["llama"], True).save_pretrained(tmp_path / "packed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    losses = runpy.run_path(str(ROOT / "docs" / "examples" / "qlora.py"))["main"]("packed")
    assert losses[-1] < losses[0] - 0.5
    assert not list(Path("swap").glob("*"))
    base = AutoModelForCausalLM.from_pretrained("packed", device_map={"": "cpu"})
    adapted = peft.PeftModel.from_pretrained(base, "adapters")
    tokens = (torch.arange(4)[:, None] + torch.arange(16)) % 32
    with torch.no_grad():
        assert adapted(input_ids=tokens, labels=tokens).loss < losses[0] - 0.5


def test_memory_of_the_host_does_not_grow_with_the_base(tmp_path: Path) -> None:
    """Twice and four times the layers add to the process's own memory what the plan says of adapters (20 bytes an
    element: gradients and, on their way, masters, state and parameters), and at most a sixth of the base's bytes
    beyond, of modules, records of units and inputs of checkpoints: their scales alone, were they kept, would add a
    ninth more. malloc is told to return what is large, so that it is not counted as kept."""
    wide = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 1}
    first = save_first("llama", tmp_path / "first", torch.bfloat16, **wide)
    packed = tmp_path / "packed"
    quantize(first, False, torch.bfloat16).save_pretrained(packed)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "PYTHONPATH": str(ROOT)}
    found = []
    for layers in (8, 16, 32):
        command = [sys.executable, "-m", "tests.clients.qlora", str(deepen(packed, layers)), str(tmp_path / "swap")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[-1]["base"] > 2 * (32 + 48) * MIB, "the largest is larger than device and host memory together"
    for smaller, larger in itertools.pairwise(found):
        assert larger["base"] > 1.9 * smaller["base"]
        assert larger["window"] <= smaller["window"] < larger["base"] / 4
        added = {key: larger[key] - smaller[key] for key in larger}
        assert added["host"] <= 5 * added["adapters"]
        assert larger["ledger"] <= larger["host"]
    for smaller in found[:-1]:  # with the largest alone: one process differs from the next by 1 MiB
        added = {key: found[-1][key] - smaller[key] for key in smaller}
        assert added["grown"] <= added["host"] + added["base"] / 6
