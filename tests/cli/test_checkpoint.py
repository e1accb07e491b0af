"""`tiered-zero checkpoint` over tags that are whole, damaged, unfinished and foreign."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from tests.checkpoint.test_export import exported, state, write_tag
from tests.fakes.sync_io import SyncEngine
from tests.support.inspection.insides import DATA_NAME, LOCK_NAME
from tests.support.tags import data_file, save_tag
from tests.support.trainers import same_bits
from tiered_zero.cli.main import main
from tiered_zero.sizes import MIB


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def answer(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Three whole tags, one that lost a file, one whose save was cut off, one of another program."""
    for step in (1, 2, 3):
        write_tag(tmp_path / "ck", state(), step)
    lost = write_tag(tmp_path / "ck", state(), 4)
    next(lost.glob("*.bin")).unlink()
    (tmp_path / "ck" / "latest").write_text("global_step2\n")
    unfinished = tmp_path / "ck" / "global_step5"
    unfinished.mkdir(mode=0o700)
    (unfinished / "data-00000-0123456789ab.bin").write_bytes(bytes(4096))
    (tmp_path / "ck" / LOCK_NAME).write_text("0123456789ab global_step5")
    foreign = tmp_path / "ck" / "other"
    foreign.mkdir()
    (foreign / "pytorch_model.bin").write_bytes(b"x")
    return tmp_path / "ck"


def damage(path: Path) -> None:
    data = next(path.glob("*.bin"))
    raw = bytearray(data.read_bytes())
    raw[50] ^= 4
    data.write_bytes(raw)


def test_ls_says_what_is_whole_and_why_not(saved: Path) -> None:
    found = answer("ls", saved)
    tags = {info["tag"]: info for info in found["tags"]}
    assert found["latest"] == "global_step2"
    assert {tag: info["complete"] for tag, info in tags.items()} == {
        "global_step1": True,
        "global_step2": True,
        "global_step3": True,
        "global_step4": False,
        "global_step5": False,
        "other": False,
    }
    assert "data-00000-" in tags["global_step4"]["reason"] and ".bin is missing" in tags["global_step4"]["reason"]
    assert "being written" in tags["global_step5"]["reason"] and "pickled" in tags["other"]["reason"]
    assert tags["global_step3"]["step"] == 3 and tags["global_step3"]["kind"] == "full"
    assert tags["global_step3"]["written_by"]["rule"] == "AdamW"
    files = [file.stat() for file in (saved / "global_step3").iterdir()]
    assert tags["global_step3"]["nbytes"] == sum(file.st_blocks * 512 for file in files), "of the disk"
    result = run("ls", saved)
    assert result.exit_code == 0 and "latest: global_step2" in result.stdout
    assert "global_step3, global_step4: written by tiered_zero 1.0, torch " in result.stdout
    assert "global_step4: " in result.stdout and "is missing" in result.stdout
    assert "whole" in result.stdout and "complete" not in result.stdout, "the word of `verify`"
    assert "No checkpoints." in run("ls", saved.parent).stdout


def test_many_checkpoints_of_one_writer_take_one_short_line(tmp_path: Path) -> None:
    for step in range(1, 9):
        save_tag(tmp_path, f"global_step{step}", {"x": torch.ones(4)}, step, SyncEngine())
    assert "global_step1 to global_step8 (8): written by tiered_zero" in run("ls", tmp_path).stdout


def test_ls_of_one_checkpoint(saved: Path) -> None:
    assert [info["tag"] for info in answer("ls", saved / "global_step1")["tags"]] == ["global_step1"]


def test_verify_reads_every_byte(saved: Path) -> None:
    found = answer("verify", saved, code=1)
    assert list(found["broken"]) == ["global_step4"] and list(found["passed_over"]) == ["global_step5", "other"]
    damage(saved / "global_step2")
    found = answer("verify", saved, code=1)
    assert "are not those written" in found["broken"]["global_step2"][0]
    assert answer("verify", saved / "global_step3")["broken"] == {}
    result = run("verify", saved / "global_step2")
    assert result.exit_code == 1 and "broken" in result.stdout and "global_step2: " in result.stdout


