"""Layout and plan are computed in a process that has no torch."""

import subprocess
import sys

CODE = """
import sys

for name in ("torch", "numpy"):
    sys.modules[name] = None
import pkgutil, importlib, tiered_zero, tiered_zero.layout, tiered_zero.plan

for package in (tiered_zero.layout, tiered_zero.plan):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print("imported")
"""


def test_layout_and_plan_import_no_torch() -> None:
    shown = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=300)
    assert (shown.returncode, shown.stdout) == (0, "imported\n"), shown.stderr
