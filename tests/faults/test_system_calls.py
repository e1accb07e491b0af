"""System calls that fail under the real engines while a model trains: mended where they can be, else raised in time."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.conftest import ROOT
from tests.faults.run_faulty_libc import MENDED, RAISED, policies_of
from tests.support.native_build import DIRECT_IO_SOURCE, compile_shared

ENGINES = ("native", "aiofiles")
Outcomes = dict[tuple[str, str, str], str]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """(engine, case, policy) -> what came of it."""
    built = tmp_path_factory.mktemp("native")
    compile_shared(DIRECT_IO_SOURCE, built / "_direct_io.so")
    library = compile_shared(ROOT / "tests/io/faulty_libc.c", built / "faulty_libc.so", "-ldl")
    settings = {"LD_PRELOAD": str(library), "TIERED_ZERO_NATIVE_DIR": str(built)}
    command = [
        sys.executable,
        str(ROOT / "tests/faults/run_faulty_libc.py"),
        str(tmp_path_factory.mktemp("swap")),
        *ENGINES,
    ]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, done.stdout.splitlines())
    return {(row["engine"], row["case"], row["policy"]): row["came"] for row in rows}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [*MENDED, *RAISED])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_on_failing_system_calls(engine: str, case: str, outcomes: Outcomes) -> None:
    for policy in policies_of(engine, case):
        came = outcomes[engine, case, policy]
        if case in MENDED:
            assert came == "same weights", policy
        else:
            error = "CorruptionError" if "flipped" in case else "TransferError"
            assert came.startswith(f"{error}, raised in "), (policy, came)
            assert "Error" in came.partition("; ")[2] or "those before" in came
