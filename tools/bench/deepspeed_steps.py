"""How long is a step of DeepSpeed and of tiered_zero, with state on NVMe or on cpu, side by side?

    python tools/bench/deepspeed_steps.py --python VENV/bin/python --dir /mnt/nvme --cases cpu --out deepspeed.jsonl
    python tools/bench/deepspeed_steps.py --python VENV/bin/python --dir /mnt/nvme --cases nvme --out deepspeed.jsonl

VENV has DeepSpeed, and for NVMe its async_io (libaio's headers; its first use compiles for minutes). Each case is a
process of its own: DeepSpeed's with that Python, ours with this one, in turns. Both train the
built-in GPT in bf16 from one config, on one rank.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # this folder's io.py is not Python's
    sys.path[:] = [str(ROOT), *(path for path in sys.path if path != str(ROOT / "tools" / "bench"))]

NUM_WARM_UP = 3


def config_of(tier: str, directory: str) -> dict[str, Any]:
    place = {"device": tier, **({"nvme_path": directory} if tier == "nvme" else {})}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": dict(place),
            "offload_optimizer": dict(place),
            "sub_group_size": 50_000_000,
        },
    }


def work(options: argparse.Namespace) -> None:
    """Train in this process; print the seconds of each step after the warm-up."""
    import torch

    from tiered_zero.demo.gpt import build_gpt
    from tiered_zero.plan.gpt_shape import parse_gpt

    shape = parse_gpt(options.model)
    system, tier = options.case.split("/")
    config = config_of(tier, options.dir)
    torch.manual_seed(0)
    model: Any = build_gpt(shape, "cpu")
    engine: Any
    if system == "DeepSpeed":
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": "29617", "DS_ACCELERATOR": "cpu"}
        import deepspeed

        config["zero_force_ds_cpu_optimizer"] = True
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        version = deepspeed.__version__
    else:
        import tiered_zero
        from tiered_zero.version import __version__ as version

        config["tiered_zero"] = {"device": "cpu", "device_memory_limit": "2GiB"}
        engine, *_ = tiered_zero.initialize(model=model, config=config)
    generator, seconds = torch.Generator().manual_seed(0), list[float]()
    for _ in range(NUM_WARM_UP + options.steps):
        tokens = torch.randint(shape.vocab, (1, shape.context), generator=generator)
        began_s = time.perf_counter()
        loss = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        seconds.append(time.perf_counter() - began_s)
    print(json.dumps({"seconds": seconds[NUM_WARM_UP:], "loss": float(loss), "version": version}), flush=True)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of the environment with DeepSpeed")
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--cases", choices=("cpu", "nvme"), default="cpu")
    parser.add_argument("--model", default="gpt:layers=24,hidden=1024,context=64")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        work(options)
        return
    samples: dict[str, list[float]] = {}
    versions = {}
    for _ in range(options.turns):
        for system, python in (("tiered_zero", sys.executable), ("DeepSpeed", options.python)):
            case = f"{system}/{options.cases}"
            with tempfile.TemporaryDirectory(dir=options.dir) as own:
                command = [python, __file__, "--case", case, "--dir", own, "--model", options.model]
                ran = subprocess.run(
                    [*command, "--steps", str(options.steps)], capture_output=True, text=True, check=False
                )
            if ran.returncode:
                sys.exit(f"{case} failed:\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
            found = json.loads(ran.stdout.strip().splitlines()[-1])
            samples.setdefault(case, []).extend(found["seconds"])
            versions[case] = found["version"]
            print(case, [round(each, 3) for each in found["seconds"]], "loss", found["loss"], flush=True)
    medians = {case: statistics.median(seconds) for case, seconds in samples.items()}
    ratio = medians[f"DeepSpeed/{options.cases}"] / medians[f"tiered_zero/{options.cases}"]
    print(f"DeepSpeed takes {ratio:.2f} times as long")
    if options.out:
        from tools.bench.record import append_record

        arguments = {"model": options.model, "tier": options.cases, "steps": options.steps, "turns": options.turns}
        append_record(options.out, "deepspeed", arguments, samples, None, ratio=ratio, deepspeed=versions)


if __name__ == "__main__":
    main()
