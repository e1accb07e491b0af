"""Does a step take what was predicted, and is what placement "auto" chooses as fast as the best placement by hand?

    python tools/bench/auto.py --dir /mnt/nvme --only split,choice-1,choice-2,choice-3 --out records/auto.jsonl

The rates of the machine are measured first (`tiered-zero doctor DIR --measure`), in each part anew. Parts:
  split          parameters and state on NVMe, clipping 1, host memory for a quarter, a half and three quarters of the
                 state: seconds of a step, measured and predicted
  choice-1 to 3  in five settings (model, host memory, tokens) what auto chooses, next to a grid by hand: tiers of
                 parameters and state, how much state host memory holds, and the update policy
Each part takes at most five minutes on two cores. Each case runs in a process of its own; after two steps to warm up
the median of the others counts. `--dtype fp32` is for processors whose bf16 products are slow (no AVX-512, no AMX).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from tools.bench.gpt2 import build_gpt2, gpt2_config

NUM_WARM_UP = 2
GIB = 1 << 30
STATE_NBYTES = 12
"""Of a parameter: a master and two moments."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, the tokens of a step, and the host memory that a run may take."""

    model: str
    tokens: int
    host_nbytes: int
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.tokens} tokens, {self.host_nbytes / GIB:.2f} GiB of host memory"


