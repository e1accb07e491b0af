"""Update rules whose arithmetic is the native kernel's, with torch's own code where there is no kernel."""

from __future__ import annotations

import ctypes
import itertools
import logging
import time
from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from operator import attrgetter, or_
from typing import Any

import numpy
import torch
from torch.optim import Optimizer

from tiered_zero.errors import ModelError
from tiered_zero.native import find_library, why_missing
from tiered_zero.native.update import ADDRESSES_PER_RUN, Dtype, Flag, Hyper, UpdateKernel
from tiered_zero.rules.packed_runs import batches, packed
from tiered_zero.rules.rule import Run, StateField, UpdateRule
from tiered_zero.rules.state_formats import join_master, round_randomly, split_master
from tiered_zero.rules.torch_bits import choose_root, find_torch_root
from tiered_zero.rules.torch_rule import TorchRule

_LOG = logging.getLogger("tiered_zero")
_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
_MASTER_DTYPES = {torch.float32: Dtype.FLOAT32, torch.int16: Dtype.REMAINDER}
_MOST_STEPS = 2.0**53
"""What a float counts one by one."""

_PROBE_NUMEL = 1 << 21
_TRIAL_NUMELS = (*range(1, 33), 1031)
_NBYTES_PER_ELEMENT = 28
_SLOW_FRACTION = 0.25
_RATES: dict[Hashable, float] = {}  # an engine of a small model would spend half its start on measuring again
_UNFUSED = {"fused": None}
_DTYPE = attrgetter("dtype")
_IS_CPU = attrgetter("is_cpu")
_MASTER, _GRAD = attrgetter("master"), attrgetter("grad")
_torch_bits: dict[Hashable, bool] = {}
"""Whether a rule on a kernel has torch's bits: found once per process."""

