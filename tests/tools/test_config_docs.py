"""docs/config.md is what the schema says, and docs/reference.md what the commands and errors say."""

import subprocess
import sys
from pathlib import Path

from tiered_zero.config.deepspeed_keys import table
from tiered_zero.config.schema import Config

ROOT = Path(__file__).parents[2]


def test_the_pages_are_current_and_the_config_has_every_key() -> None:
    tool = [sys.executable, str(ROOT / "tools" / "config_docs.py"), "--check"]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert all(f"`{path}`" in page for path in table(Config))