SETTINGS = {
    "choice-1": (
        Setting(model="gpt2-124m", tokens=64, host_nbytes=5 * GIB // 4),
        Setting(model="gpt2-124m", tokens=64, host_nbytes=4 * GIB),
    ),
    "choice-2": (
        Setting(model="gpt2-124m", tokens=256, host_nbytes=3 * GIB // 2),
        Setting(model="gpt2-124m", tokens=16, host_nbytes=GIB),
    ),
    "choice-3": (Setting(model="gpt2-350m", tokens=64, host_nbytes=3 * GIB),),
    "smoke": (Setting(model="tiny", tokens=16, host_nbytes=GIB),),
}
SPLIT_MODELS = ("gpt2-124m", "gpt2-350m")
SHARES = (0.25, 0.5, 0.75)


# -- in a process of its own -------------------------------------------------------------------------------------------


def build(model: str) -> torch.nn.Module:
    with torch.device("meta"):
        built: torch.nn.Module = build_gpt2(gpt2_config(model))
    return built.train()


def measure(task: Mapping[str, Any]) -> dict[str, Any]:
    """Train for some steps; return the seconds of each, and of the step that is predicted for the run's plan."""
    import tiered_zero
    from tiered_zero.assembly.choice import make_predictor
    from tiered_zero.config.load import load

    torch.manual_seed(0)
    setting = task["setting"]
    model = build(setting["model"])
    predict = make_predictor(load(task["config"]), model)
    tokens = torch.randint(0, gpt2_config(setting["model"]).vocab_size, (1, setting["tokens"]))
    engine, *_ = tiered_zero.initialize(model=model, config=task["config"])
    predicted = predict(engine.plan)
    seconds = []
    for _ in range(NUM_WARM_UP + task["steps"]):
        start_s = time.perf_counter()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        seconds.append(time.perf_counter() - start_s)
    engine.close()
    return {
        "seconds": seconds[NUM_WARM_UP:],
        "predicted_s": predicted.seconds,
        "bound_by": predicted.bound_by,
        "written_nbytes": sum(predicted.written_nbytes.values()),
    }


def choose(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config that auto chooses, and the lines that it prints."""
    from tiered_zero.assembly.spec import specify_run
    from tiered_zero.config.load import load

    start_s = time.perf_counter()
    choice = specify_run(load(task["config"]), build(task["setting"]["model"])).choice
    assert choice is not None
    return {
        "config": json.loads(choice.config_text),
        "lines": [*choice.lines],
        "search_s": time.perf_counter() - start_s,
    }


# -- configs -----------------------------------------------------------------------------------------------------------


def config_of(
    setting: Setting, directory: str, zero: Mapping[str, Any] | None = None, own: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config of a run; `zero`, `own`: further keys of its sections."""
    offload = {"offload_optimizer": {"nvme_path": directory}}
    return {
        "train_batch_size": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": setting.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {**offload, **(zero or {})},
        "tiered_zero": {
            "host_memory_limit": setting.host_nbytes,
            "sequence_length": setting.tokens,
            **(own or {}),
        },
    }


def placed(params: str, state: str, directory: str) -> dict[str, Any]:
    return {
        "stage": 3 if params != "none" else 2,
        "offload_param": {"device": params, "max_in_cpu": 0, "nvme_path": directory},
        "offload_optimizer": {"device": state, "nvme_path": directory},
    }


def split_configs(directory: str, models: tuple[str, ...], dtype: str) -> Iterator[tuple[str, Setting, dict[str, Any]]]:
    for model in models:
        num_parameters = sum(param.numel() for param in build(model).parameters())
        for share in SHARES:
            limit = round(share * STATE_NBYTES * num_parameters)
            setting = Setting(model=model, tokens=64, host_nbytes=8 * GIB, dtype=dtype)
            own = {"state_limits": {"host": limit}, "gradients": "cpu"}
            yield (
                f"{model}, {share:.0%} of the state in host memory",
                setting,
                config_of(setting, directory, placed("nvme", "nvme", directory), own),
            )


def grid(setting: Setting, directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What somebody would try by hand; what does not fit is refused when it runs."""
    num_parameters = sum(param.numel() for param in build(setting.model).parameters())
    yield "none/none", config_of(setting, directory, placed("none", "none", directory))
    for params in ("none", "nvme"):
        for share in (0.0, 0.25, 0.5):
            limits = {"state_limits": {"host": round(share * STATE_NBYTES * num_parameters)}} if share else {}
            for update in ("overlapped", "barrier") if not share else ("overlapped",):
                name = f"{params}/nvme {update}" + f", {share:.0%} of the state in host memory" * bool(share)
                zero = placed(params, "nvme", directory)
                yield name, config_of(setting, directory, zero, {**limits, "update": update})


# -- all of it ---------------------------------------------------------------------------------------------------------


def run(what: str, task: Mapping[str, Any], cache: str) -> dict[str, Any] | None:
    """Run in a fresh process; None for a plan that does not fit."""
    command = [sys.executable, str(Path(__file__).resolve()), "--task", json.dumps({"what": what, **task})]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": cache})
    if done.returncode != 0:
        if "PlanError" in done.stderr:
            return None
        raise SystemExit(f"{task}: exit status {done.returncode}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_rates(directory: str, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tiered_zero", "doctor", directory, "--measure"]
    root = str(Path(__file__).resolve().parents[2])
    env = {
        **os.environ,
        "XDG_CACHE_HOME": cache,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    rates: dict[str, Any] = json.loads(Path(cache, "tiered_zero", "machine.json").read_text())
    return {name: value for name, value in rates.items() if name not in ("name", "disks")} | {
        "disks": [{**disk, "path": ""} for disk in rates["disks"]]
    }


def measure_split(options: argparse.Namespace, directory: str, cache: str) -> dict[str, dict[str, Any]]:
    results = {}
    models = ("tiny",) if options.smoke else SPLIT_MODELS
    for name, setting, config in split_configs(directory, models, options.dtype):
        found = run("measure", {"setting": vars(setting), "config": config, "steps": options.steps}, cache)
        assert found is not None, name
        results[name] = found
        measured, predicted = statistics.median(found["seconds"]), found["predicted_s"]
        print(f"{name}: {measured:.3f} s, predicted {predicted:.3f} s ({predicted / measured - 1:+.0%})")
    return results


def measure_choices(
    options: argparse.Namespace, settings: tuple[Setting, ...], directory: str, cache: str
) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for setting in settings:
        auto = config_of(setting, directory, own={"placement": "auto"})
        chosen = run("choose", {"setting": vars(setting), "config": auto}, cache)
        assert chosen is not None, setting.name
        print(f"{setting.name}; searched in {chosen['search_s']:.1f} s", *chosen["lines"], sep="\n")
        for case, config in (("auto", chosen["config"]), *grid(setting, directory)):
            found = run("measure", {"setting": vars(setting), "config": config, "steps": options.steps}, cache)
            if found is None:
                print(f"  {case}: does not fit")
                continue
            results[f"{setting.name}: {case}"] = found
            print(f"  {case}: {statistics.median(found['seconds']):.3f} s, predicted {found['predicted_s']:.3f} s")
        own = {
            name: statistics.median(each["seconds"]) for name, each in results.items() if name.startswith(setting.name)
        }
        auto_s = own.pop(f"{setting.name}: auto")
        best = min(own, key=lambda name: own[name])
        print(f"  auto takes {auto_s / own[best]:.2f} of the best by hand, {best.rpartition(': ')[2]}")
    return results


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="split,choice-1,choice-2,choice-3", help="parts, separated by commas")
    parser.add_argument("--steps", type=int, default=4, help="measured steps a case, after two to warm up")
    parser.add_argument("--dir", default=".", help="where the swap directories are made, and the disk measured")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), default="bf16", help="of the parameters that compute reads"
    )
    parser.add_argument("--out", help="append a record for each part to this file of JSON lines")
    parser.add_argument("--smoke", action="store_true", help="seconds, on a tiny model: does it run?")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    if options.task:
        task = json.loads(options.task)
        print(json.dumps({"measure": measure, "choose": choose}[task["what"]](task)))
        return
    from tools.bench.record import append_record

    for part in ("split", "smoke") if options.smoke else options.only.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-auto-", dir=options.dir) as directory:
            swap, cache = Path(directory, "swap"), str(Path(directory, "cache"))
            swap.mkdir()
            rates = measure_rates(str(swap), cache)
            if part == "split":
                results = measure_split(options, str(swap), cache)
            else:
                settings = tuple(replace(setting, dtype=options.dtype) for setting in SETTINGS[part])
                results = measure_choices(options, settings, str(swap), cache)
        if options.out:
            samples = {name: found.pop("seconds") for name, found in results.items()}
            append_record(
                options.out,
                "auto",
                {"part": part, "steps": options.steps, "dtype": options.dtype},
                samples,
                rates,
                unit="s",
                results=results,
            )


if __name__ == "__main__":
    main()
