"""Update rules whose arithmetic is the native kernel's, with torch's own code where there is no kernel.

[Note: bits of torch] On fp32 gradients the kernel gives, element by element, the bits of the torch optimizer's for-loop and
foreach forms: the same operations in the same order, with fused multiply-add exactly where ATen's AVX2 and AVX-512 code
has it. One operation is no IEEE one: torch takes fp32 square roots from MKL where it was built with it, and those differ
from the exact root by one unit in the last place in a fifth of all cases (and by processor). So the kernel calls the same
MKL function (VMSSQRT_, exported by libtorch_cpu) for fp32 gradients. With 16-bit gradients it uses the exact root, which
costs a third less time where cores are few; no promise of torch's bits exists there, only of equality between placements.
Whether the bits agree on this machine, with this torch, is tried when a rule is made. Where they do not (a processor
without FMA, a build without that symbol), fp32 gradients take torch's own code, and the report says so.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from abc import abstractmethod
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tiered_zero.errors import ModelError
from tiered_zero.native import find_library
from tiered_zero.native.update import Dtype, Flag, Hyper, UpdateKernel
from tiered_zero.optim.remainder import join_master, split_master
from tiered_zero.optim.rule import Run, StateField, UpdateRule
from tiered_zero.optim.torch_rule import TorchRule

_LOG = logging.getLogger("tiered_zero")
_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
_MASTER_DTYPES = {torch.float32: Dtype.FLOAT32, torch.int16: Dtype.REMAINDER}
_CHUNK_NUMEL = 1 << 17
_PROBE_NUMEL = 1 << 21
_SLOW_FRACTION = 0.25


class NativeRule(UpdateRule):
    """An elementwise rule on the native kernel. Runs on the CPU go there in one call, all others through torch.

    A run's master is fp32, or the int16 remainders of its bf16 `out` (remainder.py). State arrays are fp32, or bf16
    with stochastic rounding, which is lossy. The scalars are those of TorchRule, with plain numbers for 0-d tensors.
    """

    elementwise = True

    def __init__(
        self,
        reference: TorchRule,
        defaults: Mapping[str, Any],
        kernel: UpdateKernel | None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`defaults`: for what a run's hyper lacks. `kernel`: None for torch alone.

        Raises ModelError for a state dtype other than float32 and bfloat16.
        """
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"Optimizer state in float32 or bfloat16 was expected; found {state_dtype}.")
        self.name = reference.name
        self.state_dtype = state_dtype
        self._reference = reference
        self._defaults = dict(defaults)
        self._kernel = kernel
        self._root_flag = Flag(0)
        self.torch_bits = kernel is not None and self._find_torch_bits(kernel)
        self._rate: float | None = None

    @abstractmethod
    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The state arrays, in the kernel's order."""

    @abstractmethod
    def _phase(self, scalars: Mapping[str, Any]) -> Hashable:
        """All of a run's scalars that its next step depends on."""

    @abstractmethod
    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        """One step's factors, computed in double as torch does. The dtypes and the scale are filled in afterwards."""

    @abstractmethod
    def _next_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]: ...

    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        names = self._array_names({**self._defaults, **hyper})
        return [StateField(name, shape, self.state_dtype) for name in names]

    def init_state(self, run: Run) -> None:
        """Zeros."""

    def update(self, runs: Sequence[Run]) -> None:
        """One step on every run. Raises ModelError, with nothing written, for a run that does not fit the contract."""
        alike: dict[Hashable, list[Run]] = {}
        for run in runs:
            dtypes = run.master.dtype, run.grad.dtype, None if run.out is None else run.out.dtype
            key = id(run.hyper), self._phase(run.scalars), run.grad_scale, run.master.is_cpu, run.grad.is_cpu, dtypes
            alike.setdefault(key, []).append(run)
        batches = [self._pack(group) for group in alike.values() if self._runs_natively(group[0])]
        if batches:
            assert self._kernel is not None
            table = numpy.concatenate([batch.table for batch in batches])
            self._kernel.update(table.ctypes.data, len(table))
        for batch in batches:
            for run in batch.runs:
                run.scalars = dict(batch.scalars)
        for group in alike.values():
            if not self._runs_natively(group[0]):
                for run in group:
                    self._update_by_torch(run)

    def report(self) -> dict[str, Any]:
        """What runs the update: backend, isa, threads, elements a second (measured once, with bf16 gradients), whether
        the bits are torch's on fp32 gradients, and why the kernel is not used if it is not."""
        native = self._kernel is not None
        return {
            "backend": "native" if native else "torch",
            "isa": self._kernel.level if self._kernel else torch.backends.cpu.get_cpu_capability().lower(),
            "threads": self._kernel.num_threads if self._kernel else torch.get_num_threads(),
            "params_per_s": self.measure_rate(),
            "torch_bits": self.torch_bits or not native,
            "reason": None if native else missing_reason(),
        }

    def announce(self) -> None:
        """Log once what runs the update; a warning where that is the fallback or slow."""
        report = self.report()
        rate = f"{report['params_per_s'] / 1e9:.3g} G parameters/s"
        where = f"{report['isa']}, {report['threads']} threads, {rate}"
        if not self._kernel:
            _LOG.warning("%s runs on torch's own operations (%s). %s", self.name, where, report["reason"])
            return
        _LOG.info("%s runs on the native kernel (%s).", self.name, where)
        if not self.torch_bits:
            _LOG.warning(
                "%s: the native kernel rounds otherwise than this torch on this processor; fp32 gradients take torch's "
                "own operations, which are several times slower.",
                self.name,
            )
        if report["params_per_s"] * 28 < _SLOW_FRACTION * measure_copy_bytes_per_s():
            _LOG.warning(
                "%s reaches less than a quarter of this machine's memory rate at level %s with %d threads. See that no "
                "lower level is forced (TIERED_ZERO_UPDATE_LEVEL) and that the process may use more cores.",
                self.name,
                report["isa"],
                report["threads"],
            )

    def measure_rate(self) -> float:
        """Elements a second with bf16 gradients and parameters; measured at the first call."""
        if self._rate is None:
            run = self._example_run(_PROBE_NUMEL, torch.bfloat16)
            run.out = torch.zeros(_PROBE_NUMEL, dtype=torch.bfloat16)
            self.update([run])
            start_s = time.perf_counter()
            self.update([run])
            self._rate = _PROBE_NUMEL / (time.perf_counter() - start_s)
        return self._rate

    def close(self) -> None:
        """End the kernel's threads."""
        if self._kernel:
            self._kernel.close()

    def _runs_natively(self, run: Run) -> bool:
        if self._kernel is None or not run.master.is_cpu or not run.grad.is_cpu:
            return False
        return self.torch_bits or run.grad.dtype is not torch.float32 or self.state_dtype is not torch.float32

    def _pack(self, runs: list[Run]) -> _Batch:
        """`runs` share param group, phase, scale and dtypes. Column by column: of 10,000 runs each microsecond counts."""
        first = runs[0]
        values = {**self._defaults, **first.hyper}
        hyper = self._kernel_hyper(values, first.scalars)
        table = numpy.zeros((len(runs), ADDRESSES_PER_RUN), numpy.uint64)
        try:
            out_dtype = torch.float32 if first.out is None else first.out.dtype
            hyper.grad_type, hyper.out_type = _DTYPES[first.grad.dtype], _DTYPES[out_dtype]
            hyper.master_type, hyper.state_type = _MASTER_DTYPES[first.master.dtype], _DTYPES[self.state_dtype]
            states = [[run.state[name] for run in runs] for name in self._array_names(values)]
        except KeyError as error:
            raise _misshapen(first) from error
        hyper.grad_scale = first.grad_scale
        if first.grad.dtype is torch.float32:
            hyper.flags |= self._root_flag
        outs = [run.out for run in runs if run.out is not None]
        columns = [[run.master for run in runs], [run.grad for run in runs], outs, *states]
        lengths = list(map(torch.Tensor.numel, columns[0]))
        for index, column in enumerate(columns):
            if not column and index == _OUT and hyper.master_type != Dtype.REMAINDER:
                continue
            if list(map(torch.Tensor.numel, column)) != lengths or not all(map(torch.Tensor.is_contiguous, column)):
                raise _misshapen(first, *runs[1:])
            if index >= _OUT and not all(map(_IS_CPU, column)):
                raise _misshapen(*runs)
            table[:, index] = list(map(torch.Tensor.data_ptr, column))
        if any(not set(map(_DTYPE, column)) <= {self.state_dtype} for column in states):
            raise _misshapen(*runs)
        table[:, -2:] = numpy.array([lengths, [ctypes.addressof(hyper)] * len(runs)]).T
        return _Batch(runs, table, hyper, self._next_scalars(values, first.scalars))

    def _update_by_torch(self, run: Run) -> None:
        """Torch's own code, in chunks whose temporaries stay in cache."""
        size = _CHUNK_NUMEL if run.master.device.type == "cpu" else run.master.numel()
        hyper = {**self._defaults, **run.hyper}
        scalars = {name: torch.tensor(v) if isinstance(v, float) else v for name, v in run.scalars.items()}
        lossy = self.state_dtype is not torch.float32
        for start in range(0, run.master.numel(), size):
            part = slice(start, start + size)
            out = None if run.out is None else run.out[part]
            master = run.master[part]
            split = master.dtype is torch.int16
            state = {name: value[part].float() if lossy else value[part] for name, value in run.state.items()}
            step = Run(master, run.grad[part], state, dict(scalars), hyper, out, run.grad_scale)
            if split and out is not None:
                step = replace(step, master=join_master(out, master), out=None)
            self._reference.update([step])
            if split and out is not None:
                parameter, remainder = split_master(step.master)
                out.copy_(parameter)
                master.copy_(remainder)
            if lossy:
                for name, value in state.items():
                    run.state[name][part].copy_(value)
        run.scalars = self._next_scalars(hyper, run.scalars)

    def _find_torch_bits(self, kernel: UpdateKernel) -> bool:
        """Three steps beside torch's own, on a thousand elements; sets the square root that agrees."""
        for flag in (Flag(0), Flag.TORCH_ROOT) if kernel.root else (Flag(0),):
            self._root_flag, self.torch_bits = flag, True
            ours, theirs = self._example_run(1031, torch.float32), self._example_run(1031, torch.float32)
            for _ in range(3):
                self.update([ours])
                self._update_by_torch(theirs)
            if torch.equal(ours.master, theirs.master):
                return True
        self._root_flag = Flag(0)
        return False

    def _example_run(self, numel: int, grad_dtype: torch.dtype) -> Run:
        values = torch.linspace(0.01, 1.0, numel).frac_()
        hyper = dict(self._defaults)
        state = {field.name: torch.zeros(numel, dtype=field.dtype) for field in self.state_fields((numel,), hyper)}
        return Run(values.clone(), values.square().to(grad_dtype), state, {}, hyper)


