"""The group: a missing command breaks nothing, and errors have their exit codes."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from tiered_zero.cli import main as group
from tiered_zero.cli.console import print_table
from tiered_zero.cli.main import COMMANDS, Command, main
from tiered_zero.errors import PlanError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Registers a function as the command `probe`."""

    def register(function) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(group, "probe", click.command("probe")(function), raising=False)
        monkeypatch.setitem(COMMANDS, "probe", Command("tiered_zero.cli.main:probe", "Probe."))

    return register


def test_help_lists_every_command_and_imports_none() -> None:
    code = "import sys; from tiered_zero.cli.main import main; main(['--help'], standalone_mode=False); "
    code += (
        f"print([name for name in sys.modules if name in {[c.target.partition(':')[0] for c in COMMANDS.values()]}])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, registered in COMMANDS.items():
        assert f"  {name} " in shown and registered.summary in " ".join(shown.split())
    assert shown.splitlines()[-1] == "[]"


def test_no_help_imports_torch() -> None:
    """Of every command and subcommand, in one process in which torch cannot be imported."""
    code = """
import sys
import click
from tiered_zero.cli.main import main

class Refusing:
    def find_spec(self, name, *_):
        assert name.partition(".")[0] != "torch", "torch is imported"

def shown(command, path):
    try:
        main([*path, "--help"], standalone_mode=False)
    except click.exceptions.Exit as ended:
        assert ended.exit_code == 0
    for name in getattr(command, "commands", ()) or (command.list_commands(None) if command is main else ()):
        shown(command.get_command(None, name), [*path, name])

sys.meta_path.insert(0, Refusing())
shown(main, [])
print(len(sys.modules))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    *text, num_modules = result.stdout.splitlines()
    assert (
        sum(line.startswith("Usage: ") for line in text) == 1 + len(COMMANDS) + 4 + 4 + 1 + 3
    )  # swap, checkpoint, bench, alias
    assert int(num_modules) < 700, "torch alone is more than a thousand"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_can_be_loaded(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    module, _, attribute = COMMANDS[name].target.partition(":")
    assert getattr(importlib.import_module(module), attribute).name == name


def test_a_command_that_cannot_be_loaded_breaks_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "absent", Command("tiered_zero.cli.absent:absent", "Is not there."))
    assert CliRunner().invoke(main, ["--help"]).exit_code == 0
    result = CliRunner().invoke(main, ["absent"])
    assert result.exit_code == 1
    assert "absent cannot run here: No module named 'tiered_zero.cli.absent'" in result.stderr


def test_an_error_of_ours_is_one_message(command) -> None:  # type: ignore[no-untyped-def]
    def fail() -> None:
        raise PlanError("The plan needs 41.2 GiB; 32.0 GiB is allowed.")

    command(fail)
    result = CliRunner().invoke(main, ["probe"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: The plan needs 41.2 GiB; 32.0 GiB is allowed.\n"


def test_an_error_of_another_family_is_not_hidden(command) -> None:  # type: ignore[no-untyped-def]
    command(lambda: 1 / 0)
    assert isinstance(CliRunner().invoke(main, ["probe"]).exception, ZeroDivisionError)


def test_ctrl_c_is_130(command) -> None:  # type: ignore[no-untyped-def]
    def interrupted() -> None:
        raise KeyboardInterrupt

    command(interrupted)
    result = CliRunner().invoke(main, ["probe"])
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "Interrupted.\n")


def test_a_pipe_gets_whole_lines_and_a_terminal_its_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def widest() -> int:
        print_table(("run", "why"), [("a", "word " * 40)])
        return max(len(line) for line in capsys.readouterr().out.splitlines())

    monkeypatch.delenv("COLUMNS", raising=False)
    assert 200 < widest() < 220
    monkeypatch.setenv("COLUMNS", "60")
    assert widest() <= 60


def test_wrong_usage_is_2() -> None:
    result = CliRunner().invoke(main, ["trian"])
    assert result.exit_code == 2 and "No such command 'trian'. Did you mean 'train'?" in result.stderr


def test_log_lines_go_to_stderr_once_each(command) -> None:  # type: ignore[no-untyped-def]
    def log() -> None:
        logging.getLogger("tiered_zero").info("taken [as it is] %d", 1)
        logging.getLogger("tiered_zero").warning("watch out")
        logging.getLogger("tiered_zero").debug("too much")

    command(log)
    for _ in range(2):
        result = CliRunner().invoke(main, ["probe"])
        assert (result.stdout, result.stderr) == ("", "taken [as it is] 1\nwarning: watch out\n")


def test_ctrl_c_while_commands_are_imported_is_130() -> None:
    code = """
import sys
from tiered_zero import __main__

class Interrupting:
    def find_spec(self, name, *_):
        if name == "rich.console":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
__main__.main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
