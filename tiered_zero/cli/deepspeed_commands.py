"""Replace DeepSpeed's launcher, and install a package named `deepspeed`.

`tiered-zero launch` starts ranks with torchrun, and takes the options of DeepSpeed's launcher. `tiered-zero
deepspeed-alias` installs a distribution named `deepspeed` (the alias). Tools that import it get
`tiered_zero.deepspeed`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click

from tiered_zero.errors import ConfigError
from tiered_zero.version import DEEPSPEED_VERSION

_PACKAGE = '''"""tiered_zero under the name of DeepSpeed: `tiered-zero deepspeed-alias uninstall` removes it."""

import sys

import tiered_zero.deepspeed

sys.modules.update(tiered_zero.deepspeed.modules_named(__name__))
'''
_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {DEEPSPEED_VERSION}
Summary: tiered_zero under the name of DeepSpeed, written by `tiered-zero deepspeed-alias install`
Requires-Dist: tiered-zero
"""
_COMMAND = f"""#!{sys.executable}
import sys

from tiered_zero.cli.deepspeed_commands import launch_as_deepspeed

sys.exit(launch_as_deepspeed())
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The two directories into which the alias is installed: one for packages, one for commands."""

    packages: Path
    scripts: Path

    @property
    def infos(self) -> list[Path]:
        """Return the metadata directories of all installed versions of the alias; empty if there are none."""
        return sorted(self.packages.glob("deepspeed-*+tiered.zero.dist-info"))

    @property
    def command(self) -> Path:
        """Return the path of the alias's command `deepspeed`, the launcher."""
        return self.scripts / "deepspeed"

    def remove(self) -> None:
        """Remove the files of all versions of the alias, and directories that are then empty."""
        package = self.packages / "deepspeed"
        files = [path for path in (package / "__init__.py", self.command) if _is_ours(path)]
        files += package.glob("__pycache__/__init__.*.pyc") if package / "__init__.py" in files else ()
        for path in [*files, *(path for info in self.infos for path in info.iterdir())]:
            path.unlink()
        for folder in (package / "__pycache__", package, *self.infos):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _is_ours(path: Path) -> bool:
    """Return whether `deepspeed-alias install` has written the file."""
    return path.exists() and b"tiered_zero" in path.read_bytes()


def _place(ctx: click.Context, param: click.Parameter, target: Path | None) -> Place:
    if target is not None:
        return Place(packages=target, scripts=target / "bin")
    return Place(packages=Path(sysconfig.get_path("purelib")), scripts=Path(sysconfig.get_path("scripts")))


@click.group("deepspeed-alias")
def deepspeed_alias() -> None:
    """Let Trainer, Accelerate, TRL, axolotl and Lightning find tiered_zero where they import `deepspeed`."""


_TARGET = click.option(
    "--target",
    "place",
    type=click.Path(path_type=Path, file_okay=False),
    callback=_place,
    help="A directory to be put on PYTHONPATH. Default: this Python's own packages.",
)


@deepspeed_alias.command("install")
@_TARGET
def install(place: Place) -> None:
    """Install the distribution `deepspeed` (the alias), unless the real one is installed."""
    if (found := _find_real(place)) is not None:
        raise ConfigError(
            f"deepspeed-alias install: expected no DeepSpeed; found {found}. Run `pip uninstall deepspeed` first, or "
            "write `import tiered_zero.deepspeed as deepspeed` into the script and leave DeepSpeed installed."
        )
    if place.command.exists() and not _is_ours(place.command):
        raise ConfigError(
            f"deepspeed-alias install: expected no {place.command}, or the alias's own; found another file. Move it, "
            "or name a directory for PYTHONPATH: --target DIR."
        )
    info = place.packages / f"deepspeed-{DEEPSPEED_VERSION}.dist-info"
    files = {  # metadata first, so that a partial install can be recognized and removed
        info / "METADATA": _METADATA,
        place.packages / "deepspeed" / "__init__.py": _PACKAGE,
        place.command: _COMMAND,
    }
    record = [os.path.relpath(path, place.packages) for path in (*files, info / "RECORD")]
    files[info / "RECORD"] = "".join(f"{name},,\n" for name in record)
    try:
        place.remove()
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        place.command.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"deepspeed-alias install: expected to write to {place.packages} and {place.scripts}; found {error}. Name "
            "a directory of yours for PYTHONPATH: --target DIR."
        ) from error
    click.echo(f"deepspeed {DEEPSPEED_VERSION} is in {place.packages}, and its command is {place.command}.")


@deepspeed_alias.command("uninstall")
@_TARGET
def uninstall(place: Place) -> None:
    """Remove what `install` has written."""
    infos = place.infos
    if not infos:
        raise ConfigError(f"deepspeed-alias uninstall: expected the alias in {place.packages}; it is not there.")
    place.remove()
    click.echo(f"{_named(infos[0])} is removed from {place.packages}.")


@deepspeed_alias.command("status")
@_TARGET
def status(place: Place) -> None:
    """Print what `import deepspeed` finds: the alias, the real DeepSpeed, or nothing."""
    if (found := _find_real(place)) is not None:
        click.echo(f"The real one: {found}. The alias is not installed.")
    elif infos := place.infos:
        click.echo(f"The alias: {_named(infos[0])} in {place.packages}.")
    else:
        click.echo(
            f"Nothing: there is no deepspeed in {place.packages}. `tiered-zero deepspeed-alias install` adds it."
        )


def _find_real(place: Place) -> str | None:
    """Return a text that names the real DeepSpeed in `place` or on this Python's path; None if there is none."""
    for found in metadata.distributions(name="deepspeed", path=[str(place.packages), *sys.path]):
        if "+tiered" not in found.version:
            return f"deepspeed {found.version} in {found.locate_file('')}"
    package = place.packages / "deepspeed"
    return f"the package {package}" if package.exists() and not place.infos else None


def _named(info: Path) -> str:
    """Return a distribution's name and version, such as "deepspeed 0.19.8+tiered.zero". `info`: its metadata
    directory."""
    return " ".join(info.name.removesuffix(".dist-info").split("-", 1))


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
    """Start SCRIPT once for each device of this host, or --num_gpus times. Without a GPU the ranks use the CPU."""
    if num_hosts > 1 or other_hosts is not None:
        raise click.UsageError("Ranks on several hosts: start torchrun on each of them, as docs/ranks.md shows.")
    if chosen is not None:
        raise click.UsageError("Choose devices by the variable CUDA_VISIBLE_DEVICES, and their number by --num_gpus.")
    from tiered_zero.hardware.runtime import find_device  # seconds, and --help needs no torch

    number = num_ranks or (1 if find_device("auto").type == "cpu" else "auto")
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={number}"]
    command += ["--standalone"] if port is None else [f"--master-port={port}"]
    command += ["--module"] if is_module else []
    local_rank = [] if no_local_rank else ["--local_rank=${local_rank}"]  # torchrun fills it in
    os.execv(sys.executable, [*command, script, *local_rank, *args])


def launch_as_deepspeed() -> None:
    """Run `tiered-zero launch` under the name `deepspeed`. The command `deepspeed` that `deepspeed-alias install`
    writes calls this."""
    launch(prog_name="deepspeed")