_ROUNDS_OTHERWISE = (
    "The native kernel rounds otherwise than this torch does on this processor, so fp32 gradients take torch's own "
    "operations, which are several times slower."
)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Runs of one param group, phase, scale and set of dtypes. The table holds the address of `hyper`."""

    runs: list[Run]
    table: numpy.ndarray[Any, Any]
    hyper: Hyper
    scalars: dict[str, Any]


class NativeRule(UpdateRule):
    """An elementwise rule on the native kernel. Runs on the CPU go there in one call, all others through torch.

    A run's master is fp32, or, where the rule has an `unsigned_field`, the int16 remainders of its bf16 `out`
    ([Note: bf16 and remainder]). State arrays are fp32, or bf16 with stochastic rounding, which is lossy. The scalars
    are those of TorchRule, with plain numbers for 0-d tensors.
    """

    elementwise = True
    _class: type[Optimizer]
    _takes_root = False
    _counts_steps = True
    _variants: Sequence[Mapping[str, Any]] = ()
    """Hyper keys that, one set after another over the defaults, bring every operation that the rule has."""

    def __init__(self, kernel: UpdateKernel | None, state_dtype: torch.dtype = torch.float32, **options: Any) -> None:
        """`kernel`: None for torch alone. `options`: of the class, for what a run's hyper lacks.

        Raises ModelError for a state dtype other than float32 and bfloat16.
        """
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"Optimizer state in float32 or bfloat16 was expected; found {state_dtype}.")
        self.kernel = kernel
        self.state_dtype = state_dtype
        self._reference = TorchRule(self._class, options)
        self.name, self.temporaries = self._reference.name, self._reference.temporaries
        self._defaults = self._reference.defaults
        self._root_flag = Flag(0)
        self.torch_bits = kernel is None or self._find_torch_bits()

    @abstractmethod
    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the state arrays in the kernel's order."""

    @abstractmethod
    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        """Compute one step's factors, in double as torch does. The caller fills in dtypes and scale."""

    def _phase(self, scalars: Mapping[str, Any]) -> float:
        """Return what a run's next step depends on of its scalars: the steps taken, for all rules that count them."""
        return float(scalars.get("step", 0))

    def _next_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": self._phase(scalars) + 1}

    def _torch_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Convert scalars to those of TorchRule."""
        return {"step": torch.tensor(self._phase(scalars))} if self._counts_steps else dict(scalars)

    def _reference_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Give the scalars from which torch's own code takes this rule's next step."""
        return self._torch_scalars(scalars)

    def _own_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Invert `_torch_scalars`."""
        return {"step": float(scalars["step"])} if self._counts_steps else dict(scalars)

    def load_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Take what a checkpoint keeps, of this rule or of torch's own code."""
        own = self._own_scalars(scalars)
        if self._counts_steps and not 0 <= own["step"] <= _MOST_STEPS:
            raise ValueError(f"expected a number of steps; found {own['step']}")
        return own

    def _completed(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Complete a param group's values by the class's own; torch's fused code is never taken."""
        return {**self._defaults, **hyper, **_UNFUSED}

    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        names = self._array_names(self._completed(hyper))
        return [StateField(name=name, shape=shape, dtype=self.state_dtype) for name in names]

    def first_state(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> dict[str, Any]:
        return self._reference.first_state(shape, self._completed(hyper))

    def export_state(self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> dict[str, Any]:
        floats = {name: array.float() for name, array in state.items()}
        return self._reference.export_state(floats, self._torch_scalars(scalars)) if scalars else {}

    def check_state(self, values: Mapping[str, Any], shape: tuple[int, ...], hyper: Mapping[str, Any]) -> None:
        self._reference.check_state(values, shape, self._completed(hyper))

    def import_state(
        self, values: Mapping[str, Any], state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]
    ) -> dict[str, Any]:
        return self._own_scalars(self._reference.import_state(values, state, self._completed(hyper)))

    def update(self, runs: Sequence[Run]) -> None:
        """Take one step on every run. Raises ModelError, with nothing written, for a run that breaks the contract."""
        alike: dict[Hashable, list[Run]] = {}
        for run in runs:
            alike.setdefault(self.kind_of(run), []).append(run)
        tables = [self._pack(group) for group in alike.values() if self._runs_natively(group[0])]
        if tables and self.kernel:
            table = numpy.concatenate([batch.table for batch in tables])
            self.kernel.update(table.ctypes.data, len(table))
        for batch in tables:
            for run in batch.runs:
                run.scalars = dict(batch.scalars)
        for group in alike.values():
            if not self._runs_natively(group[0]):
                self._update_by_torch(group)

    def kind_of(self, run: Run) -> Hashable:
        """Return what runs have in common that are stepped by the same numbers."""
        dtypes = run.master.dtype, run.grad.dtype, None if run.out is None else run.out.dtype
        return id(run.hyper), self._phase(run.scalars), run.grad_scale, run.master.is_cpu, run.grad.is_cpu, dtypes

    def report(self) -> dict[str, Any]:
        """Report what runs the update: backend, isa, threads, elements a second (with bf16 gradients), whether the
        kernel has torch's bits on fp32 gradients, and why it is not used, for all gradients or for those.
        """
        kernel = self.kernel
        return {
            "algorithm": self.name,
            "backend": "native" if kernel else "torch",
            "isa": kernel.level if kernel else torch.backends.cpu.get_cpu_capability().lower(),
            "threads": kernel.num_threads if kernel else torch.get_num_threads(),
            "params_per_s": self.measure_rate(),
            "torch_bits": self.torch_bits,
            "reason": missing_kernel() if not kernel else None if self.torch_bits else _ROUNDS_OTHERWISE,
        }

    def announce(self) -> None:
        """Log what runs the update; a warning if that is a fallback, or slow."""
        report = self.report()
        where = f"{report['isa']}, {report['threads']} threads, {report['params_per_s'] / 1e9:.3g} G parameters/s"
        if not self.kernel:
            _LOG.warning("%s runs on torch's own operations (%s). %s", self.name, where, missing_kernel())
            return
        _LOG.info("%s runs on the native kernel (%s).", self.name, where)
        if not self.torch_bits:
            _LOG.warning("%s: %s", self.name, _ROUNDS_OTHERWISE)
        if report["params_per_s"] * _NBYTES_PER_ELEMENT < _SLOW_FRACTION * measure_copy_rate():
            _LOG.warning(
                "%s reaches less than a quarter of this machine's memory rate (%s). See that no low level is forced "
                "(TIERED_ZERO_UPDATE_LEVEL), that the process may use more cores, and that no other keeps them busy.",
                self.name,
                where,
            )

    def measure_rate(self) -> float:
        """Measure elements a second with bf16 gradients and parameters, once in a process for all rules alike."""
        kernel = self.kernel
        threads = kernel.num_threads if kernel else torch.get_num_threads()
        key = self.name, self.state_dtype, kernel and kernel.level, threads
        if key not in _RATES:
            values = torch.arange(1, _PROBE_NUMEL + 1, dtype=torch.float32).mul_(0.618034).frac_()
            grad = values.flip(0).sub_(0.5).to(torch.bfloat16)
            state = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in self.state_fields((_PROBE_NUMEL,), {})}
            run = Run(
                master=values, grad=grad, state=state, scalars={}, hyper=self._defaults, out=torch.zeros_like(grad)
            )
            self.init_state(state, self._defaults)
            self.update([run])
            start_s = time.perf_counter()
            self.update([run])
            _RATES[key] = _PROBE_NUMEL / (time.perf_counter() - start_s)
        return _RATES[key]

    def close(self) -> None:
        """End the kernel's threads."""
        if self.kernel:
            self.kernel.close()

    def _runs_natively(self, run: Run) -> bool:
        if self.kernel is None or not run.master.is_cpu or not run.grad.is_cpu:
            return False
        return self.torch_bits or run.grad.dtype is not torch.float32

    def _pack(self, runs: list[Run]) -> _Batch:
        """Check and lay out alike runs. Column by column: of 10,000 small ones each microsecond counts."""
        first = runs[0]
        values = self._completed(first.hyper)
        hyper = self._kernel_hyper(values, first.scalars)
        try:
            hyper.grad_type, hyper.master_type = _DTYPES[first.grad.dtype], _MASTER_DTYPES[first.master.dtype]
            hyper.out_type = Dtype.FLOAT32 if first.out is None else _DTYPES[first.out.dtype]
        except KeyError:
            raise _misfit(runs) from None
        names = self._array_names(values)
        self._reference.refuse_unplanned(set(names) - first.state.keys(), first.state)
        states = [[run.state[name] for run in runs] for name in names]
        hyper.state_type, hyper.grad_scale = _DTYPES[self.state_dtype], first.grad_scale
        if first.grad.dtype is torch.float32:
            hyper.flags |= self._root_flag

        outs = [run.out for run in runs if run.out is not None]
        columns = [list(map(_MASTER, runs)), list(map(_GRAD, runs)), outs, *states]
        numels = list(map(torch.Tensor.numel, columns[0]))
        lengths = [list(map(torch.Tensor.numel, column)) for column in columns if column]
        if (
            any(map(numels.__ne__, lengths))
            or not all(map(torch.Tensor.is_contiguous, itertools.chain(*columns)))
            or not all(map(_IS_CPU, itertools.chain(outs, *states)))
            or not set(map(_DTYPE, itertools.chain(*states))) <= {self.state_dtype}
            or (hyper.master_type == Dtype.REMAINDER and not (outs and hyper.out_type == Dtype.BFLOAT16))
            or (hyper.master_type == Dtype.REMAINDER and self.unsigned_field is None)
        ):
            raise _misfit(runs)

        table = numpy.zeros((len(runs), ADDRESSES_PER_RUN), numpy.uint64)
        for index, column in enumerate(columns):
            if column:
                table[:, index] = list(map(torch.Tensor.data_ptr, column))
        table[:, -2] = numels
        table[:, -1] = ctypes.addressof(hyper)
        return _Batch(runs=runs, table=table, hyper=hyper, scalars=self._next_scalars(values, first.scalars))

    def _update_by_torch(self, runs: Sequence[Run]) -> None:
        """Step alike runs by torch's own code. TorchRule cuts plain fp32 runs itself, and takes them together on a
        device; other formats pass through fp32 copies of chunks."""
        first = runs[0]
        hyper = self._completed(first.hyper)
        self._reference.refuse_unplanned(set(self._array_names(hyper)) - first.state.keys(), first.state)
        scalars = self._reference_scalars(hyper, first.scalars)
        if first.master.dtype is not torch.int16 and self.state_dtype is torch.float32:
            self._reference.update([replace(run, scalars=scalars, hyper=hyper) for run in runs])
        else:
            for batch in batches(runs):
                with packed(batch) as kept:
                    self._update_copies(kept, hyper, scalars)
        for run in runs:
            run.scalars = self._next_scalars(hyper, run.scalars)

    def _update_copies(self, kept: Run, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Step a run of another format by copies of all of it."""
        joined, lossy = kept.master.dtype is torch.int16, self.state_dtype is not torch.float32
        seed = self._kernel_hyper(hyper, kept.scalars).seed
        state = {name: array.float() for name, array in kept.state.items()}
        floats = replace(kept, state=state, scalars=dict(scalars), hyper=hyper)
        if joined:
            marked = kept.state[self.unsigned_field or ""]
            assert kept.out is not None, "remainders come with their parameters"
            floats.master, floats.out = join_master(kept.out, kept.master, marked.signbit()), None
            state[self.unsigned_field or ""] = marked.float().abs()
        self._reference.update([floats])
        for which, name in enumerate(self._array_names(hyper)):
            if lossy:
                kept.state[name].copy_(round_randomly(state[name], seed + which))
            elif joined:
                kept.state[name].copy_(state[name])
        if joined and kept.out is not None:
            *halves, mark = split_master(floats.master)
            for target, half in zip((kept.out, kept.master), halves, strict=True):
                target.copy_(half)
            marked.copy_(torch.where(mark, -marked.abs(), marked.abs()))

    def _find_torch_bits(self) -> bool:
        """Find whether fp32 gradients give torch's bits, and with which square root: see [Note: bits of torch]."""
        kernel = self.kernel
        root_flag = choose_root(kernel) if kernel and self._takes_root else Flag(0)
        if kernel is None or root_flag is None:
            return False
        self._root_flag = root_flag
        key = self.name, self.state_dtype, kernel.path, kernel.level, kernel.root
        if key not in _torch_bits:
            self.torch_bits = True  # else update() would not take the kernel
            _torch_bits[key] = all(self._steps_agree(self._completed(hyper)) for hyper in ({}, *self._variants))
        return _torch_bits[key]

    def _steps_agree(self, hyper: Mapping[str, Any]) -> bool:
        """Compare one step of the kernel and of torch, from a state without zeros: do they fuse the same operations?

        Operations that are fused in one of them alone change a tenth of all elements or more. The lengths meet every
        remainder behind ATen's vectors, where its code is compiled apart.
        """
        ours, theirs = self._trial_runs(hyper), self._trial_runs(hyper)
        self.update(ours)
        self._update_by_torch(theirs)
        return all(
            torch.equal(own.master, other.master)
            and all(torch.equal(array, other.state[name]) for name, array in own.state.items())
            for own, other in zip(ours, theirs, strict=True)
        )

    def _trial_runs(self, hyper: Mapping[str, Any]) -> list[Run]:
        """Make runs of all trial lengths, with the same random values at each call."""
        generator = torch.Generator().manual_seed(0)
        numel = sum(_TRIAL_NUMELS)
        values = torch.randn(2, numel, generator=generator, dtype=torch.float32, device="cpu")
        masters, grads = (row.split_with_sizes(_TRIAL_NUMELS) for row in values)
        scalars = self._next_scalars(hyper, {})
        runs = [
            Run(master=master, grad=grad, state={}, scalars=dict(scalars), hyper=hyper)
            for master, grad in zip(masters, grads, strict=True)
        ]
        for field in self.state_fields((numel,), hyper):
            array = torch.rand(numel, generator=generator, dtype=torch.float32, device="cpu").to(field.dtype)
            for run, part in zip(runs, array.split_with_sizes(_TRIAL_NUMELS), strict=True):
                run.state[field.name] = part
        return runs


def open_kernel(level: str | None = None, num_threads: int | None = None) -> UpdateKernel | None:
    """Open the kernel with torch's square root; None if it was not built. Raises ConfigError for a level that this
    machine does not run."""
    path = find_library("_update")
    return None if path is None else UpdateKernel(path, level, num_threads, find_torch_root())


def missing_kernel() -> str:
    """Say why there is no kernel, and what to do about it."""
    reason, fix = why_missing("_update")
    return f"The native library _update is missing: {reason}. To have it: {fix}."


def flags_of(**chosen: Any) -> Flag:
    """Join the flags whose value is true."""
    return reduce(or_, (Flag[name] for name, is_set in chosen.items() if is_set), Flag(0))


@cache
def measure_copy_rate(nbytes: int = 1 << 25) -> float:
    """Measure the bytes that one large copy on the CPU reads and writes a second, once in a process."""
    source, target = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    start_s = time.perf_counter()
    target.copy_(source)
    return 2 * nbytes / (time.perf_counter() - start_s)


def _misfit(runs: Sequence[Run]) -> ModelError:
    """Show the first run whose parts differ in length or layout, else the first of all: then a dtype is at fault."""

    def parts(run: Run) -> dict[str, torch.Tensor]:
        return {"master": run.master, "grad": run.grad, **run.state, **({} if run.out is None else {"out": run.out})}

    def uneven(run: Run) -> bool:
        return any(t.shape != run.master.shape or not t.is_contiguous() or not t.is_cpu for t in parts(run).values())

    found = ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
        for name, tensor in parts(next(filter(uneven, runs), runs[0])).items()
    )
    return ModelError(
        "A run was expected to be contiguous arrays of one length in host memory: master float32 (or int16 with a "
        f"bfloat16 out), grad and out float32, bfloat16 or float16, and state as `state_fields` says; found {found}."
    )
