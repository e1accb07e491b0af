"""What does a step of several ranks cost, beside PyTorch's own data parallelism?

    python tools/bench/ranks.py --out records/ranks.jsonl

In fp32 over gloo on CPUs, one thread a rank, each case under a torchrun of its own, in turns; times are rank 0's:
  compute          forward and backward of every rank at the same time, without any exchange: a bound
  DDP + ZeRO       DistributedDataParallel, torch's ZeroRedundancyOptimizer over AdamW
  FSDP2            fully_shard on each block and the root: reduce_dtype fp32, reshard_after_forward
  FSDP2 offload    the same with CPUOffloadPolicy(pin_memory=False)
  DeepSpeed S      DeepSpeed at ZeRO stage S over torch's AdamW, on its CPU accelerator, where it is installed: in this
                   Python, or in that of --deepspeed, whose torch it then runs on
  stage S P/O      tiered_zero at ZeRO stage S, parameters on P, masters and state on O (device, cpu)
Every case clips the global norm of gradients to 1. Stages 1 and 2 are held against DDP + ZeRO, stage 3 on the device
against FSDP2, and stage 3 on cpu against FSDP2 offload. "payload" is what one rank hands to collectives in a step, in
fp32 elements for each parameter, as the engine counts it: with W ranks (W - 1)/W of it belongs to another rank.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from tools.bench.gpt2 import MODELS, build_gpt2, gpt2_config, resident_nbytes

NUM_WARM_UP = 2
SECTIONS = {"device": "none", "cpu": "cpu"}
CLIP = 1.0
RATE = 1e-4
DEEPSPEED = ("DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3")
BASES = {"stage 1": "DDP + ZeRO", "stage 2": "DDP + ZeRO", "stage 3 d": "FSDP2", "stage 3 c": "FSDP2 offload"}
"""How a case begins -> what it is held against."""
BARS = {"DDP + ZeRO": 1.10, "FSDP2": 1.25, "FSDP2 offload": 1.25}
"""At most so many times as long."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Task:
    """What one launch measures."""

    case: str
    model: str
    tokens: int
    accumulation: int
    steps: int


@dataclass
class Result:
    """`seconds`: each measured step. `payload`: elements a step that a rank hands to collectives, for each parameter;
    None where nobody counts. `version`: of DeepSpeed, and of the torch below it. `waited`: the share of rank 0's time
    in which it waited for the others."""

    num_parameters: int = 0
    update_policy: str = ""
    version: str = ""
    seconds: list[float] = field(default_factory=list)
    payload: float | None = None
    waited: float | None = None
    peak_rss_nbytes: int | None = None


# -- in the ranks ------------------------------------------------------------------------------------------------------


def measure_task(task: Task) -> Result:
    """One rank's part; rank 0 returns what counts."""
    torch.manual_seed(0)
    config = gpt2_config(task.model)
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, config.vocab_size, (1, task.tokens), generator=generator) for _ in range(4)]
    model = build_gpt2(config)
    model.train()
    result = Result(num_parameters=sum(param.numel() for param in model.parameters()))
    prepare = prepare_stage if task.case.startswith("stage") else prepare_torch
    prepare = prepare_deepspeed if task.case in DEEPSPEED else prepare
    step, end = prepare(task, model, batches, result)
    for _ in range(NUM_WARM_UP):
        step()
    for _ in range(task.steps):
        start_s = time.perf_counter()
        step()
        result.seconds.append(time.perf_counter() - start_s)
    result.peak_rss_nbytes = resident_nbytes("VmHWM")
    end()
    return result


