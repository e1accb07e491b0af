"""`tiered-zero train --save --resume`: a run that was stopped or killed ends with the loss of one that was not."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.cli.test_train import CONFIGS, SMALL, run, write_config  # noqa: F401  # `run` is a fixture
from tests.support.forked import ForkedProgram
from tests.support.inspection.insides import TagWriter
from tiered_zero.cli.main import main
from tiered_zero.errors import StoreError

NVME = str(CONFIGS / "gpt_nvme.json")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def train(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, arguments)])


def answer(*arguments: object) -> Any:
    result = train(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


class Process:
    """`tiered-zero train` in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        self.process = ForkedProgram("-m", "tiered_zero", "train", *arguments, "--json", env=ENVIRONMENT)

    def wait(self) -> tuple[int, Any, str]:
        """(exit code, what it printed, its log)"""
        done = self.process.end()
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    def signal_at(self, tag: Path, number: int) -> None:
        """Once a checkpoint is there."""
        while self.process.poll() is None and not tag.exists():
            time.sleep(0.01)
        self.process.send_signal(number)


@pytest.mark.parametrize("in_place", [False, True], ids=["full", "in place"])
def test_stopped_and_killed_and_gone_on_with_to_the_last_bit(
    in_place: bool, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM, then kill -9, then to the end: the final loss is that of a run that nothing stopped."""
    monkeypatch.chdir(swap_path)
    config = json.loads(Path(NVME).read_text())
    config["tiered_zero"] = {**config.get("tiered_zero", {}), "checkpoint": {"in_place": in_place}}
    Path("config.json").write_text(json.dumps(config))
    task = ("config.json", *SMALL[:2], "--steps", 24)
    undisturbed = Process(*task)
    saving = (*task, "--save", swap_path / "ck", "--save-every", 2, "--resume")
    first = Process(*saving)
    first.signal_at(swap_path / "ck" / "global_step4", signal.SIGTERM)
    code, values, log = first.wait()
    assert code == 143, log
    assert "no checkpoint in" in log and values["interrupted"] and values["resumed_from"] is None
    stopped = values["steps"]
    assert 4 <= stopped < 24 and f"Stopped after {stopped} of 24 steps" in log
    assert "To go on from the last save, give the same command." in log
    second = Process(*saving)
    second.signal_at(swap_path / "ck" / f"global_step{(stopped // 2 + 3) * 2}", signal.SIGKILL)
    assert second.wait()[0] == -signal.SIGKILL
    code, values, log = Process(*saving).wait()
    assert code == 0, log
    assert values["resumed_step"] >= stopped and values["steps"] == 24 - values["resumed_step"]
    assert f"{values['resumed_step']} steps, and their batches, are not made again" in log
    code, expected, log = undisturbed.wait()
    assert code == 0, log
    assert values["last_loss"] == expected["last_loss"]


def test_ctrl_c_saves_first(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swap_path)
    process = Process(NVME, *SMALL[:2], "--steps", 100000, "--save", swap_path / "ck", "--save-every", 3)
    process.signal_at(swap_path / "ck" / "global_step3", signal.SIGINT)
    code, values, log = process.wait()
    assert code == 130, log
    assert "Finishing this step, then saving" in log and "Traceback" not in log
    assert (swap_path / "ck" / f"global_step{values['steps']}" / "manifest.json").exists()
    assert not [path for path in swap_path.rglob("*.bin") if "ck" not in path.parts], "the swap directory is empty"


def test_saves_are_said_with_their_path(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every N-th step and at the end; without --save-every at the end alone."""
    monkeypatch.chdir(swap_path)
    config = str(CONFIGS / "gpt_cpu.json")
    result = train(config, *SMALL[:2], "--steps", 5, "--save", "ck", "--save-every", 2)
    assert result.exit_code == 0, result.output
    for step in (2, 4, 5):
        assert f"saving ck/global_step{step}\n" in result.stderr
    assert result.stderr.count("saving ") == 3
    assert sorted(path.name for path in Path("ck").glob("global*")) == [f"global_step{n}" for n in (2, 4, 5)]
    result = train(config, *SMALL[:2], "--steps", 2, "--save", "other")
    assert result.stderr.count("saving ") == 1 and (Path("other") / "global_step2").exists()


def test_what_is_done_is_not_done_again_and_other_options_are_refused(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swap_path)
    task = (str(CONFIGS / "gpt_cpu.json"), *SMALL[:2], "--save", "ck", "--resume")
    undisturbed = answer(*task, "--steps", 3)
    assert undisturbed["resumed_from"] is None
    result = train(*task, "--steps", 3)
    assert "nothing to train: --steps is 3, and 3 are made. The loss of its last step was" in result.stderr
    assert not result.stdout, "no table of nothing"
    values = answer(*task, "--steps", 3)
    assert values["last_loss"] == undisturbed["last_loss"], "also where the run was killed after its last save"
    assert (values["steps"], values["resumed_step"]) == (0, 3)
    assert values["resumed_from"] == str(Path("ck").resolve() / "global_step3") or values["resumed_from"].endswith(
        "ck/global_step3"
    )
    result = train(*task, "--steps", 4, "--seed", 5, "--batch", 3)
    assert result.exit_code == 1
    assert re.search(r"--resume: the run in ck has --seed 0, batch 4, .*; found --seed 5, batch 3, ", result.stderr)
    result = train(*task, "--steps", 4, "--seed", 5, "--context", 8)
    assert "the run in ck has --context 16, --seed 0; found --context 8, --seed 5. Give" in result.stderr
    settings = json.loads((CONFIGS / "gpt_cpu.json").read_text())
    size = settings["train_micro_batch_size_per_gpu"]
    settings.update(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=size)
    result = train(write_config(Path("config.json"), **settings), *task[1:], "--steps", 4)
    assert result.exit_code == 1 and f"ck has micro-batch {size}; found micro-batch 1." in result.stderr
    result = train(*task, "--steps", 4)
    assert result.exit_code == 0 and "4 steps" not in result.stdout and "1 step in" in result.stdout


def test_another_text_under_the_same_name_is_refused_and_the_same_elsewhere_is_not(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swap_path)
    text, moved = Path("text.txt"), Path("moved.txt").absolute()
    text.write_text("a text " * 100)
    task = (str(CONFIGS / "gpt_cpu.json"), "--model", "gpt:layers=1,hidden=32,context=16", "--save", "ck", "--resume")
    assert train(*task, "--data", text, "--steps", 1).exit_code == 0
    text.rename(moved)
    assert answer(*task, "--data", moved, "--steps", 2)["resumed_step"] == 1
    text.write_text("texts a" * 100)
    result = train(*task, "--data", text, "--steps", 3)
    assert result.exit_code == 1
    assert re.search(r"the run in ck has a text of 700 bytes \(xxh3 \w+\); found a text of 700 bytes", result.stderr)


def test_a_new_run_beside_checkpoints_of_another_is_refused(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swap_path)
    task = (str(CONFIGS / "gpt_cpu.json"), *SMALL[:2], "--steps", 1, "--save", "ck")
    assert train(*task).exit_code == 0
    result = train(*task)
    assert result.exit_code == 1
    assert "ck was expected to have no checkpoints; found some, up to global_step1. Add --resume" in result.stderr
    assert train(*task, "--resume").exit_code == 0


def test_a_directory_of_something_else_is_no_new_start(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swap_path)
    Path("ck").mkdir()
    Path("ck/__0_0.distcp").touch()
    result = train(str(CONFIGS / "gpt_cpu.json"), *SMALL[:2], "--steps", 1, "--save", "ck", "--resume")
    assert result.exit_code == 1 and "ck is a checkpoint of torch.distributed.checkpoint's" in result.stderr


def test_a_damaged_checkpoint_is_skipped_and_said(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swap_path)
    task = (str(CONFIGS / "gpt_cpu.json"), *SMALL[:2], "--save", "ck", "--save-every", 2, "--resume")
    expected = answer(*task[:-1], "--steps", 6)["last_loss"]
    data = next(Path("ck/global_step6").glob("*.bin"))
    os.truncate(data, data.stat().st_size - 4096)
    result = train(*task, "--steps", 6, "--json")
    values = json.loads(result.stdout)
    assert values["resumed_step"] == 4 and values["last_loss"] == expected
    assert "global_step6" in result.stderr and "bytes; expected" in result.stderr
    (Path("ck/global_step6") / "manifest.json").write_text("{}")
    for step in (2, 4):
        (Path(f"ck/global_step{step}") / "manifest.json").write_text("{}")
    Path("ck/global_step6/manifest.json").write_text("{}")
    result = train(*task, "--steps", 6)
    assert result.exit_code == 1 and "There is no complete checkpoint in" in result.stderr, "never a silent new start"


@pytest.mark.parametrize("is_async", [False, True])
def test_training_goes_on_after_a_full_disk_and_fails_if_the_last_save_does(
    is_async: bool, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swap_path)
    prepare = TagWriter.prepare

    def fails_at_four(self: TagWriter, *arguments: Any, **named: Any) -> None:
        if self.tag == "global_step4":
            raise StoreError("The disk is full: 3 bytes are free.")
        prepare(self, *arguments, **named)

    monkeypatch.setattr(TagWriter, "prepare", fails_at_four)
    settings = json.loads((CONFIGS / "gpt_cpu.json").read_text())
    settings.setdefault("tiered_zero", {})["checkpoint"] = {"async": is_async}
    task = (write_config(Path("config.json"), **settings), *SMALL[:2], "--save", "ck", "--save-every", 2, "--resume")
    result = train(*task, "--steps", 4)
    assert result.exit_code == 1 and "The disk is full: 3 bytes are free." in result.stderr
    assert [path.name for path in Path("ck").glob("global*")] == ["global_step2"]
    result = train(*task, "--steps", 6, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["resumed_step"] == 2
    assert "failed, and training goes on: The disk is full: 3 bytes are free." in result.stderr
    saved = sorted(path.name for path in Path("ck").glob("global*"))
    assert saved == ["global_step2", "global_step6"], "the save after the one that failed is made"


def test_a_disk_without_room_for_a_checkpoint_is_named_at_the_start(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swap_path)
    task = (str(CONFIGS / "gpt_cpu.json"), *SMALL[:2], "--steps", 1, "--save")
    assert "are free for" not in train(*task, "ck").stderr
    (data,) = Path("ck").glob("*/data-00000-*.bin")
    usage = shutil.disk_usage(".")._replace(free=data.stat().st_size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    log = train(*task, "new/ck").stderr
    assert re.search(r"--save: a checkpoint takes at least .* are free for new/ck\..*saving new/ck", log, re.DOTALL)


def test_a_committed_step_without_its_tag_is_resumed(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(swap_path)
    prepare = TagWriter.prepare

    def fails_at_last(self: TagWriter, *arguments: Any, **named: Any) -> None:
        if self.tag in ("global_step3", "global_step4"):
            raise OSError(errno.ENOSPC, "No space left on device")
        prepare(self, *arguments, **named)

    monkeypatch.setattr(TagWriter, "prepare", fails_at_last)
    settings = json.loads(Path(NVME).read_text())
    settings["tiered_zero"]["checkpoint"] = {"in_place": True}
    config = write_config(Path("config.json"), **settings)
    task = (config, *SMALL[:2], "--save", "ck", "--save-every", 1, "--resume", "--steps")
    result = train(*task, 4)
    assert result.exit_code == 1 and "the save of step 3 failed, and training goes on: Step 3" in result.stderr
    assert "Error: Step 4 is committed in" in result.stderr
    assert "not written" not in result.stderr and "untouched" not in result.stderr
    result = train(*(option for option in task if option != "--resume"), 4)
    assert result.exit_code == 1 and "found some, up to global_step2. Add --resume" in result.stderr
    assert answer(*task, 5)["resumed_step"] == 4


def test_another_model_or_optimizer_is_refused_in_words_of_the_command(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(swap_path)
    config = write_config(Path("config.json"))
    task = ("--steps", 1, "--save", "ck", "--resume")
    assert train(config, *SMALL[:2], *task).exit_code == 0
    result = train(config, "--model", "gpt:layers=2,hidden=32,context=16", *task)
    assert result.exit_code == 1 and "--resume: the run in ck has --model gpt:layers=1" in result.stderr
    assert "load_module_strict" not in result.stderr
    other = write_config(Path("other.json"), optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    result = train(other, *SMALL[:2], *task)
    assert result.exit_code == 1 and "Take the config of the run in ck, or give another directory" in result.stderr


def test_options_without_a_directory_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    for option in (["--resume"], ["--save-every", "2"]):
        result = train(config, *option)
        assert result.exit_code == 2 and "name it with --save" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_at_once(
    run: Callable[..., Any],  # noqa: F811
    number: signal.Signals,
    code: int,
    tmp_path: Path,
) -> None:
    def at_step(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), number)
            time.sleep(0.05)
            os.kill(os.getpid(), number)
            time.sleep(5)

    result, engine = run(write_config(Path("config.json")), *SMALL, "--save", "ck", "--json", at_step=at_step)
    assert result.exit_code == code and engine.closed
    assert json.loads(result.stdout)["steps"] == 2 and not Path("ck").exists()


def test_the_first_signal_finishes_the_step_and_saves(run: Callable[..., Any]) -> None:  # noqa: F811
    def at_step(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    result, engine = run(write_config(Path("config.json")), *SMALL, "--save", "ck", "--json", at_step=at_step)
    assert result.exit_code == 143 and engine.closed
    assert json.loads(result.stdout)["steps"] == 3 and (Path("ck") / "global_step3").exists()