def test_verify_names_three_of_many_broken_places(tmp_path: Path) -> None:
    save_tag(tmp_path, "many", {"x": torch.ones(5 * MIB // 4)}, 1, SyncEngine())
    data = data_file(tmp_path / "many")
    data.write_bytes(bytes(data.stat().st_size))
    shown = run("verify", tmp_path).stdout
    assert shown.count("are not those written") == 3 and "many: 5 places are broken" in shown
    assert len(answer("verify", tmp_path, code=1)["broken"]["many"]) == 5


def test_verify_of_whole_ones_beside_an_unfinished_one(saved: Path) -> None:
    shutil.rmtree(saved / "global_step4")
    result = run("verify", saved)
    assert result.exit_code == 0 and "whole" in result.stdout and "passed over" in result.stdout


def test_verify_calls_no_checkpoint_of_deepspeed_broken(tmp_path: Path) -> None:
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").touch()
    result = run("verify", tmp_path)
    assert result.exit_code == 1 and "broken" not in result.stdout, "there is none of ours"
    assert "global_step1: it is a checkpoint of DeepSpeed" in result.stdout


def test_verify_of_nothing_is_a_failure(tmp_path: Path) -> None:
    assert run("verify", tmp_path).exit_code == 1


def test_export_takes_the_latest_or_the_tag_named(saved: Path, tmp_path: Path) -> None:
    found = answer("export", saved, tmp_path / "out")
    assert (found["tag"], found["step"], len(found["files"])) == ("global_step2", 2, 1)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert same_bits(weights["a.weight"], state()["master/a.weight"])
    found = answer(
        "export", saved, tmp_path / "half", "--tag", "global_step3", "--dtype", "bf16", "--max-shard-size", "1KiB"
    )
    assert found["tag"] == "global_step3" and len(found["files"]) > 2
    assert same_bits(exported(tmp_path / "half")["a.weight"], state()["master/a.weight"].bfloat16())
    assert answer("export", saved / "global_step1", tmp_path / "one")["tag"] == "global_step1"
    result = run("export", saved, tmp_path / "words", "--dtype", "fp16")
    assert "global_step2 (step 2) -> " in result.stdout and "parameters in fp16" in result.stdout


def test_export_replaces_no_other_model(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer("export", saved, out, "--dtype", "bf16")
    answer("export", saved, out)  # the same model again
    others = write_tag(tmp_path / "others", {"master/b.weight": torch.ones(2, 2)})
    before = {path: path.read_bytes() for path in out.iterdir()}
    refused = run("export", others, out)
    assert refused.exit_code == 1 and {path: path.read_bytes() for path in out.iterdir()} == before
    assert f"{out} holds weights of another model: model.safetensors; they differ in a.weight, of" in refused.stderr
    assert "--force" in refused.stderr
    answer("export", others, out, "--force")
    assert exported(out).keys() == {"b.weight"}
    (out / "model.safetensors").write_bytes(b"of another program")
    assert "holds weights of another model" in run("export", others, out).stderr
    (out / "model.safetensors").unlink()
    os.mkfifo(out / "model.safetensors")
    assert "holds weights of another model" in run("export", others, out).stderr


def test_export_says_what_it_skipped_and_what_is_wrong(saved: Path, tmp_path: Path) -> None:
    (saved / "latest").write_text("global_step4")
    result = run("export", saved, tmp_path / "out")
    assert result.exit_code == 0 and "global_step3 (step 3)" in result.stdout
    assert "Skipped" in result.stderr and "global_step4" in result.stderr
    result = run("export", saved, tmp_path / "out", "--tag", "global_step4")
    assert result.exit_code == 1 and "is missing" in result.stderr
    damage(saved / "global_step1")
    result = run("export", saved, tmp_path / "bad", "--tag", "global_step1")
    assert result.exit_code == 1 and "are not those written" in result.stderr
    assert not list((tmp_path / "bad").iterdir())
    result = run("export", saved, tmp_path / "bad", "--max-shard-size", "many")
    assert result.exit_code == 2 and "is no size" in result.stderr


def test_prune_keeps_the_newest_and_the_latest(saved: Path) -> None:
    before = sorted(path.name for path in saved.iterdir())
    assert [info["tag"] for info in answer("prune", saved, "--keep", 1, "--dry-run")["removed"]] == ["global_step1"]
    assert sorted(path.name for path in saved.iterdir()) == before
    found = answer("prune", saved, "--keep", 1)
    assert [info["tag"] for info in found["removed"]] == ["global_step1"] and found["freed_nbytes"] > 0
    names = {path.name for path in saved.iterdir()}
    assert {"global_step2", "global_step3", "global_step4", "other"} <= names and "global_step1" not in names
    assert "Nothing to remove." in run("prune", saved, "--keep", 1).stdout
    assert run("prune", saved, "--keep", 0).exit_code == 2


def test_a_name_that_a_terminal_could_obey_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    bad = tmp_path / "ck" / "a\u202eb"
    bad.mkdir()
    (bad / "manifest.json").write_text("{}")
    for command in ("ls", "verify"):
        output = run(command, tmp_path / "ck").stdout
        assert "\u202e" not in output and "\\u202e" in output


def test_values_are_torchs_own(saved: Path, tmp_path: Path) -> None:
    """What is exported is loaded by torch alone: no class of ours is in the files."""
    run("export", saved, tmp_path / "out")
    assert all(type(value) is torch.Tensor for value in exported(tmp_path / "out").values())


def test_in_place_commits_are_listed_checked_and_exported(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last of them is there; its bytes rest in the swap directory."""
    monkeypatch.chdir(swap_path)
    config = json.loads((Path(__file__).parents[2] / "configs" / "gpt_nvme.json").read_text())
    config["tiered_zero"] = {**config.get("tiered_zero", {}), "checkpoint": {"in_place": True}}
    (swap_path / "config.json").write_text(json.dumps(config))
    task = ["config.json", "--model", "gpt:layers=1,hidden=32,context=16", "--steps", "4", "--save", "ck"]
    trained = CliRunner().invoke(main, ["train", *task, "--save-every", "2"])
    assert trained.exit_code == 0, trained.output
    tags = {info["tag"]: info for info in answer("ls", "ck")["tags"]}
    assert {tag: info["complete"] for tag, info in tags.items()} == {"global_step2": False, "global_step4": True}
    assert tags["global_step4"]["kind"] == "in_place" and "superseded" in tags["global_step2"]["reason"]
    assert f"KiB, and its state in {swap_path}" in run("ls", "ck").stdout
    found = answer("verify", "ck")
    assert found["checked"] == ["global_step4"] and list(found["passed_over"]) == ["global_step2"]
    assert answer("export", "ck", "out")["step"] == 4
    weights = load_file("out/model.safetensors")
    assert weights["tokens.weight"].shape == (256, 32) and all(value.isfinite().all() for value in weights.values())
    assert "superseded" in run("export", "ck", "out", "--tag", "global_step2").stderr
    data = next(swap_path.rglob(DATA_NAME))
    data.write_bytes(bytes(byte ^ 1 for byte in data.read_bytes()))
    broken = answer("verify", "ck", code=1)["broken"]
    assert list(broken) == ["global_step4"] and "state/0" in broken["global_step4"][0]
    result = run("export", "ck", "bad")
    assert result.exit_code == 1 and not list((swap_path / "bad").iterdir())