def prepare_torch(task: Task, model: Any, batches: list[torch.Tensor], result: Result) -> tuple[Step, Step]:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    wrapped = model
    optimizer: torch.optim.Optimizer | None = None
    if task.case == "DDP + ZeRO":
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=RATE, weight_decay=0.01)
    elif task.case.startswith("FSDP2"):
        shard(model, offloads=task.case.endswith("offload"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)

    def step() -> None:
        for number in range(task.accumulation):
            is_last = number == task.accumulation - 1
            if task.case == "DDP + ZeRO":
                wrapped.require_backward_grad_sync = is_last  # what no_sync() sets
            tokens = batches[number % len(batches)]
            (wrapped(input_ids=tokens, labels=tokens).loss / task.accumulation).backward()
        if optimizer is None:
            model.zero_grad()
            return
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step, dist.destroy_process_group


def shard(model: Any, *, offloads: bool) -> None:
    """Every choice of FSDP2 that bears on time, as it is held against tiered_zero."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
        "reshard_after_forward": True,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy(),
    }
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)


def prepare_deepspeed(task: Task, model: Any, batches: list[torch.Tensor], result: Result) -> tuple[Step, Step]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    result.version = f"{deepspeed.__version__}, torch {torch.__version__}"
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": task.accumulation,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(task.case.split()[1])},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        for number in range(task.accumulation):
            tokens = batches[number % len(batches)]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    return step, dist.destroy_process_group


def prepare_stage(task: Task, model: Any, batches: list[torch.Tensor], result: Result) -> tuple[Step, Step]:
    import tiered_zero

    engine, *_ = tiered_zero.initialize(model=model, config=make_config(task))
    result.update_policy = engine.plan.update_policy.policy
    num_steps, before = 0, {"waited_s": 0.0, "gathered_nbytes": 0.0, "reduced_nbytes": 0.0}
    began_s = 0.0

    def step() -> None:
        nonlocal num_steps, before, began_s
        if num_steps == NUM_WARM_UP:
            before, began_s = engine.rank_report(), time.perf_counter()
        for number in range(task.accumulation):
            tokens = batches[number % len(batches)]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        num_steps += 1

    def end() -> None:
        found = {name: value - before[name] for name, value in engine.rank_report().items()}
        moved = found["gathered_nbytes"] + found["reduced_nbytes"]
        result.payload = moved / 4 / (num_steps - NUM_WARM_UP) / result.num_parameters
        result.waited = found["waited_s"] / (time.perf_counter() - began_s)
        engine.close()

    return step, end


def make_config(task: Task) -> dict[str, Any]:
    _, stage, places = task.case.split()
    params, state = (SECTIONS[name] for name in places.split("/"))
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": task.accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": int(stage),
            "offload_param": {"device": params, "pin_memory": False},
            "offload_optimizer": {"device": state, "pin_memory": False},
        },
        "tiered_zero": {"device": "cpu"},
    }


# -- all of it ---------------------------------------------------------------------------------------------------------


def has_deepspeed(python: str) -> bool:
    """Whether the interpreter `python` has the package."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    return subprocess.run([python, "-c", code], env=environment_of(python), capture_output=True).returncode == 0


def environment_of(python: str) -> dict[str, str]:
    """This process's, one thread a rank; of another interpreter without this one's packages, and with its programs
    first, such as the ninja by which DeepSpeed builds its operations."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if python != sys.executable:
        environment["PATH"] = os.pathsep.join([os.path.dirname(os.path.abspath(python)), environment.get("PATH", "")])
        environment.pop("PYTHONPATH", None)
    return environment


def run_task(task: Task, num_ranks: int, python: str) -> Result:
    """Under the torchrun of an interpreter; its errors are shown where it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        out = Path(folder) / "result.json"
        command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        command += [str(Path(__file__).resolve()), "--task", json.dumps(vars(task)), "--task-out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment_of(python))
        if done.returncode != 0 or not out.exists():
            raise SystemExit(f"{task.case}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return Result(**json.loads(out.read_text()))


def base_of(case: str) -> str | None:
    return next((base for start, base in BASES.items() if case.startswith(start)), None)


def show(results: Mapping[str, Result], ratios: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One step, medians")
    for title in ("case", "s", "min", "max", "x its base", "at most", "payload", "waited", "RSS MiB"):
        table.add_column(title, justify="left" if title == "case" else "right")
    for case, result in results.items():
        base = base_of(case)
        table.add_row(
            f"{case} {result.update_policy or result.version}".strip(),
            f"{statistics.median(result.seconds):.3f}",
            f"{min(result.seconds):.3f}",
            f"{max(result.seconds):.3f}",
            f"{ratios[case]:.2f} of {base}" if case in ratios else "",
            f"{BARS[base]:.2f}" if case in ratios and base else "",
            "" if result.payload is None else f"{result.payload:.2f}",
            "" if result.waited is None else f"{result.waited:.0%}",
            "?" if result.peak_rss_nbytes is None else f"{result.peak_rss_nbytes >> 20}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2-30m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of each rank in a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=8, help="measured in each round")
    parser.add_argument("--rounds", type=int, default=3, help="of all cases in turns")
    parser.add_argument(
        "--cases",
        type=lambda text: [case.strip() for case in text.split(",")],
        default=[
            *("DDP + ZeRO", "stage 1 device/device", "stage 2 device/device", "stage 2 device/cpu"),
            *("FSDP2", "stage 3 device/device", "FSDP2 offload", "stage 3 cpu/cpu"),
            *DEEPSPEED,
        ],
        help="separated by commas; compute comes besides",
    )
    parser.add_argument(
        "--deepspeed", metavar="PYTHON", default=sys.executable, help="the interpreter that DeepSpeed's cases run in"
    )
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--smoke", action="store_true", help="seconds, on a tiny model: does it run?")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--task-out", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.tokens, options.steps, options.rounds = "tiny", 16, 2, 1
    stages = [f"stage {stage} {p}/{o}" for stage in (1, 2, 3) for p in SECTIONS for o in SECTIONS]
    known = ["compute", "DDP + ZeRO", "FSDP2", "FSDP2 offload", *DEEPSPEED, *stages]
    if unknown := [case for case in options.cases if case not in known]:
        parser.error(f"--cases: expected some of {', '.join(known)}; found {unknown[0]!r}")
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse_options(arguments)
    if options.task:
        result = measure_task(Task(**json.loads(options.task)))
        if os.environ["RANK"] == "0":
            Path(options.task_out).write_text(json.dumps(vars(result)))
        return {}
    from tools.bench.record import append_record

    shape = (options.model, options.tokens, options.accumulation, options.steps)
    missing = [case for case in options.cases if case in DEEPSPEED]
    missing = [] if missing and has_deepspeed(options.deepspeed) else missing
    for case in missing:
        print(f"{case} is left out: {options.deepspeed} has no package deepspeed (--deepspeed PYTHON names another)")
    cases = dict.fromkeys(["compute", *(case for case in options.cases if case not in missing)])
    results: dict[str, Result] = {}
    for task in [Task(case, *shape) for case in cases] * options.rounds:
        found = run_task(task, options.ranks, options.deepspeed if task.case in DEEPSPEED else sys.executable)
        found.seconds = (results[task.case].seconds if task.case in results else []) + found.seconds
        results[task.case] = found
    seconds = {case: statistics.median(result.seconds) for case, result in results.items()}
    ratios = {case: seconds[case] / seconds[base] for case in seconds if (base := base_of(case)) in seconds}
    show(results, ratios)
    report = {
        "unit": "s",
        "ratios_to_base": ratios,
        "bars": {case: BARS[base] for case in ratios if (base := base_of(case))},
        "ratios_to_compute": {case: each / seconds["compute"] for case, each in seconds.items()},
        "results": {name: {k: v for k, v in vars(each).items() if k != "seconds"} for name, each in results.items()},
    }
    if options.out:
        named = {
            key: value for key, value in vars(options).items() if key not in ("out", "task", "task_out", "deepspeed")
        }
        samples = {case: result.seconds for case, result in results.items()}
        append_record(options.out, "ranks", named, samples, {"compute_s": seconds["compute"]}, **report)
    return report


if __name__ == "__main__":
    main()
