"""Start ranks on this host by torchrun, with the options of DeepSpeed's launcher: `tiered-zero launch`.

With the alias (deepspeed_alias.py) the command `deepspeed` runs `tiered-zero launch` too.
"""

from __future__ import annotations

import os
import sys

import click


@click.command("launch", context_settings={"allow_interspersed_args": False})
@click.option("--num_gpus", "--num-gpus", "num_ranks", type=click.IntRange(min=1), help="Ranks. Default: the devices.")
@click.option("--master_port", "--master-port", "port", type=int, help="Port of the ranks. Default: a free one.")
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--no_local_rank", is_flag=True, help="Leave --local_rank=N out of the script's arguments.")
@click.option("--num_nodes", "--num-nodes", "num_hosts", type=int, default=1, hidden=True)
@click.option("--hostfile", "-H", "--node_rank", "--master_addr", "other_hosts", hidden=True)
@click.option("--include", "-i", "--exclude", "-e", "chosen", hidden=True)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    num_ranks: int | None,
    port: int | None,
    is_module: bool,
    no_local_rank: bool,
    num_hosts: int,
    other_hosts: str | None,
    chosen: str | None,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Start SCRIPT once on each device of this host, or --num_gpus times; without a GPU the ranks are on the CPU."""
    if num_hosts > 1 or other_hosts is not None:
        raise click.UsageError("Ranks on several hosts: start torchrun on each of them, as docs/ranks.md shows.")
    if chosen is not None:
        raise click.UsageError("Choose devices by the variable CUDA_VISIBLE_DEVICES, and their number by --num_gpus.")
    from tiered_zero.hardware.device.select import find_device  # seconds, and --help needs no torch

    number = num_ranks or (1 if find_device("auto").type == "cpu" else "auto")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={number}"]
    command += ["--standalone"] if port is None else [f"--master-port={port}"]
    command += ["--module"] if is_module else []
    local_rank = [] if no_local_rank else ["--local_rank=${local_rank}"]  # torchrun fills it in
    os.execv(sys.executable, [*command, script, *local_rank, *args])


def main() -> None:
    """Run `tiered-zero launch` as the command `deepspeed`."""
    launch(prog_name="deepspeed")
