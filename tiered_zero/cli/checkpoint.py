"""List, check, export and remove checkpoints: `tiered-zero checkpoint`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from tiered_zero.cli.console import (
    DIRECTORY,
    JSON_OPTION,
    directory_argument,
    parse_bytes,
    print_json,
    print_table,
    printable,
)
from tiered_zero.errors import StoreError
from tiered_zero.sizes import format_nbytes

if TYPE_CHECKING:
    from tiered_zero.checkpoint.tag import TagInfo

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Maps values of --dtype to names of torch dtypes. Names, because importing torch would make --help slow."""


@click.group("checkpoint")
def checkpoint() -> None:
    """List, check, export and remove the checkpoints that save_checkpoint and `train --save` write."""


@checkpoint.command("ls", short_help="List checkpoints: step, bytes, whole or not and why.")
@directory_argument
@JSON_OPTION
def ls(directory: Path, as_json: bool) -> None:
    """List the checkpoints in DIRECTORY, oldest first: kind, step, bytes, whether each is whole (if not, why), when it
    was written, and by which versions.

    Does not read the checkpoints' data: `verify` does.
    """
    tags, latest = _tags(directory), _latest(directory)
    if as_json:
        return print_json({"latest": latest, "tags": tags})
    rows = [
        (
            info.tag,
            info.kind or "-",
            "-" if info.step is None else str(info.step),
            format_nbytes(info.nbytes),
            _state(info),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(info.created_s)) if info.created_s else "-",
        )
        for info in tags
    ]
    print_table(("checkpoint", "kind", "step", "bytes", "state", "when"), rows, "No checkpoints.")
    if latest is not None:
        click.echo(printable(f"latest: {latest}"))
    for writer, own in groupby(tags, _writer):  # below the table, whose columns have no room for them at 80 characters
        if writer:
            click.echo(printable(f"{_span([info.tag for info in own])}: written by {writer}"))
    for info in tags:
        if info.complete and info.swap is not None:
            click.echo(printable(f"{info.tag}: {format_nbytes(info.nbytes)}, and its state in {info.swap}"))
    _echo_reasons((info.tag, info.reason) for info in tags if info.reason)


@checkpoint.command("verify", short_help="Read every byte, name what is broken.")
@directory_argument
@JSON_OPTION
def verify_command(directory: Path, as_json: bool) -> None:
    """Read all bytes of the checkpoints in DIRECTORY, and compare them with their checksums. The exit code is 1 if a
    checkpoint is broken, lost or not verified, or if no checkpoint is whole.

    An in-place commit that `latest` names is reported as lost if its swap directory is gone or damaged, or on another
    host. A running or interrupted save, an older in-place commit and another program's checkpoint do not change the
    exit code. The commit of a live run is not verified: stop that run first. DIRECTORY may also be the swap directory
    of a run with in-place commits.
    """
    from tiered_zero.checkpoint.tag import find_damage, swap_directories

    problems: dict[str, list[str]] = {}
    not_verified: dict[str, str] = {}
    passed_over: dict[str, str] = {}
    lost: dict[str, str] = {}
    tags, latest = _swap_directory(directory) or _tags(directory), _latest(directory)
    for info in tags:
        if info.is_foreign or info.is_unfinished or (info.kind == "in_place" and not info.complete):
            is_lost = info.tag == latest and info.kind == "in_place" and not info.is_superseded
            (lost if is_lost else passed_over)[info.tag] = info.reason
            continue
        try:
            problems[info.tag] = find_damage(info.path) if info.complete else [info.reason]
        except (StoreError, OSError) as error:
            if isinstance(error, OSError) or isinstance(error.__cause__, OSError):  # such as the lock of a live run
                not_verified[info.tag] = str(error)
            else:
                problems[info.tag] = [str(error)]
    broken = {tag: found for tag, found in problems.items() if found}
    if as_json:
        outcome = {"broken": broken, "lost": lost, "not_verified": not_verified, "passed_over": passed_over}
        print_json({"checked": [*problems], **outcome})
    else:
        outcomes = {
            **dict.fromkeys(problems, "whole"),
            **dict.fromkeys(broken, "broken"),
            **dict.fromkeys(lost, "lost"),
            **dict.fromkeys(not_verified, "not verified"),
            **dict.fromkeys(passed_over, "passed over"),
        }
        rows = [(info.tag, format_nbytes(info.nbytes), outcomes[info.tag]) for info in tags]
        empty = f"No checkpoints. {swap_directories(directory)}".rstrip()
        print_table(("checkpoint", "bytes", "outcome"), rows, empty)
        for texts in broken.values():
            if len(texts) > 3:
                texts[3:] = [f"{len(texts)} places are broken, and 3 are named; --json names all."]
        _echo_reasons((tag, text) for tag, texts in broken.items() for text in texts)
        for reasons in (lost, not_verified, passed_over):
            _echo_reasons(reasons.items())
        if tags and not not_verified and len(broken) == len(problems):
            click.echo("None of them is whole.")
    if broken or lost or not_verified or not problems:
        raise click.exceptions.Exit(1)


def _echo_reasons(reasons: Iterable[tuple[str, str]]) -> None:
    """Print `reasons`, pairs (tag, text). Consecutive tags with the same text share one line."""
    for reason, group in groupby(reasons, key=lambda item: item[1]):
        own = [tag for tag, _ in group]
        text = reason.replace("it was ", "they were ", 1) if len(own) > 1 else reason
        click.echo(printable(f"{_span(own)}: {text}"))


