"""The JSONs that trainers ship: explained as they lie, and trained with once a trainer has filled their "auto"."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tiered_zero
from tests.config.shipped_configs import SHIPPED, filled
from tests.config.test_explain import leaves
from tests.support.models import rows, two_layers
from tiered_zero.cli.main import main
from tiered_zero.config.load import load
from tiered_zero.errors import ConfigError

each = pytest.mark.parametrize("name", SHIPPED)


@each
def test_explained_as_it_lies(name: str) -> None:
    explained = load(json.loads(json.dumps(SHIPPED[name])), to_train=False).explain()
    paths = {row.path for row in explained if row.source != "default" and row.fate and row.effect}
    paths |= {row.effect.partition(" (written as ")[2].rstrip(")") for row in explained}
    for written in leaves(SHIPPED[name]):
        assert written in paths or any(path.startswith(f"{written}.") for path in paths), written


@each
def test_trained_with_once_it_is_filled(name: str) -> None:
    config = filled(SHIPPED[name])
    model = two_layers()
    optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tiered_zero.initialize(model=model, optimizer=optimizer, config=config)[0] as engine:
        before = engine.module.state_dict()
        dtype = next(iter(before.values())).dtype
        for step in range(3):  # the first two of a warm-up have the rate 0
            for micro in range(engine.gradient_accumulation_steps()):
                loss = engine(rows(3 * step + micro).to(dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
        assert engine.global_steps == 3
        if dtype == torch.bfloat16:  # in fp16 the first loss scale may be too large
            assert not all(torch.equal(before[name], value) for name, value in engine.module.state_dict().items())


def explain(tmp_path: Path, config: dict[str, Any]) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert CliRunner().invoke(main, ["explain", str(path)]).exit_code == 0
    result = CliRunner().invoke(main, ["explain", str(path), "--all", "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return {row["path"]: row for row in answer["keys"]} | {"notices": answer["notices"]}


def test_what_a_trainer_fills_is_said(tmp_path: Path) -> None:
    rows = explain(tmp_path, SHIPPED["accelerate-template_1"])
    for path in ("train_batch_size", "train_micro_batch_size_per_gpu", "scheduler.params.total_num_steps"):
        assert rows[path]["value"] == rows[path]["source"] == "auto"
        assert "the trainer that reads the file fills it" in rows[path]["effect"]
    assert any("left to the trainer" in line and "total_num_steps" in line for line in rows["notices"])
    with pytest.raises(
        ConfigError, match=r'found "auto" for train_batch_size, .*; a trainer .* fills them in|fills them'
    ):
        load(SHIPPED["accelerate-template_1"])


def test_comments_and_dotted_keys_are_dropped(tmp_path: Path) -> None:
    dotted = "zero_optimization.reduce_bucket_size"
    given = {"_a": {"b": 1}, "train_batch_size": 4, dotted: 99, "aio": {"_why": "x", "block_size": 8192}}
    rows = explain(tmp_path, given)
    assert rows["_a"]["effect"] == rows["aio._why"]["effect"] == "a comment"
    assert "write 'reduce_bucket_size' inside of zero_optimization" in rows[f'"{dotted}"']["effect"]
    assert rows[dotted]["value"] == 500_000_000 and rows["aio.block_size"]["value"] == 8192
    (notice,) = (line for line in rows["notices"] if "without effect" in line)
    assert notice.endswith(f': "{dotted}"')
    with pytest.raises(ConfigError, match=r"expected 'update' inside of tiered_zero; found a dotted key"):
        load({"train_batch_size": 4, "tiered_zero.update": "barrier"})
    with pytest.raises(ConfigError, match="unknown key"):
        load({"train_batch_size": 4, "zero_optimization.reduce_buckets": 1})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"scheduler": {"type": "CosineLR"}}, r"scheduler\.type: expected one of .*found 'CosineLR'\. Did you mean"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}},
            "warmup_num_steps: expected greater than or equal to 0; found -1",
        ),
        ({"optimizer": {"type": "Odd"}}, "'Odd' is no known optimizer"),
    ],
)
def test_explain_and_plan_refuse_what_a_run_refuses(tmp_path: Path, section: Any, message: str) -> None:
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, **section}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for command in ("explain", "plan"):
        result = CliRunner().invoke(main, [command, str(path)])
        assert result.exit_code == 1 and re.search(message, result.stderr), result.stderr
    with pytest.raises(ConfigError, match=message):
        tiered_zero.initialize(model=two_layers(), config=config)


def test_a_schedule_with_a_value_a_group_is_explained(tmp_path: Path) -> None:
    params = {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [1.0, 2.0]}
    rows = explain(tmp_path, {"train_batch_size": 4, "scheduler": {"type": "WarmupLR", "params": params}})
    assert rows["scheduler.params.warmup_max_lr"]["value"] == [1.0, 2.0]


def test_what_holds_in_any_case_is_no_notice() -> None:
    satisfied = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "round_robin_gradients": True}
    config = {"train_batch_size": 4, "gradient_clipping": 1.0, "zero_optimization": satisfied}
    assert load({**config, "zero_allow_untested_optimizer": True, "compression_training": {}}).notices == ()
    empty = {"weight_quantization": {"shared_parameters": {}, "different_groups": {}}}
    assert load({**config, "compression_training": empty}).notices == ()
    notices = load(
        {**config, "autotuning": {"enabled": True}, "zero_optimization": {"zero_hpz_partition_size": 4}}
    ).notices
    assert ["autotuning" in line and "zero_hpz_partition_size" in line for line in notices] == [True]


def test_auto_cast_casts_positional_arguments_as_deepspeed_does() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, pair: Any, *, target: torch.Tensor) -> torch.Tensor:
            seen.append((pair[0].dtype, pair[1]["ids"].dtype, target.dtype))
            return self.layer(pair[0]).float().sub(target).square().mean()

    seen: list[Any] = []
    for auto_cast in (True, False):
        fp16 = {"enabled": True, "auto_cast": auto_cast, "initial_scale_power": 4}
        config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "fp16": fp16}
        with tiered_zero.initialize(model=Net(), config=config)[0] as engine:
            values = torch.ones(2, 4) if auto_cast else torch.ones(2, 4).half()
            engine.backward(engine((values, {"ids": torch.ones(2, dtype=torch.int64)}), target=torch.zeros(2, 4)))
            engine.step()
    assert seen == [(torch.float16, torch.int64, torch.float32)] * 2
