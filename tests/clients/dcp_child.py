"""Under torchrun: dcp_child.py SWAP OUTPUT trains an engine of two ranks at stage 3, moves its state into another by
PyTorch's recipe, and goes on with both."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import tiered_zero
from tests.support.models import rows, two_layers
from tests.support.trainers import same_bits, tiered


def steps(engine: tiered_zero.Engine, first: int) -> list[torch.Tensor]:
    for number in range(first, first + 3):
        engine.backward(engine(rows(10 * number + torch.distributed.get_rank())).square().mean())
        engine.step()
    return list(engine.module.state_dict().values())


def main(swap_path: str, output: str) -> None:
    places = Path(swap_path), ("nvme", "nvme")
    for number, options in enumerate((StateDictOptions(), StateDictOptions(full_state_dict=True, cpu_offload=True))):
        with tiered(two_layers(), *places) as one, tiered(two_layers(), *places) as other:
            steps(one, 0)
            path = Path(output) / f"dcp-{number}"
            model, optimizer = get_state_dict(one.module, one.optimizer, options=options)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            model, optimizer = get_state_dict(other.module, other.optimizer, options=options)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            # of cpu_offload rank 0 alone has the whole; set_state_dict() takes an empty dict for "no model"
            options.broadcast_from_rank0 = options.cpu_offload
            set_model_state_dict(other.module, model, options=options)
            set_optimizer_state_dict(other.module, other.optimizer, optimizer, options=options)
            assert all(map(same_bits, steps(one, 3), steps(other, 3))), options
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
