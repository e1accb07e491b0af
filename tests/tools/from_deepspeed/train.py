"""Under torchrun, where DeepSpeed is installed: train.py CASE OUT trains, saves OUT/deepspeed, trains on, and rank 0
writes what it then has to OUT/end.json and OUT/end.safetensors."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parent))
migrant: Any = importlib.import_module("migrant")


def main(case: str, out: Path) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # PyTorch computes it on a CPU, slowly
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    model, optimizer = migrant.build()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=migrant.config(*migrant.CASES[case]))

    def steps(first: int, last: int) -> list[list[float]]:
        rows = []
        for step in range(first, last):
            loss = engine(migrant.batch(step, rank))
            engine.backward(loss)
            engine.step()
            rows.append([loss.item(), engine.get_lr()[0], float(engine.optimizer.cur_scale)])
        return rows

    steps(0, migrant.STEPS_BEFORE)
    engine.save_checkpoint(str(out / "deepspeed"), client_state={"epoch": 3})
    rows = steps(migrant.STEPS_BEFORE, migrant.STEPS_BEFORE + migrant.STEPS_AFTER)
    full = deepspeed.utils.safe_get_full_fp32_param
    values = {name: full(param) for name, param in model.named_parameters() if param.requires_grad}
    if rank == 0:
        save_file({name: value.detach().clone() for name, value in values.items()}, out / "end.safetensors")
        (out / "end.json").write_text(json.dumps({"deepspeed": deepspeed.__version__, "rows": rows}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