def open_kernel(level: str | None = None, num_threads: int | None = None) -> UpdateKernel | None:
    """The kernel with torch's square root, or None where it was not built. Raises ConfigError for a level that this
    machine does not run."""
    path = find_library("_update")
    return None if path is None else UpdateKernel(path, level, num_threads, torch_root())


def missing_reason() -> str:
    return (
        "The native library _update is missing: no C compiler worked when tiered_zero was installed. Install one (gcc or "
        "clang) and reinstall tiered_zero."
    )


def torch_root() -> int | None:
    """Address of the MKL square root that torch uses, if this torch has one."""
    torch.ones(1).sqrt()  # MKL picks its kernel in the first call and must not be raced there (pytorch#188792)
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(library.VMSSQRT_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def measure_copy_bytes_per_s(nbytes: int = 1 << 25) -> float:
    """Bytes read and written a second by one large copy on the CPU."""
    source = torch.zeros(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    start_s = time.perf_counter()
    target.copy_(source)
    return 2 * nbytes / (time.perf_counter() - start_s)


def _misshapen(run: Run) -> ModelError:
    def describe(tensor: torch.Tensor | None) -> str:
        return "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"

    state = {name: describe(tensor) for name, tensor in run.state.items()}
    return ModelError(
        "A run of contiguous arrays of one length was expected: master float32 (or int16 beside a bfloat16 out), grad and "
        f"out float32, bfloat16 or float16; found master {describe(run.master)}, grad {describe(run.grad)}, out "
        f"{describe(run.out)}, state {state}."
    )
