"""The first screen and the recipes say what `plan` says; their script trains a tiny model with each config."""

from __future__ import annotations

import json
import platform
import runpy
from pathlib import Path

import pytest

from tests.house import ROOT
from tests.support.forked import run_forked
from tiered_zero.native.update import available_cpus
from tiered_zero.plan.machine import Disk, Machine, default_path


def test_the_pages_say_what_the_plans_say() -> None:
    pytest.importorskip("transformers")
    done = run_forked(ROOT / "tools" / "first_screen.py", "--check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("recipe", ["desktop", "server", "two_cores"])
def test_a_recipe_trains_a_tiny_model(recipe: str, swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(swap_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(swap_path))
    disk = Disk(path=str(swap_path), read_bytes_per_s=1e9, write_bytes_per_s=1e9)
    speeds = {"flops_per_s": {"bf16": 1e11}, "copy_bytes_per_s": 1e10, "update_bytes_per_s": 1e10}
    Machine(name=platform.node(), num_cores=available_cpus(), disks=(disk,), **speeds).save(default_path())
    config = json.loads((ROOT / "configs" / "recipes" / f"{recipe}.json").read_text())
    config["tiered_zero"] |= {"device": "cpu", "sequence_length": 32}
    config["optimizer"]["params"]["lr"] = 1e-2
    Path("config.json").write_text(json.dumps(config))
    shape = json.loads((ROOT / "configs" / "models" / "llama_8b.json").read_text())
    sizes = ("hidden_size", 64), ("intermediate_size", 128), ("num_hidden_layers", 2), ("num_attention_heads", 4)
    shape |= {**dict(sizes), "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64}
    Path("model").mkdir()
    Path("model", "config.json").write_text(json.dumps(shape))
    Path("text").write_text("A recipe is tried before it is printed. " * 20)
    main = runpy.run_path(str(ROOT / "docs" / "examples" / "full_finetune.py"))["main"]
    losses = main("config.json", "model", "text", 12)
    assert len(losses) == 12 and losses[-1] < losses[0] - 1
    assert list(Path("trained").glob("*.safetensors"))
