"""The one command before a change goes in: format, lint, types, the rules of the house, and the API pages.

    python tools/check.py

Runs every check, prints each command and its result, and exits with 1 if any failed. Needs the extras `dev`, `docs` and
`test`. The API pages, made from docstrings, are in build/api afterwards; a warning of their generator is a failure.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHECKS = (
    "-m ruff format --check .",
    "-m ruff check .",
    "-m mypy --strict tiered_zero tools",
    "-m pytest -q tests/test_house_rules.py",
    "-W error -m pdoc --docformat markdown --no-show-source -t tools/api_pages -o build/api "
    "tiered_zero tiered_zero.record tiered_zero.engine.deepspeed_names",
)
"""Arguments of this interpreter."""


def passes(command: str) -> bool:
    """Run one check from the root of the checkout; its own output goes through."""
    print(f"$ python {command}", flush=True)
    start_s = time.perf_counter()
    code = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT).returncode
    print(f"  {'ok' if code == 0 else f'FAILED (exit {code})'} in {time.perf_counter() - start_s:.1f} s\n", flush=True)
    return code == 0


def main() -> int:
    results = {command: passes(command) for command in CHECKS}
    failed = [command for command, good in results.items() if not good]
    print("all checks passed" if not failed else "failed: " + "; ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
