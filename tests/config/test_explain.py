"""The rows of `explain`, the notices, the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from tiered_zero.cli.explain import explain
from tiered_zero.cli.main import main
from tiered_zero.config.deepspeed_keys import Fate, table
from tiered_zero.config.load import load
from tiered_zero.config.schema import Config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.json"))


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in tree.items():
        nested = isinstance(value, dict) and prefix + name not in table(Config)
        found += leaves(value, f"{prefix}{name}.") if nested else [prefix + name]
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_key_of_the_file_and_every_default(path: Path) -> None:
    rows = {row.path: row for row in load(path).explain()}
    for written in leaves(json.loads(path.read_text())):
        assert any(known == written or known.startswith(f"{written}.") for known in rows), written
    optional = ("optimizer.", "scheduler.")
    honoured = [key.path for key in table(Config).values() if key.fate is Fate.HONOURED]
    assert {known for known in honoured if not known.startswith(optional)} <= set(rows)
    assert all(row.effect for row in rows.values())


def test_sources() -> None:
    config = load({"train_batch_size": 8, "bf16": {"enabled": "auto"}, "zero_optimization": {"cpu_offload": True}})
    sources = {row.path: row.source for row in config.explain()}
    assert sources["train_batch_size"] == "file"
    assert sources["gradient_accumulation_steps"] == "derived"
    assert sources["bf16.enabled"] == "auto"
    assert sources["bf16.check_grad_overflow"] == "default"
    assert sources["zero_optimization.offload_optimizer.device"] == "renamed"
    assert sources["zero_optimization.offload_optimizer.pin_memory"] == "default"


def test_a_section_that_is_null_has_a_row() -> None:
    config = load({"train_batch_size": 8, "fp16": None, "zero_optimization": {"stage": 3, "offload_param": None}})
    rows = {row.path: row for row in config.explain()}
    for path in ("fp16", "zero_optimization.offload_param"):
        assert rows[path].value is None and "left out" in rows[path].effect
    assert not any("without effect" in line for line in config.notices)


def test_a_plain_config_says_little() -> None:
    assert load({"train_batch_size": 8, "gradient_clipping": 0.5}).notices == ()


def test_a_config_made_by_hand_explains_itself() -> None:
    config = Config(train_batch_size=8, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1)
    assert {row.source for row in config.explain()} == {"file", "default"}


class TestCommand:
    def test_table(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text('{"train_batch_size": 8, "memory_breakdown": true, "tiered_zero": {"trace": "[red]x"}}')
        result = CliRunner(env={"COLUMNS": "200"}).invoke(explain, [str(path)])
        assert result.exit_code == 0, result.output
        for text in ("train_batch_size", '"[red]x"', "no effect: engine.memory_report()", "accepted without effect"):
            assert text in result.output

    @pytest.mark.parametrize("columns", ["20", "80", "200"])
    def test_in_a_pipe_each_key_has_a_whole_line(self, columns: str, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text('{"train_batch_size": 8, "dump_state": true}')
        result = CliRunner(env={"COLUMNS": columns}).invoke(explain, [str(path), "--all"])
        lines = result.output.splitlines()
        for row in load(path).explain():
            assert [line for line in lines if line.startswith(f"{row.path} = ")] != [], row.path
        assert "dump_state = true (file): no effect: tiered-zero explain prints the config" in lines

    @pytest.mark.parametrize("columns", [80, 160])
    def test_a_terminal_shows_whole_keys(self, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "c.json"
        path.write_text('{"train_batch_size": 8}')
        console = Console(width=columns, force_terminal=True, color_system=None, record=True)
        monkeypatch.setattr("tiered_zero.cli.explain.stdout", lambda: console)
        assert CliRunner().invoke(explain, [str(path), "--all"]).exit_code == 0
        text = console.export_text()
        for row in load(path).explain():
            assert row.path in text

    def test_without_all_the_keys_of_the_file_and_what_follows(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text(
            '{"train_batch_size": 8, "bf16": {"enabled": "auto"}, "zero_optimization": {"cpu_offload": true}}'
        )
        result = CliRunner().invoke(explain, [str(path), "--json"])
        shown = {row["path"]: row["source"] for row in json.loads(result.output)["keys"]}
        assert shown == {
            "train_batch_size": "file",
            "train_micro_batch_size_per_gpu": "derived",
            "gradient_accumulation_steps": "derived",
            "bf16.enabled": "auto",
            "zero_optimization.offload_optimizer.device": "renamed",
        }
        num_left = len(load(path).explain()) - len(shown)
        text = CliRunner().invoke(explain, [str(path)]).output
        assert f"{num_left} other keys have their defaults; --all shows them." in text

    def test_json(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text('{"train_batch_size": 8}')
        result = CliRunner().invoke(explain, [str(path), "--all", "--json", "--world-size", "2"])
        rows = {row["path"]: row for row in json.loads(result.output)["keys"]}
        assert rows["train_micro_batch_size_per_gpu"]["value"] == 4
        assert rows["train_micro_batch_size_per_gpu"]["source"] == "derived"
        assert rows["gradient_clipping"]["fate"] == "honoured"

    def test_errors(self, tmp_path: Path) -> None:
        path = tmp_path / "c.json"
        path.write_text('{"train_batch_size": 0}')
        result = CliRunner().invoke(main, ["explain", str(path)])
        assert result.exit_code == 1
        assert "Error: train_batch_size: expected at least 1; found 0." in result.output
