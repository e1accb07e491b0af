"""Child processes test what this process tests: the same package, with the same libraries and threads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tiered_zero
from tests.support.native_build import ROOT
from tiered_zero.native import find_library

CODE = """
import json, torch, tiered_zero, tests.support.models
from tiered_zero.native import find_library
print(json.dumps([tiered_zero.__file__, str(find_library("_update")), torch.get_num_threads()]))
"""


@pytest.mark.parametrize("directory", [ROOT, Path("/")], ids=["checkout", "elsewhere"])
def test_a_child_imports_what_this_process_imports(directory: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=directory, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [tiered_zero.__file__, str(find_library("_update")), torch.get_num_threads()]
