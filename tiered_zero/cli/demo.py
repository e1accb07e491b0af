"""Train a model in less memory than plain PyTorch needs for it, and compare the losses: `tiered-zero demo [DIR]`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiered_zero.cli.console import parsed
from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.plan.gpt_shape import parse_count
from tiered_zero.sizes import GIB, MIB, format_nbytes

if TYPE_CHECKING:
    from tiered_zero.demo.forms import Form

HIDDEN, CONTEXT, NUM_STEPS = 1024, 32, 3
PER_BLOCK = 12 * HIDDEN**2 + 13 * HIDDEN
DEVICE_NBYTES, LEAST_HOST_NBYTES = 300 * MIB, 384 * MIB
SPARE_NBYTES = 300 * MIB
"""Bytes of memory that training takes beyond its plan: activations, and free memory that the allocator keeps."""

PLAIN_NBYTES, DISK_NBYTES, HOST_NBYTES = 16.5, 20, 2
"""Bytes per parameter that training takes. PLAIN_NBYTES: memory, with plain PyTorch. DISK_NBYTES, HOST_NBYTES: disk and
host memory, with tiered_zero."""

MIN_PARAMETERS, MAX_PARAMETERS = 100e6, 1e11


def parse_layers(text: str) -> int:
    """Convert a number of parameters, such as "750M", to a number of blocks. Raises ConfigError."""
    count = parse_count(text)
    if not MIN_PARAMETERS <= count <= MAX_PARAMETERS:
        raise ConfigError(f"expected {MIN_PARAMETERS:.0e} to {MAX_PARAMETERS:.0e} parameters; found {text}")
    return round(count / PER_BLOCK)


@click.command("demo")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path("."))
@click.option(
    "--params", "layers", callback=parsed(parse_layers), default="750M", show_default=True, help="Size of the model."
)
def demo(directory: Path, layers: int) -> None:
    """Train a model for which plain PyTorch runs out of memory. With tiered_zero the same memory is enough.

    Runs three processes: plain PyTorch with a memory limit; tiered_zero with the same limit and its swap files in
    DIRECTORY; plain PyTorch without a limit, if there is enough memory. The losses of the last two must be equal in
    every bit. Takes one to two minutes on two idle cores. All files are removed at the end.
    """
    from tiered_zero.demo.forms import Form
    from tiered_zero.hardware.probe import available_host_nbytes

    logging.getLogger("tiered_zero").setLevel(logging.ERROR)
    count = layers * PER_BLOCK
    host_nbytes = max(LEAST_HOST_NBYTES, HOST_NBYTES * count)
    limit_nbytes = DEVICE_NBYTES + host_nbytes + SPARE_NBYTES
    available_nbytes, plain_nbytes = available_host_nbytes(), int(PLAIN_NBYTES * count)
    _check_room(directory, DISK_NBYTES * count, limit_nbytes + GIB // 2, available_nbytes)
    limited = Form(
        layers=layers,
        hidden=HIDDEN,
        context=CONTEXT,
        steps=NUM_STEPS,
        limit_nbytes=limit_nbytes,
        device_nbytes=DEVICE_NBYTES,
        host_nbytes=host_nbytes,
    )
    limit_text, plain_text = format_nbytes(limit_nbytes), format_nbytes(plain_nbytes)
    click.echo(f"A GPT of {count / 1e6:,.0f}M parameters, {NUM_STEPS} steps of AdamW in fp32.")
    click.echo(
        f"\n1. Plain PyTorch, ended when it takes more than {limit_text} of memory. It needs about {plain_text}."
    )
    _, error = _train(limited)
    if not error:
        raise ConfigError("Plain PyTorch was expected to run out of memory here; it did not. Give a larger --params.")
    click.echo(
        f"\n2. tiered_zero in the same {limit_text}: {format_nbytes(DEVICE_NBYTES)} as the device, "
        f"{format_nbytes(host_nbytes)} of host memory, the rest on disk. Step 2 also ends the update of step 1."
    )
    with _own_directory(directory) as own:
        here, error = _train(replace(limited, directory=str(own)))
    if error:
        raise ConfigError(f"Training here failed, as it should not: {error}")
    if available_nbytes < plain_nbytes + GIB:
        click.echo(
            f"\n3. Not compared: plain PyTorch takes about {plain_text} without a limit, and "
            f"{format_nbytes(available_nbytes)} are free. A smaller model can be: --params 250M."
        )
        return
    click.echo("\n3. Plain PyTorch without the limit.")
    there, error = _train(replace(limited, limit_nbytes=None))
    if error or there != here:
        raise ConfigError(f"The losses were expected to be equal in every bit; found {here} here, {there}. {error}")
    click.echo(
        f"\nThe {NUM_STEPS} losses are equal in every bit. How your own model would rest: tiered-zero plan --help"
    )


def _check_room(directory: Path, disk_nbytes: int, memory_nbytes: int, available_nbytes: int) -> None:
    """Raise StoreError if the disk of `directory` has no room for the demo, ConfigError if memory has no room."""
    if not directory.is_dir():
        raise StoreError(f"{directory}: expected a directory for the swap files; it does not exist.")
    if (free := shutil.disk_usage(directory).free) < disk_nbytes:
        raise StoreError(
            f"{directory}: the demo writes {format_nbytes(disk_nbytes)} there, and {format_nbytes(free)} are free. "
            "Name a directory on another disk, or give a smaller --params."
        )
    if available_nbytes < memory_nbytes:
        raise ConfigError(
            f"The demo takes {format_nbytes(memory_nbytes)} of memory, and {format_nbytes(available_nbytes)} are free. "
            "Close other programs, or give a smaller --params."
        )


@contextmanager
def _own_directory(parent: Path) -> Iterator[Path]:
    """Make a directory in `parent` for the `with` block, and remove it with its contents afterwards."""
    own = Path(tempfile.mkdtemp(prefix="tiered_zero-demo-", dir=parent))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _train(form: Form) -> tuple[list[float], str]:
    """Train as `form` says in a new process, and print each step. Return the losses, and the process's error or ""."""
    began_s, losses, error = time.perf_counter(), list[float](), ""
    command = [sys.executable, "-m", "tiered_zero.demo.forms", json.dumps(asdict(form))]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # fewer page faults
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as child:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                facts: dict[str, Any] = json.loads(line)
                if "step" in facts:
                    losses.append(facts["loss"])
                    click.echo(f"   step {facts['step']}   loss {facts['loss']:.7f}   {facts['seconds']:5.1f} s")
                elif "built_s" in facts:
                    on_disk = f", {format_nbytes(facts['disk_nbytes'])} on disk" if facts["disk_nbytes"] else ""
                    click.echo(f"   values of all weights in {facts['built_s']:.1f} s{on_disk}")
                elif "peak_nbytes" in facts:
                    click.echo(f"   peak of memory: {format_nbytes(facts['peak_nbytes'])}")
                error = facts.get("error", "")
            child.wait()
        finally:
            child.kill()  # after Ctrl-C; its files are removed with their directory
    error = error or (f"the process ended with code {child.returncode}" if child.returncode else "")
    if error:
        click.echo(f"   out after {time.perf_counter() - began_s:.1f} s: {error[:160]}")
    return losses, error
