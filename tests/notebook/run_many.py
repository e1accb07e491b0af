"""The notebook's script in a rank, once for each configuration: losses and weights of every run.

The script is run as it stands. Every rank reads the same batches, as in the notebook.
"""

import contextlib
import io
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def run_script(config: str) -> dict[str, object]:
    """Run cell 38's script with this configuration; close the engine that it leaves open."""
    sys.argv = ["zero_dp_args.py", f"--deepspeed_config={config}"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(HERE / "zero_dp_args.py"), run_name="__main__")
    engine = names["engine"]
    found = {
        "printed": printed.getvalue(),
        "loss": float(names["loss"]),
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "world_size": engine.world_size,
        "stage": engine.zero_optimization_stage(),
        "num_steps": engine.global_steps,
        "num_skipped": engine.skipped_steps,
        "loss_scale": engine.loss_scale,
        "weights": {name: value.flatten().tolist() for name, value in engine.module.state_dict().items()},
    }
    engine.close()
    return found


def run_scripts(configs: Sequence[str]) -> dict[str, dict[str, object]]:
    """By the name of the configuration's file."""
    sys.path.insert(0, str(HERE))
    try:
        return {Path(config).stem: run_script(config) for config in configs}
    finally:
        sys.path.remove(str(HERE))
