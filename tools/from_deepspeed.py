"""Make a checkpoint for `engine.load_checkpoint` from DeepSpeed's: masters, moments, counts, loss scale, schedule.

    python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder DS/global_step500 \
        --output_folder UNIVERSAL
    python tools/from_deepspeed.py UNIVERSAL OUT

Runs where DeepSpeed (0.19.8 was tried) and tiered_zero are installed, and holds one tensor at a time. What it reads is
pickled, so that reading runs code in it: take files of your own. What it writes holds no pickle.
"""

from __future__ import annotations

import argparse
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tiered_zero.checkpoint.driver import to_json
from tiered_zero.checkpoint.index import Part, Share, Source, TensorEntry, WrittenBy, describe
from tiered_zero.checkpoint.tag_writer import TagWriter
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.version import __version__

KINDS = {"fp32": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
DEEPSPEEDS = set(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size "
    "mp_world_size checkpoint_parallel_dimensions autotp_config ds_config ds_version universal_checkpoint_info".split()
)
"""Keys of a file of model states; what else is there is the client_state."""


def read(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)


def tensors(universal: Path, ranks: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor by its key. `ranks`: their files of model states."""
    first = ranks[0]
    for name, shape in (item for group in first["param_shapes"] for item in group.items()):
        for kind, own in KINDS.items():
            if (path := universal / "zero" / name / f"{kind}.pt").exists():  # no moments before the first step
                value = read(path)
                yield f"{own}/{name}", (value["param"] if isinstance(value, dict) else value).reshape(shape)
    trained = {name for group in first["param_shapes"] for name in group}
    for name, value in first["module"].items():
        if name in first["buffer_names"]:
            yield f"buffer/{name}", value
        elif name not in trained and name not in first["shared_params"]:
            shape = value.shape
            if not value.numel():  # at stage 3 each rank has a part of a frozen parameter
                shape = first["frozen_param_shapes"][name]
                value = torch.cat([rank["frozen_param_fragments"][name].flatten() for rank in ranks])
            yield f"param/{name}", value.flatten()[: shape.numel()].reshape(shape)


def step_counts(universal: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """List the step count of each parameter that has moments."""
    found = {}
    for index, group in enumerate(model["param_shapes"]):
        for name in group:
            if (path := universal / "zero" / name / "step.pt").exists():
                found[name] = {"step": float(read(path))}
            elif (universal / "zero" / name / "exp_avg.pt").exists():  # at stage 3 a sub-group has one
                found[name] = {"step": float(optimizer["optimizer_state_dict"]["state"][index]["step"])}
    return found


def driver(model: dict[str, Any], optimizer: dict[str, Any], schedule: str | None) -> dict[str, Any]:
    """Return what is no tensor. `schedule`: the class of the scheduler, where the config does not name it."""
    config, steps = model["ds_config"], model["global_steps"]
    scaler: Any = optimizer.get("loss_scaler")
    overflow = optimizer.get("overflow", False)
    schedule = schedule or (config.get("scheduler") or {}).get("type")
    if model["lr_scheduler"] is not None and schedule is None:
        raise SystemExit("The learning rates are those of a scheduler of your own: give its class by --lr-scheduler.")
    num_micro = steps * config.get("gradient_accumulation_steps", 1)
    if micro_batch := config.get("train_micro_batch_size_per_gpu"):
        num_micro = model["global_samples"] // (micro_batch * model["dp_world_size"])
    sizes = [sum(len(model["param_shapes"][n]) for n in group["params"]) for group in optimizer["param_groups"]]
    groups = [
        {**group, "betas": tuple(group["betas"]), "params": n}
        for group, n in zip(optimizer["param_groups"], sizes, strict=True)
    ]
    scale = {
        "scale": float(scaler.cur_scale), "step": scaler.cur_iter, "last_overflow": scaler.last_overflow_iter,
        "credits": scaler.cur_hysteresis,
    } if getattr(scaler, "dynamic", False) else None  # fmt: skip
    state = {
        "counts": {
            "micro_steps": num_micro, "global_steps": steps, "boundary": None, "one_backward_each": True,
            "was_applied": not overflow, "grad_check": None,
        },
        "overflow": {"skipped": model["skipped_steps"], "skipped_in_a_row": 0, "nonfinite_in_a_row": 0},
        "loss_scaler": scale,
        "num_applied": steps - model["skipped_steps"],
        "skipped": overflow,
        "groups": groups,
        "lr_scheduler": {"type": schedule, "state": model["lr_scheduler"]} if model["lr_scheduler"] else None,
        "random_states": None, "loader": None, "modules": {},
        "client_state": {name: value for name, value in model.items() if name not in DEEPSPEEDS},
    }  # fmt: skip
    return {name: to_json(value, name) for name, value in state.items()}


def convert(universal: Path, out: Path, rule: str, schedule: str | None) -> Path:
    ranks = [read(path) for path in sorted(universal.glob("*mp_rank_00_model_states.pt"))]
    model, optimizer = ranks[0], read(universal / "zero" / "optimizer_state.pt")
    steps, entries = model["global_steps"], dict[str, TensorEntry]()
    version = f"DeepSpeed {model['ds_version']}"
    with TagWriter.begin(out, f"global_step{steps}") as tag, tag.writing():
        for key, value in tensors(universal, ranks):
            memory = mmap.mmap(-1, align_up(max(value.nbytes, 1), PAGE_NBYTES))
            memory[: value.nbytes] = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            tag.writer.append(key, memoryview(memory)).wait()
            part = Part(0, value.numel(), (Source(0, key, 0),))
            entries[key] = describe(value.dtype, tuple(value.shape)).with_parts([part])
        state = driver(model, optimizer, schedule)
        counts, stores = step_counts(universal, model, optimizer), [tag.writer.finish()]
        written_by = WrittenBy(
            tiered_zero=__version__, torch=torch.__version__, kernel=version, rule=rule, state_format="fp32",
            world_size=model["dp_world_size"], num_threads=torch.get_num_threads(), created_s=time.time(),
        )  # fmt: skip
        share = Share(tensors=entries, scalars=counts, driver=state, stores=stores)
        fields = {"step": steps, "written_by": written_by, "driver": state, "aliases": model["shared_params"]}
        tag.publish(fields, [share])
        return tag.path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("universal", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--optimizer", default="AdamW", choices=["Adam", "AdamW"], help="Adam: with adam_w_mode off")
    parser.add_argument("--lr-scheduler", metavar="CLASS", help="of a scheduler that was passed to initialize()")
    given = parser.parse_args()
    print(convert(given.universal, given.out, given.optimizer, given.lr_scheduler))
