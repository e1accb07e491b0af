"""Bad input: what is handed in, which error it gets, and what must be true afterwards.

`python -O tests/bad_inputs.py DIRECTORY` checks every case; nothing here is an assert statement, which -O would drop.
"""

import gc
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

import tiered_zero
from tests.support.configs import SMALL_DEVICE, zero_section
from tiered_zero.errors import ConfigError, ModelError, PlanError, TieredZeroError

Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`expected` and `text` (a pattern): the error. `settings`: laid over a good NVMe config. `model`: makes the model.

    `rest`: (model, swap directory) -> more arguments of initialize. `spoil`: makes the swap directory bad, and returns
    the path to be named.
    """

    expected: type[TieredZeroError]
    text: str
    settings: Json | None = None
    model: Callable[[], nn.Module] = lambda: build_model()
    rest: Callable[[nn.Module, Path], Json] = lambda model, path: {}
    spoil: Callable[[Path], Path] = lambda path: path


def build_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(dtype)


def good_config(path: Path) -> Json:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero_section("nvme", "nvme", path),
        "tiered_zero": SMALL_DEVICE,
    }


def merged(base: Json, over: Json) -> Json:
    return {
        **base,
        **{
            name: merged(base[name], value) if isinstance(value, dict) and isinstance(base.get(name), dict) else value
            for name, value in over.items()
        },
    }


def _paths(path: Path) -> Json:
    return {"zero_optimization": {name: {"nvme_path": str(path)} for name in ("offload_param", "offload_optimizer")}}


def _a_file(path: Path) -> Path:
    (path / "file").touch()
    return path / "file"


def _frozen() -> nn.Module:
    return build_model().requires_grad_(False)


def _own(kind: Callable[..., Any], **options: Any) -> Callable[[nn.Module, Path], Json]:
    return lambda model, path: {"optimizer": kind(model.parameters(), **options)}


def _foreign(model: nn.Module, path: Path) -> Json:
    return {"optimizer": torch.optim.SGD(build_model().parameters(), lr=0.1)}


def _scheduler_of_another(model: nn.Module, path: Path) -> Json:
    return {"lr_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)}


def _same_parameter_twice(model: nn.Module, path: Path) -> Json:
    return {"model_parameters": [{"params": list(model.parameters())}, {"params": list(model.parameters())[:1]}]}


def _no_config(model: nn.Module, path: Path) -> Json:
    return {"config": None}


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
CASES: dict[str, Case] = {
    # the config by itself
    "unknown key": Case(
        ConfigError, r"zero_optimisation: .* Did you mean zero_optimization\?", {"zero_optimisation": {}}
    ),
    "unknown key in a section": Case(
        ConfigError,
        r"offload_param\.nvme_pth: .* Did you mean zero_optimization\.offload_param\.nvme_path\?",
        {"zero_optimization": {"offload_param": {"nvme_pth": "x"}}},
    ),
    "unknown key of ours": Case(
        ConfigError, r"tiered_zero\.io_engin: .*io_engine\?", {"tiered_zero": {"io_engin": "threads"}}
    ),
    "an unknown value": Case(
        ConfigError,
        r"^tiered_zero\.io_engine: expected 'auto', 'native' or 'aiofiles'; found 'threads'",
        {"tiered_zero": {"io_engine": "threads"}},
    ),
    "wrong type": Case(
        ConfigError,
        r"^train_micro_batch_size_per_gpu: expected a whole number; found 'many'",
        {"train_micro_batch_size_per_gpu": "many"},
    ),
    "wrong type of a section": Case(ConfigError, r"^fp16: expected an object; found 'yes'", {"fp16": "yes"}),
    "contradictory batch sizes": Case(ConfigError, r"found 9 against 4 x 2 x 1 = 8", {"train_batch_size": 9}),
    "fp16 and bf16 together": Case(
        ConfigError,
        r"fp16\.enabled, bf16\.enabled: expected at most one",
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    ),
    "NaN loss scale": Case(
        ConfigError,
        r"fp16\.loss_scale: expected a finite number; found nan",
        {"fp16": {"enabled": True, "loss_scale": float("nan")}},
    ),
    "smallest loss scale above the first": Case(
        ConfigError,
        r"fp16\.min_loss_scale must be .* at most the first",
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
    ),
    "no config": Case(
        ConfigError, r"expected one of config and args\.deepspeed_config; found neither", rest=_no_config
    ),
    "config that is no file": Case(
        ConfigError, r"/none\.json is not a file", rest=lambda model, path: {"config": str(path / "none.json")}
    ),
    "scheduler that does not exist": Case(
        ConfigError, r"scheduler\.type: .*Did you mean WarmupLR\?", {"scheduler": {"type": "WarmUpLR"}}
    ),
    "scheduler with a wrong argument": Case(
        ConfigError,
        r"scheduler\.params\.warmup_steps: .*warmup_num_steps",
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
    ),
    # the swap directory
    "nvme_path missing": Case(
        ConfigError,
        r"zero_optimization\.offload_param\.nvme_path \S*/none is missing and cannot be made: ENOENT .* Name",
        spoil=lambda path: Path("/proc/none"),
    ),
    "nvme_path a file": Case(
        ConfigError, r"offload_param\.nvme_path \S*/file is a file, but must be a directory", spoil=_a_file
    ),
    "nvme_path not writable": Case(
        ConfigError,
        r"offload_param\.nvme_path /proc/self is not writable: E\w+ ",
        spoil=lambda path: Path("/proc/self"),
    ),
    "nvme_path not named": Case(
        ConfigError,
        r"offload_param\.nvme_path: expected a directory",
        {"zero_optimization": {"offload_param": {"nvme_path": None}}},
    ),
    # sizes
    "buffer smaller than a parameter": Case(
        ConfigError,
        r"offload_param\.buffer_size: 1000 elements, but parameter 0\.weight has 4096\. Set it to at least 4096",
        {"zero_optimization": {"offload_param": {"buffer_size": 1000}}},
    ),
    "host budget too small": Case(
        PlanError,
        r"(?s)of host memory, with .*; 16\.0 KiB is allowed \(tiered_zero\.host_mem.*\n  host: .*gradients",
        {"tiered_zero": {"host_memory_limit": "16KiB"}},
    ),
    "device budget too small": Case(
        PlanError,
        r"(?s)of device memory; 1\.0 KiB is allowed \(tiered_zero\.device_mem.*\n  device: .*paged",
        {"tiered_zero": {"device_memory_limit": "1KiB"}},
    ),
    "state limits too small": Case(
        PlanError,
        r"(?s)optimizer state on tier nvme; 16\.0 KiB is allowed \(tiered_zero\.state_limits\.nvme\), \d+ bytes too "
        r"little.*\n  nvme: ",
        {"tiered_zero": {"state_limits": {"device": "8KiB", "nvme": "16KiB"}}},
    ),
    "a delayed update of state on the device": Case(
        ConfigError,
        r"tiered_zero\.update: delayed needs the whole optimizer off the device.*found offload_optimizer\.ratio 0\.5",
        {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}, "tiered_zero": {"update": "delayed"}},
    ),
    # the optimizer
    "LBFGS": Case(
        ModelError,
        r"LBFGS cannot train across tiers: it evaluates the model several times",
        rest=_own(torch.optim.LBFGS),
    ),
    "SparseAdam": Case(
        ModelError, r"SparseAdam cannot train across tiers: it needs sparse", rest=_own(torch.optim.SparseAdam)
    ),
    "LBFGS in the config": Case(ConfigError, r"optimizer\.type.*LBFGS", {"optimizer": {"type": "LBFGS", "params": {}}}),
    "a scheduler without an optimizer": Case(
        ConfigError,
        r"lr_scheduler needs an optimizer",
        {"optimizer": None},
        rest=lambda model, path: {"lr_scheduler": lambda optimizer: None},
    ),
    "an optimizer over another model": Case(
        ModelError, r"param group 0 holds a parameter of shape \(64, 64\) that is not", rest=_foreign
    ),
    "an optimizer that is none": Case(
        ModelError, r"must be a torch\.optim\.Optimizer.*found str", rest=lambda model, path: {"optimizer": "Adam"}
    ),
    "a callable that makes none": Case(
        ModelError, r"callable that makes one; found list", rest=lambda model, path: {"optimizer": list}
    ),
    "no parameters for it": Case(
        ModelError, r"model_parameters is empty", rest=lambda model, path: {"model_parameters": []}
    ),
    "the same parameter in two groups": Case(ModelError, r"more than one parameter group", rest=_same_parameter_twice),
    "a scheduler that is none": Case(
        ConfigError, r"lr_scheduler must be a scheduler.*found int", rest=lambda model, path: {"lr_scheduler": 3}
    ),
    "a scheduler of another optimizer": Case(
        ConfigError, r"lr_scheduler drives an optimizer that is not", rest=_scheduler_of_another
    ),
    "a scheduler that needs a metric": Case(
        ConfigError,
        r"ReduceLROnPlateau needs a metric",
        rest=lambda model, path: {"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
    ),
    # the model
    "no model": Case(
        ModelError, r"takes a torch\.nn\.Module; found NoneType", rest=lambda model, path: {"model": None}
    ),
    "a model without parameters": Case(ModelError, r"The model has no parameters", model=nn.ReLU),
    "a model without trainable ones": Case(ModelError, r"No parameter of the model requires a gradient", model=_frozen),
    "no trainable ones, own optimizer": Case(
        ModelError, r"No parameter of the model requires a gradient", model=_frozen, rest=_own(SGD, lr=0.1)
    ),
    "float64": Case(
        ModelError,
        r"Parameter 0\.weight is torch\.float64; trainable ones are",
        model=lambda: build_model(torch.float64),
    ),
    "lazy parameters": Case(
        ModelError, r"Parameter 0\.weight has no shape yet: .* lazy", model=lambda: nn.Sequential(nn.LazyLinear(4))
    ),
    "lazy parameters, own optimizer": Case(
        ModelError,
        r"Parameter 0\.weight has no shape yet",
        model=lambda: nn.Sequential(nn.LazyLinear(4)),
        rest=_own(ADAM),
    ),
    # files of the run, before the model is given up to it
    "report in no directory": Case(
        ConfigError,
        r"tiered_zero\.report: expected a file that can be written; /proc/none/run\.jsonl: No such",
        {"tiered_zero": {"report": "/proc/none/run.jsonl"}},
    ),
    "trace in no directory": Case(
        ConfigError,
        r"tiered_zero\.trace: expected a file that can be written",
        {"tiered_zero": {"trace": "/proc/none/trace.json"}},
    ),
    "weights for a model that has some": Case(
        ModelError,
        r"tiered_zero\.weights.* cannot be read as safetensors",
        {"tiered_zero": {"weights": "/none.safetensors"}},
    ),
}


def check(case: Case, path: Path) -> None:
    """One error of the family with its text; nothing left behind; the model as it was, and trainable. Raises Wrong."""
    swap = path / "swap"
    swap.mkdir()
    named = case.spoil(swap)
    model = case.model()
    arguments = {"model": model, "config": good_config(named), **case.rest(model, swap)}
    if arguments["config"] and case.settings:
        arguments["config"] = merged(arguments["config"], case.settings)
    before = _snapshot(model, swap)
    try:
        tiered_zero.initialize(**arguments)
    except TieredZeroError as error:
        if type(error) is not case.expected or not re.search(case.text, str(error)):
            raise Wrong(
                f"expected {case.expected.__name__} {case.text!r}, got {type(error).__name__}: {error}"
            ) from error
    else:
        raise Wrong("it was accepted")
    del arguments
    if (after := _wait_until(lambda: _snapshot(model, swap), before)) != before:
        raise Wrong(f"left behind: {before} became {after}")
    if any(True for _ in model.parameters()) and not any(is_lazy(param) for param in model.parameters()):
        _train_once(model.float().requires_grad_(), swap)


class Wrong(Exception):
    """A case went otherwise than it should."""


def held() -> set[object]:
    """Threads and open file descriptors of this process."""
    threads = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except OSError:
            continue  # the listing's own
    return {*threads, *descriptors}


def _snapshot(model: nn.Module, swap: Path) -> Any:
    parameters = [
        (
            name,
            type(param),
            param.dtype,
            param.requires_grad,
            len(param._post_accumulate_grad_hooks or {}),
            _bits(param),
        )
        for name, param in model.named_parameters()
    ]
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._state_dict_hooks) for m in model.modules())
    return parameters, hooks, sorted(os.listdir(swap)), held()


def _bits(param: nn.Parameter) -> Any:
    return None if is_lazy(param) else param.detach().view(torch.uint8).numpy().tobytes()


def _wait_until(look: Callable[[], Any], wanted: Any) -> Any:
    """What `look` sees, at the latest a minute from now: threads end in their own time."""
    deadline_s = time.monotonic() + 60
    while (seen := look()) != wanted and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.01)
    return seen


def _train_once(model: nn.Module, swap: Path) -> None:
    x = torch.ones(4, 64)
    expected = model(x).detach()
    with tiered_zero.initialize(model=model, config=good_config(swap))[0] as engine:
        if not torch.equal(engine(x).detach(), expected):
            raise Wrong("the model computes something else than before")
        engine.backward(engine(x).sum())
        engine.step()
        if torch.equal(engine(x).detach(), expected):
            raise Wrong("the model does not train any more")


def main(directory: str) -> None:
    logging.disable()
    torch.set_num_threads(1)
    _train_once(build_model(), Path(directory))  # what starts with the first run of a process starts here
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory(dir=directory) as path:
            try:
                check(case, Path(path))
            except Wrong as error:
                raise SystemExit(f"{name}: {error}") from error
    print(f"{len(CASES)} cases with -O {sys.flags.optimize}")


if __name__ == "__main__":
    main(sys.argv[1])
