"""`tiered-zero deepspeed-alias install | uninstall | status`: a distribution `deepspeed` on disk, in which other tools
find `tiered_zero.deepspeed` by that name. Nothing else writes it, and nothing here imports it."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import click

from tiered_zero.errors import ConfigError
from tiered_zero.version import __version__

VERSION = "0.19.8+tiered.zero"
_PACKAGE = '''"""tiered_zero under the name of DeepSpeed: `tiered-zero deepspeed-alias uninstall` removes it."""

import sys

import tiered_zero.deepspeed

sys.modules.update(tiered_zero.deepspeed.modules_named(__name__))
'''
_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: tiered_zero under the name of DeepSpeed, written by `tiered-zero deepspeed-alias install`
Requires-Dist: tiered-zero
"""
_WHEEL = f"Wheel-Version: 1.0\nGenerator: tiered_zero ({__version__})\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_ENTRY_POINTS = "[console_scripts]\ndeepspeed = tiered_zero.cli.launch:main\n"
_INFO = f"deepspeed-{VERSION}.dist-info"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where packages of a Python lie, and its commands."""

    packages: Path
    scripts: Path

    @property
    def info(self) -> Path:
        """The directory of the distribution's metadata."""
        return self.packages / _INFO


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
    """Write the distribution `deepspeed`, unless the real one is installed."""
    if (found := _find_real(place)) is not None:
        raise ConfigError(
            f"deepspeed-alias install: expected no DeepSpeed; found {found}. Run `pip uninstall deepspeed` first, or "
            "write `import tiered_zero.deepspeed as deepspeed` into the script and leave DeepSpeed installed."
        )
    command = place.scripts / "deepspeed"
    script = f"#!{sys.executable}\nimport sys\n\nfrom tiered_zero.cli.launch import main\n\nsys.exit(main())\n"
    files = {
        place.packages / "deepspeed" / "__init__.py": _PACKAGE,
        place.info / "METADATA": _METADATA,
        place.info / "WHEEL": _WHEEL,
        place.info / "INSTALLER": "tiered-zero\n",
        place.info / "entry_points.txt": _ENTRY_POINTS,
        command: script,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command.chmod(0o755)
    with open(place.info / "RECORD", "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerows(_row(path, text, place) for path, text in files.items())
        rows.writerow((f"{_INFO}/RECORD", "", ""))
    click.echo(f"deepspeed {VERSION} is in {place.packages}, and its command is {command}.")


@deepspeed_alias.command("uninstall")
@_TARGET
def uninstall(place: Place) -> None:
    """Remove what `install` has written, and nothing else."""
    if not place.info.is_dir():
        raise ConfigError(f"deepspeed-alias uninstall: expected {place.info}; it is not there. Nothing was removed.")
    with open(place.info / "RECORD", newline="") as file:
        paths = [place.packages / row[0] for row in csv.reader(file)]
    for path in paths:
        path.unlink(missing_ok=True)
        for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc") if path.suffix == ".py" else ():
            cached.unlink()
    for folder in (place.packages / "deepspeed" / "__pycache__", place.packages / "deepspeed", place.info):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    click.echo(f"deepspeed {VERSION} is removed from {place.packages}.")


@deepspeed_alias.command("status")
@_TARGET
def status(place: Place) -> None:
    """Say what `import deepspeed` finds: the alias, the real one, or nothing."""
    if (found := _find_real(place)) is not None:
        click.echo(f"The real one: {found}. The alias is not installed beside it.")
    elif place.info.is_dir():
        click.echo(f"The alias: deepspeed {VERSION} in {place.packages}.")
    else:
        click.echo(
            f"Nothing: there is no deepspeed in {place.packages}. `tiered-zero deepspeed-alias install` adds it."
        )


def _find_real(place: Place) -> str | None:
    """Name a DeepSpeed that this did not write, in `place` or wherever this Python imports from."""
    for found in metadata.distributions(name="deepspeed", path=[str(place.packages), *sys.path]):
        if "+tiered" not in found.version:
            return f"deepspeed {found.version} in {found.locate_file('')}"
    package = place.packages / "deepspeed"
    return f"the package {package}" if package.exists() and not place.info.is_dir() else None


def _row(path: Path, text: str, place: Place) -> tuple[str, str, str]:
    """Return the file's line of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return os.path.relpath(path, place.packages), f"sha256={digest}", str(len(text.encode()))
