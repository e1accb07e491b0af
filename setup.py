"""The optional C libraries; everything else about the build is in pyproject.toml.

They are plain shared objects that `tiered_zero.native` loads with ctypes: no Python.h, no torch, and no flag for this
machine's instruction set (the kernels choose theirs at run time). Where no C compiler works, the install goes on
without them (`optional`), and the runtime says once what it does instead.
"""

import tempfile
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("tiered_zero/native")
SCRATCH = tempfile.TemporaryDirectory(prefix="tiered_zero-build-")  # no build/ is left in the checkout

setup(
    ext_modules=[
        Extension(
            f"tiered_zero.native._{name}",
            [str(NATIVE / f"{name}.c")],
            depends=[str(header) for header in sorted(NATIVE.glob("*.h"))],
            extra_compile_args=["-O3", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
        for name in ("update", "direct_io")
        if (NATIVE / f"{name}.c").exists()
    ],
    options={"build": {"build_base": SCRATCH.name}},
)
