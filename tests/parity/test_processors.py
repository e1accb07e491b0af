"""fp32 equals plain torch whichever code MKL and ATen take: on older processors, or forced by a variable."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.wrong_root import build_wrong_root, plant_root
from tests.parity.on_this_processor import make_optimizer
from tests.support.models import ParityGPT, batch
from tests.support.native_build import ROOT
from tests.support.trainers import assert_parity, train
from tiered_zero.native.update import Flag
from tiered_zero.rules import native_rules

FORCED = [
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
]
"""Each library reads its own variable, so one process takes the oldest code of each, and one that in between."""


@pytest.mark.timeout(600)  # imports of torch beside other load
@pytest.mark.parametrize("forced", FORCED, ids=lambda forced: ", ".join(map("=".join, forced.items())))
def test_forced_code_gives_the_bits_of_plain_torch(forced: dict[str, str], swap_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parity.on_this_processor", str(swap_path)]
    environment = {**os.environ, **forced}
    ran = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert all(found["served"].values()) or found["capability"] not in ("AVX2", "AVX512"), found
    if "ATEN_CPU_CAPABILITY" in forced and found["capability"] in ("DEFAULT", "AVX2", "AVX512"):
        assert found["capability"].lower() == forced["ATEN_CPU_CAPABILITY"], "the variable took effect"


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_a_root_that_is_wrong_in_one_value_of_a_thousand_changes_no_bit(
    name: str, tmp_path: Path, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = plant_root(build_wrong_root(tmp_path), mask=0x7FFFFF, divisor=1000, remainder=7)
    monkeypatch.setattr(native_rules, "find_torch_root", lambda: wrong)
    monkeypatch.setattr(native_rules, "_ROOTS", (Flag.TORCH_ROOT,))
    make = functools.partial(make_optimizer, name)
    assert_parity(ParityGPT, lambda own: train(own, batch, 4), swap_path, [("cpu", "cpu")], make)
