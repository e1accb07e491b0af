"""The optional C libraries; everything else about the build is in pyproject.toml.

They are plain shared objects that `tiered_zero.native` loads with ctypes: no Python.h, no torch, and no flag for this
machine's instruction set (the kernels choose theirs at run time). Where no C compiler works, the install goes on
without them (`optional`), and the runtime says once what it does instead.
"""

import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("tiered_zero/native")
SCRATCH = tempfile.TemporaryDirectory(prefix="tiered_zero-build-")  # no build/ is left in the checkout


class AnyPython(bdist_wheel):
    """One wheel of a platform for every Python: the libraries know none of its versions."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlainNames(build_ext):
    """Names without a Python's version, as `tiered_zero.native` looks for them."""

    def get_ext_filename(self, name: str) -> str:
        return name.replace(".", "/") + ".so"


setup(
    cmdclass={"bdist_wheel": AnyPython, "build_ext": PlainNames},
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
