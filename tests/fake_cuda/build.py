"""Compiles the fake CUDA runtime, against the headers that the wheels of a CUDA build of torch bring."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import torch

SOURCES = Path(__file__).resolve().parent / "runtime"
LIBRARIES = {
    "libfake_cuda.so": ("common.cpp", "memory.cpp", "streams.cpp", "device.cpp", "cublas.cpp"),
    "libcuda.so.1": ("driver.cpp",),
    "libnvidia-ml.so.1": ("nvml.cpp",),
}
"""The first is loaded before all others; the other two are found by name."""

FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


def why_not() -> str:
    """Why the runtime cannot be built or used here; "" where it can."""
    if torch.version.cuda is None:
        return (
            f"this torch ({torch.__version__}) has no CUDA: install the build for CUDA 13 in an environment of its "
            "own (torch 2.11 to 2.14, with its nvidia packages), and choose these tests there"
        )
    if not torch.version.cuda.startswith("13."):
        return f"the fake runtime has the functions of CUDA 13; this torch ({torch.__version__}) is for another"
    if shutil.which("g++") is None:
        return "the fake CUDA runtime is C++, and there is no g++ on this machine"
    return ""


def build(folder: Path) -> Path:
    """Compile the libraries into `folder`, within seconds, and return it."""
    for name, sources in LIBRARIES.items():
        command = ["g++", *FLAGS, f"-I{SOURCES}", f"-isystem{_headers()}", f"-Wl,-soname,{name}"]
        command += ["-o", str(folder / name), *(str(SOURCES / source) for source in sources)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the fake CUDA runtime does not compile:\n{done.stderr[-4000:]}")
    return folder


def _headers() -> Path:
    """Return the folder of cuda_runtime_api.h."""
    for file in importlib.metadata.files("nvidia-cuda-runtime") or ():
        if file.name == "cuda_runtime_api.h":
            return Path(str(file.locate())).parent
    raise RuntimeError("expected cuda_runtime_api.h in the package nvidia-cuda-runtime, which torch installs")
