"""axolotl's plugin, driven as its PluginManager drives one, over a stub of its base class: the package is not here."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.clients.conftest import arguments, seen
from tests.integrations.conftest import Sentences, copies, gpt2
from tests.support.configs import SMALL_DEVICE, zero_section
from tests.support.trainers import Record, assert_same_bits
from tiered_zero.errors import ConfigError
from tiered_zero.optim import OffloadedOptimizer

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

ARGUMENTS = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "optim": "adamw_torch"}


class Stub:
    """axolotl.integrations.base.BasePlugin, of which the plugin overrides methods alone."""


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = Stub  # type: ignore[attr-defined]
    yield importlib.import_module("tiered_zero.integrations.axolotl").Plugin()
    del sys.modules["tiered_zero.integrations.axolotl"]


def config_of(**keys: Any) -> Any:
    """Attributes of a dict, None where there is none, as axolotl's DictDefault has them."""

    class Cfg(defaultdict[str, Any]):
        __getattr__ = defaultdict.__getitem__

    return Cfg(lambda: None, {"learning_rate": 3e-3, "weight_decay": 0.1, "micro_batch_size": 2, **keys})


def train(plugin: Any, cfg: Any, output: Path) -> Record:
    """As axolotl does it: model, plugin, trainer, plugin."""
    from transformers import Trainer, TrainingArguments

    model = gpt2()
    callbacks = []
    if plugin is not None:
        plugin.post_model_load(cfg, model)
        callbacks = plugin.add_callbacks_pre_trainer(cfg, model)
    options = arguments(output, **ARGUMENTS, save_strategy="steps", save_steps=3)
    trainer = Trainer(model, TrainingArguments(**options), train_dataset=Sentences(), callbacks=callbacks)
    if plugin is not None:
        trainer.optimizer = plugin.create_optimizer(cfg, trainer)
    trainer.train()
    if plugin is None or plugin.engine is None:
        return seen(trainer)
    rows = [row.get(key) for row in trainer.state.log_history for key in ("loss", "grad_norm", "learning_rate")]
    assert "tiered_zero/nvme_gib" in trainer.state.log_history[0]
    with plugin.engine:
        return Record(rows, copies(model.state_dict()))


def test_state_on_a_tier(plugin: Any, swap_path: Path, tmp_path: Path) -> None:
    cfg = config_of(tiered_zero_offload={"device": "nvme", "nvme_path": str(swap_path)})
    made: list[Any] = []
    create = plugin.create_optimizer
    plugin.create_optimizer = lambda *given: made.append(create(*given)) or made[-1]
    assert_same_bits(train(None, cfg, tmp_path / "plain"), train(plugin, cfg, tmp_path / "own"))
    assert isinstance(made[0], OffloadedOptimizer)
    assert list((tmp_path / "own/checkpoint-3/optimizer_state").iterdir())


def test_everything_on_a_tier(plugin: Any, swap_path: Path, tmp_path: Path) -> None:
    section = zero_section("nvme", "nvme", swap_path, sub_group_size=2048)
    cfg = config_of(tiered_zero_config={"zero_optimization": section, "tiered_zero": {"device": "cpu", **SMALL_DEVICE}})
    expected = train(None, cfg, tmp_path / "plain")
    found = train(plugin, cfg, tmp_path / "own")
    expected.seen = expected.seen[: len(found.seen)]  # without optimizer state, which the engine's end has freed
    assert_same_bits(expected, found)


def test_without_its_keys_nothing_changes(plugin: Any, tmp_path: Path) -> None:
    cfg = config_of()
    assert_same_bits(train(None, cfg, tmp_path / "plain"), train(plugin, cfg, tmp_path / "own"))


def test_keys_are_checked(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    keys = getattr(importlib.import_module(module), name)
    assert keys(tiered_zero_offload={"device": "cpu"}).tiered_zero_config is None
    with pytest.raises(ConfigError, match="one of them"):
        plugin.post_model_load(config_of(tiered_zero_offload={"device": "cpu"}, tiered_zero_config="c.json"), None)
    with pytest.raises(ConfigError, match="adamw_torch"):
        plugin.post_model_load(config_of(tiered_zero_config="c.json", optimizer="sgd"), None)
