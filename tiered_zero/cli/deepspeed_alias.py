"""Install a distribution `deepspeed` in which other tools find `tiered_zero.deepspeed`: `tiered-zero deepspeed-alias`.

Only this command writes that distribution, and nothing in tiered_zero imports it.
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
_INFO_FILES = ("METADATA", "WHEEL", "INSTALLER", "entry_points.txt", "RECORD")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the alias is installed: the directories of a Python's packages and of its commands."""

    packages: Path
    scripts: Path

    @property
    def package(self) -> Path:
        """Return the path of the only file of the package `deepspeed`."""
        return self.packages / "deepspeed" / "__init__.py"

    @property
    def command(self) -> Path:
        """Return the path of the command `deepspeed`, the launcher."""
        return self.scripts / "deepspeed"

    @property
    def infos(self) -> list[Path]:
        """Return the alias's metadata directories, of any version; the list is empty if no alias is installed."""
        return sorted(self.packages.glob("deepspeed-*+tiered.zero.dist-info"))


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
    if place.command.exists() and not _is_ours(place.command):
        raise ConfigError(
            f"deepspeed-alias install: expected no {place.command}, or the alias's own; found another file. Move it, "
            "or name a directory for PYTHONPATH: --target DIR."
        )
    script = f"#!{sys.executable}\nimport sys\n\nfrom tiered_zero.cli.launch import main\n\nsys.exit(main())\n"
    info = place.packages / _INFO
    texts = (_METADATA, _WHEEL, "tiered-zero\n", _ENTRY_POINTS)  # metadata first: a partial install is known as ours
    files = {info / name: text for name, text in zip(_INFO_FILES, texts, strict=False)}
    files |= {place.package: _PACKAGE, place.command: script}
    record = [os.path.relpath(path, place.packages) for path in (*files, info / "RECORD")]
    files[info / "RECORD"] = "".join(f"{name},,\n" for name in record)
    try:
        _remove(place)
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        place.command.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"deepspeed-alias install: expected to write to {place.packages} and {place.scripts}; found {error}. Name "
            "a directory of yours for PYTHONPATH: --target DIR."
        ) from error
    click.echo(f"deepspeed {VERSION} is in {place.packages}, and its command is {place.command}.")


@deepspeed_alias.command("uninstall")
@_TARGET
def uninstall(place: Place) -> None:
    """Remove the files that `install` has written, and nothing else."""
    infos = place.infos
    if not infos:
        raise ConfigError(f"deepspeed-alias uninstall: expected the alias in {place.packages}; it is not there.")
    _remove(place)
    click.echo(f"{_named(infos[0])} is removed from {place.packages}.")


@deepspeed_alias.command("status")
@_TARGET
def status(place: Place) -> None:
    """Say what `import deepspeed` finds: the alias, the real one, or nothing."""
    if (found := _find_real(place)) is not None:
        click.echo(f"The real one: {found}. The alias is not installed.")
    elif infos := place.infos:
        click.echo(f"The alias: {_named(infos[0])} in {place.packages}.")
    else:
        click.echo(
            f"Nothing: there is no deepspeed in {place.packages}. `tiered-zero deepspeed-alias install` adds it."
        )


def _find_real(place: Place) -> str | None:
    """Name a DeepSpeed that `install` has not written, in `place` or on this Python's path; None if there is none."""
    for found in metadata.distributions(name="deepspeed", path=[str(place.packages), *sys.path]):
        if "+tiered" not in found.version:
            return f"deepspeed {found.version} in {found.locate_file('')}"
    package = place.package.parent
    return f"the package {package}" if package.exists() and not place.infos else None


def _remove(place: Place) -> None:
    """Remove the files that an install writes, found by their names and not by RECORD, and the directories that are
    empty then."""
    cached = place.package.parent / "__pycache__"
    paths = [path for path in (place.package, place.command) if path.exists() and _is_ours(path)]
    paths += cached.glob("__init__.*.pyc") if place.package in paths else ()
    for path in [*paths, *(info / name for info in place.infos for name in _INFO_FILES)]:
        path.unlink(missing_ok=True)
    for folder in (cached, place.package.parent, *place.infos):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _is_ours(path: Path) -> bool:
    """Return whether an install has written the file."""
    return b"tiered_zero" in path.read_bytes()


def _named(info: Path) -> str:
    """Return the distribution's name and version."""
    return " ".join(info.name.removesuffix(".dist-info").split("-", 1))
