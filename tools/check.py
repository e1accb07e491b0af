"""The one command before a change goes in: format, lint, types, and the rules of the house.

    python tools/check.py

Runs every check, prints each command and its result, and exits with 1 if any failed. Needs the extras `dev` and `test`.
"""

import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CHECKS = (
    "ruff format --check .",
    "ruff check .",
    "mypy --strict tiered_zero",
    "pytest -q tests/test_house_rules.py",
)


def passes(command: str) -> bool:
    """Run one check, as a module of this interpreter, from the root of the checkout; its own output goes through."""
    print(f"$ {command}", flush=True)
    start_s = time.perf_counter()
    code = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT).returncode
    print(f"  {'ok' if code == 0 else f'FAILED (exit {code})'} in {time.perf_counter() - start_s:.1f} s\n", flush=True)
    return code == 0


def main() -> int:
    results = {command: passes(command) for command in CHECKS}
    failed = [command for command, good in results.items() if not good]
    print("all checks passed" if not failed else "failed: " + "; ".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