def _span(tags: Sequence[str]) -> str:
    """Return the names of `tags` as one text. For more than 6 tags: only the first and the last, and the number of
    tags."""
    return ", ".join(tags) if len(tags) < 7 else f"{tags[0]} to {tags[-1]} ({len(tags)})"


@checkpoint.command("export", short_help="Write the weights as safetensors.")
@directory_argument
@click.argument("out", type=DIRECTORY)
@click.option("--tag", help="Which checkpoint; default: the one that `latest` names, else the newest whole one.")
@click.option("--dtype", type=click.Choice([*DTYPES]), default="fp32", show_default=True, help="Of parameters.")
@click.option("--max-shard-size", callback=parse_bytes, default="5GB", show_default=True, help="Of a file: 500MB.")
@click.option("--like", type=DIRECTORY, help="A model of transformers: take its names, config and tokenizer.")
@click.option("--force", is_flag=True, help="Replace the weights of another model in OUT.")
@JSON_OPTION
def export(
    directory: Path,
    out: Path,
    tag: str | None,
    dtype: str,
    max_shard_size: int,
    like: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the weights of a checkpoint in DIRECTORY to OUT, as safetensors that plain torch and transformers load.

    fp32 weights are the masters; bf16 and fp16 weights are the masters rounded, as in training. Memory does not grow
    with the model. Weights of another model in OUT are replaced only with --force.

    --like names the directory of a transformers model. OUT then gets that model's config, tokenizer and names of
    weights, so that from_pretrained(OUT) works.
    """
    import torch

    from tiered_zero.checkpoint.tag import find_checkpoint, open_reader
    from tiered_zero.checkpoint.weights import copy_config, list_weights, named_as_in, write_weights

    found = find_checkpoint(directory, tag)
    for line in found.lines:
        click.echo(printable(line), err=True)
    with open_reader(found) as reader:
        info = reader.manifest
        weights = list_weights(reader, getattr(torch, DTYPES[dtype]))
        if like is not None:
            if out.exists() and out.samefile(like):
                raise click.UsageError("OUT and --like are one directory. Name another OUT.")
            weights = named_as_in(like, weights, {*info.aliases, *info.aliases.values()})
        paths = write_weights(out, weights, max_shard_nbytes=max_shard_size, replaces=force)
        if like is not None:
            paths += copy_config(like, out, DTYPES[dtype])
    nbytes = sum(path.stat().st_size for path in paths)
    if as_json:
        files = [str(path) for path in paths]
        return print_json({"tag": info.tag, "step": info.step, "dtype": dtype, "files": files, "nbytes": nbytes})
    what = f"{len(paths)} file{'s' * (len(paths) > 1)}, {format_nbytes(nbytes)}, parameters in {dtype}"
    click.echo(printable(f"{info.tag} (step {info.step}) -> {out}: {what}"))


@checkpoint.command("prune", short_help="Remove old checkpoints.")
@directory_argument
@JSON_OPTION
@click.option("--keep", type=click.IntRange(min=1), required=True, metavar="N", help="How many whole ones stay.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune_command(directory: Path, as_json: bool, keep: int, dry_run: bool) -> None:
    """Remove all whole checkpoints in DIRECTORY except the newest N and the one that the file `latest` names.

    Also removes an in-place commit's tag if the run has committed again since; such a tag is not one of the N. Swap
    directories and damaged checkpoints stay: `ls` lists them.
    """
    from tiered_zero.checkpoint.tag import prune

    removed = prune(directory, keep, dry_run=dry_run)
    nbytes = sum(info.nbytes for info in removed)
    if as_json:
        return print_json({"dry_run": dry_run, "freed_nbytes": nbytes, "removed": removed})
    rows = [(info.tag, str(info.step), format_nbytes(info.nbytes)) for info in removed]
    print_table(("checkpoint", "step", "bytes"), rows, "Nothing to remove.")
    click.echo(f"{format_nbytes(nbytes)} {'would be' if dry_run else 'were'} freed.")


def _state(info: TagInfo) -> Text:
    if info.is_superseded:
        return Text("superseded", "yellow")
    return Text("whole", "green") if info.complete else Text("not whole", "red")


def _tags(directory: Path) -> list[TagInfo]:
    """Return the tags in `directory`, oldest first. If it is itself a checkpoint, return only its tag."""
    from tiered_zero.checkpoint.index import MANIFEST_NAME
    from tiered_zero.checkpoint.tag import list_tags, look_at

    is_one = (directory / MANIFEST_NAME).exists()
    return [look_at(Path(os.path.realpath(directory)))[0]] if is_one else list_tags(directory)


def _swap_directory(directory: Path) -> list[TagInfo]:
    """Return a list with the run's commit as a tag, if `directory` is a run's swap directory; else return []."""
    from tiered_zero.checkpoint.tag import TagInfo
    from tiered_zero.record.directory import OWNER_NAME
    from tiered_zero.record.files import disk_nbytes, open_directory

    path = Path(os.path.realpath(directory))
    if not (path / OWNER_NAME).exists():
        return []
    with open_directory(path) as fd:
        nbytes = disk_nbytes(fd)
    return [TagInfo(tag=path.name, path=path, kind="in_place", nbytes=nbytes, complete=True)]


def _latest(directory: Path) -> str | None:
    from tiered_zero.checkpoint.tag import read_latest

    try:
        return read_latest(directory)
    except StoreError as error:
        click.echo(printable(str(error)), err=True)
        return None


def _writer(info: TagInfo) -> str:
    written = info.written_by
    if written is None:
        return ""
    return (
        f"tiered_zero {written.tiered_zero}, torch {written.torch}; {written.rule} on {written.kernel}, state "
        f"{written.state_format}"
    )
