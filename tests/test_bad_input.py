"""Whatever is wrong with what a user hands in gets one clear error before anything is allocated, and leaves nothing."""

import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiered_zero
from tests.bad_inputs import CASES, Case, build_model, check, good_config, merged
from tests.support.inspection.insides import rack
from tiered_zero.errors import ConfigError, ModelError, PlanError, StoreError, TieredZeroError
from tiered_zero.io import select

ROOT = Path(__file__).parents[1]
DEVICES = ("none", "cpu", "nvme")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _what_a_process_starts_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The default process group and MKL's first call are not left behind by bad input."""
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    tiered_zero.initialize(model=build_model(), config=config)[0].close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_one_clear_error_and_nothing_left(case: Case, swap_path: Path) -> None:
    check(case, swap_path)


UNOPTIMIZED_TORCH = """
import functools, runpy, sys
files = sys.modules["_frozen_importlib_external"]
ours = files.cache_from_source
files.cache_from_source = functools.partial(ours, optimization="")
import torch._dynamo, torch.distributed.tensor
files.cache_from_source = ours
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Reads torch, which no one has compiled with -O, from what its installation has compiled: ten seconds otherwise."""


def test_python_O_changes_nothing(swap_path: Path) -> None:
    program = str(ROOT / "tests" / "bad_inputs.py")
    command = [sys.executable, "-O", "-c", UNOPTIMIZED_TORCH, program, str(swap_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(CASES)} cases with -O 1\n"


def test_a_block_device(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.stat, "S_ISBLK", lambda mode: True)  # not every machine shows its disks
    with pytest.raises(ConfigError, match=r"is a block device\. Make a file system on it, mount it"):
        tiered_zero.initialize(model=build_model(), config=good_config(swap_path))
    assert os.listdir(swap_path) == []


@pytest.mark.usefixtures("no_leaks")
def test_a_path_in_memory_trains_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    path = _made(Path("/dev/shm") / f"tiered_zero_test_{os.getpid()}")
    try:
        with tiered_zero.initialize(model=build_model(), config=good_config(path))[0] as engine:
            engine.backward(engine(torch.ones(4, 64)).sum())
            engine.step()
        assert [r.message for r in caplog.records if "is RAM-backed (tmpfs)" in r.message and r.levelname == "WARNING"]
        assert os.listdir(path) == []
    finally:
        shutil.rmtree(path)


@pytest.mark.usefixtures("no_leaks")
def test_a_disk_that_is_too_small(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/record/test_full_disk.py shows it on small file systems; here the space for the data files is refused."""

    def no_space(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    model = build_model()
    expected = model(torch.ones(4, 64)).detach()
    with pytest.raises(StoreError, match=r"(?s)No space left|ENOSPC|too small"):
        tiered_zero.initialize(model=model, config=good_config(swap_path))
    assert os.listdir(swap_path) == []
    assert torch.equal(model(torch.ones(4, 64)), expected)


@pytest.mark.parametrize(
    ("stage", "param", "optimizer"),
    [case for case in itertools.product(range(4), DEVICES, DEVICES) if case[0] == 3 or case[1] in ("none", "cpu")],
)
def test_every_combination_trains_or_is_a_config_error(stage: int, param: str, optimizer: str, swap_path: Path) -> None:
    zero = {
        "stage": stage,
        "offload_param": {"device": param, "nvme_path": str(swap_path)},
        "offload_optimizer": {"device": optimizer, "nvme_path": str(swap_path)},
    }
    config = {**good_config(swap_path), "bf16": {"enabled": True}, "zero_optimization": zero}
    model = build_model()
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        effective = param if stage == 3 else "none"  # offload_param is not read below, as in DeepSpeed
        assert engine.config.zero_optimization.offload_param.device == effective
        losses = []
        for _ in range(3):
            losses.append(engine(torch.ones(4, 64, dtype=torch.bfloat16)).float().square().mean())
            engine.backward(losses[-1])
            engine.step()
        assert engine.global_steps == 3
    assert losses[2] < losses[1] < losses[0]
    assert os.listdir(swap_path) == []


@pytest.mark.parametrize("device", DEVICES)
def test_two_engines_on_one_model_are_refused(device: str, swap_path: Path) -> None:
    config = merged(good_config(swap_path), {"zero_optimization": {"offload_param": {"device": device}}})
    model = build_model()
    first = tiered_zero.initialize(model=model, config=config)[0]
    with pytest.raises(ModelError, match=r"0\.weight belongs to an engine already.*Use that engine"):
        tiered_zero.initialize(model=model, config=config)
    first.backward(first(torch.ones(4, 64)).sum())
    first.step()
    first.close()
    if device == "none":  # its values are the model's own again
        tiered_zero.initialize(model=model, config=config)[0].close()
    else:
        with pytest.raises(ModelError, match=r"0\.weight has no value.*closed.*load_state_dict"):
            tiered_zero.initialize(model=model, config=config)


def test_a_shared_part_is_refused_too(swap_path: Path) -> None:
    shared = build_model()
    with tiered_zero.initialize(model=shared, config=good_config(swap_path))[0]:
        other = torch.nn.Sequential(torch.nn.Linear(64, 64), shared)
        with pytest.raises(ModelError, match=r"1\.0\.weight belongs to an engine already"):
            tiered_zero.initialize(model=other, config=good_config(swap_path))


def test_a_users_own_exception_is_not_disguised(swap_path: Path) -> None:
    model = build_model()
    expected = model(torch.ones(4, 64)).detach()
    for argument in ("optimizer", "lr_scheduler"):
        with pytest.raises(ZeroDivisionError):
            tiered_zero.initialize(model=model, config=good_config(swap_path), **{argument: lambda given: 1 / 0})
        assert os.listdir(swap_path) == []
        assert torch.equal(model(torch.ones(4, 64)), expected)


def test_rates_that_a_scheduler_set_are_taken_back_when_the_run_does_not_start(
    swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a second try would start its warmup from the first one's rate, which is 0."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    before = {**optimizer.param_groups[0]}
    config = {**good_config(swap_path), "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    with monkeypatch.context() as patch:
        patch.setattr(rack, "SwapStore", _refuse)
        with pytest.raises(StoreError, match="full"):
            tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    assert optimizer.param_groups == [before]
    engine, handle, _, scheduler = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    assert handle.param_groups[0]["lr"] == 0.0
    for _ in range(12):
        engine.backward(engine(torch.ones(4, 64)).sum())
        engine.step()
    assert scheduler.get_last_lr() == [0.25]
    engine.close()


def test_errors_say_what_to_do(swap_path: Path) -> None:
    """A plan that does not fit is a table, and an error is one text, not a chain of tracebacks."""
    with pytest.raises(PlanError) as caught:
        tiered_zero.initialize(
            model=build_model(), config=merged(good_config(swap_path), {"tiered_zero": {"host_memory_limit": "16KiB"}})
        )
    lines = str(caught.value).splitlines()
    assert re.search(
        r"Largest: [a-z ]+ \d.*iB.*\. Raise tiered_zero.host_memory_limit to at least .*: no other setting", lines[0]
    )
    assert {line.split(":")[0].strip() for line in lines if line.startswith("  ") and not line.startswith("    ")} == {
        "device",
        "host",
        "nvme",
    }
    assert caught.value.__cause__ is None
    assert isinstance(caught.value, TieredZeroError)


def test_nothing_is_logged_by_bad_input(swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error is the message. (That a callable's optimizer or the config's was made may be said at level INFO.)"""
    caplog.set_level(logging.DEBUG, "tiered_zero")
    with pytest.raises(PlanError):
        bad = merged(good_config(swap_path), {"tiered_zero": {"host_memory_limit": "16KiB"}})
        tiered_zero.initialize(model=build_model(), config=bad)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("relative", [False, True])
def test_a_missing_path_is_made_and_taken_back_where_the_run_does_not_start(
    relative: bool, swap_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(swap_path)
    path = Path("new/swap") if relative else swap_path / "new" / "swap"
    caplog.set_level(logging.INFO, "tiered_zero")
    bad = merged(good_config(path), {"tiered_zero": {"host_memory_limit": "16KiB"}})
    with pytest.raises(PlanError):
        tiered_zero.initialize(model=build_model(), config=bad)
    assert os.listdir(swap_path) == []
    tiered_zero.initialize(model=build_model(), config=good_config(path))[0].close()
    assert [oct(made.stat().st_mode & 0o777) for made in (swap_path / "new", swap_path / "new/swap")] == ["0o700"] * 2
    assert os.listdir(swap_path / "new" / "swap") == []
    tiered_zero.initialize(model=build_model(), config=good_config(path))[0].close()
    made = sum(record.message.startswith("Made the swap directory") for record in caplog.records)
    assert made == 1, "a run that does not fit makes none, and the last one found it"


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def _refuse(*arguments: object, **options: object) -> None:
    raise StoreError("full")
