"""Define the update rules of Adam, SGD, Adagrad and Lion. They run on the native kernel, or on torch's own code if the
kernel is missing or rounds differently.

[Note: bits of torch] On fp32 gradients the kernel gives the bits of the torch optimizer's for-loop and foreach forms:
the same operations in the same order, with fused multiply-add exactly where ATen's AVX2 and AVX-512 code has it. All
operations are IEEE except the square root. If torch was built with MKL, its root is MKL's: this differs from the exact
root by one unit in the last place for 0 to 20% of all values, depending on the processor. So `choose_root` tests the
kernel's three roots, and takes the first that has torch's bits: the exact root, Newton's, and MKL's own (VMSSQRT_,
exported by libtorch_cpu). MKL's root is six times slower than the exact one. For 16-bit gradients the kernel takes the
exact root, because for them only equality between placements is promised.

Two facts depend on the machine, and are tested before a rule uses the kernel for fp32 gradients: that the root equals
torch's, and that multiplications and additions are fused where the kernel fuses them. If a test fails (ATen without
FMA, another MKL), fp32 gradients take torch's own code, and the log says so.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter, or_
from pathlib import Path
from typing import Any, cast, final

import numpy
import torch
from torch.optim import Optimizer

from tiered_zero.errors import InternalError, ModelError
from tiered_zero.native import find_library, why_missing
from tiered_zero.native.update import (
    ADDRESSES_PER_SLICE,
    Dtype,
    Flag,
    Hyper,
    MklRoot,
    Rule,
    UpdateKernel,
    supported_levels,
)
from tiered_zero.rules.rule import Slice, StateField, UpdateRule, batches, packed
from tiered_zero.rules.state_layout import join_master, round_randomly, split_master
from tiered_zero.rules.torch_rule import ELEMENTWISE, TorchRule

_LOG = logging.getLogger("tiered_zero")
_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.float16: Dtype.FLOAT16}
_MASTER_DTYPES = {torch.float32: Dtype.FLOAT32, torch.int16: Dtype.REMAINDER}
_MOST_STEPS = 2.0**53
"""The largest step count that is accepted: float64 is exact up to this number."""

_TRIAL_NUMELS = (*range(1, 33), 1031)  # every remainder after ATen's vectors: remainders have code of their own
_UNFUSED = {"fused": None}
_DTYPE = attrgetter("dtype")
_IS_CPU = attrgetter("is_cpu")
_MASTER, _GRAD = attrgetter("master"), attrgetter("grad")
_torch_bits: dict[Hashable, bool] = {}
"""Maps (rule, kernel) to whether the kernel's results for fp32 gradients equal torch's in every bit. Each pair is
tested once per process."""

_ROOTS = Flag(0), Flag.NEWTON_ROOT, Flag.TORCH_ROOT
"""The flags for the kernel's ways to compute a square root, fastest first."""

_roots: dict[tuple[Path, str, MklRoot | None], Flag | None] = {}
_ONE = 0x3F800000
_MANTISSAS = 1 << 23
_ROOT_CHUNK_NUMEL = 1 << 18
_BINADE_SAMPLES = 1 << 9
_END_SAMPLES = 1 << 6
_LAST = 1 << 13
_SPECIAL = (0.0, -0.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4028235e38)

_MISFIT = (
    "A slice was expected to be contiguous arrays of one length in host memory: master float32 (or int16 with a "
    "bfloat16 out), grad and out float32, bfloat16 or float16, and state as `state_fields` says."
)
_ROUNDS_OTHERWISE = (
    "The native kernel rounds otherwise than this torch does on this processor, so fp32 gradients take torch's own "
    "operations, which are several times slower."
)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Slices that the kernel steps with the same factors."""

    slices: list[Slice]
    table: numpy.ndarray[Any, Any]  # a row per slice: the addresses of its arrays and of `hyper`
    hyper: Hyper  # the factors
    scalars: dict[str, Any]  # of each slice after the step


class NativeRule(UpdateRule):
    """An elementwise rule whose slices are stepped by the native kernel on the CPU. Torch steps a slice instead if the
    slice is on another device, if there is no kernel, or if the gradient is fp32 and the kernel does not round as torch
    does.

    Masters are fp32, or int16 remainders if the rule has an `unsigned_field` ([Note: bf16 and remainder]). State arrays
    are fp32, or bf16 with stochastic rounding. Scalars are those of TorchRule, with the step count as a plain
    number."""

    elementwise = True
    _class: type[Optimizer]
    _takes_root = False
    _counts_steps = True
    _variants: Sequence[Mapping[str, Any]] = ()
    """Param group values with which the kernel's results are compared with torch's, after the defaults. Together they
    cover every operation of the rule."""

    def __init__(self, kernel: UpdateKernel | None, state_dtype: torch.dtype = torch.float32, **options: Any) -> None:
        """Make the rule, and test whether the kernel gives torch's bits. `kernel`: the native kernel; None: torch makes
        every step. `options`: arguments of the optimizer class, used for values that `Slice.hyper` lacks. Raises
        ModelError for a state dtype other than float32 and bfloat16."""
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ModelError(f"Optimizer state in float32 or bfloat16 was expected; found {state_dtype}.")
        self.kernel = kernel
        self.state_dtype = state_dtype
        self._reference = TorchRule(self._class([torch.zeros(1)], **options))
        self.name, self.temporaries = self._reference.name, self._reference.temporaries
        self._defaults = self._reference.defaults
        self._root_flag = Flag(0)
        self.torch_bits = kernel is None or self._find_torch_bits()

    @abstractmethod
    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the state arrays in the kernel's order."""

    @abstractmethod
    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        """Compute the kernel's factors for one step, in the precision that torch uses: double for plain numbers."""

    def _phase(self, scalars: Mapping[str, Any]) -> float:
        """Return the number of steps made. A rule that does not count steps returns 1 if its state is filled, else
        0."""
        return float(scalars.get("step", 0)) if self._counts_steps else float("initialized" in scalars)

    def _next_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        return {"step": self._phase(scalars) + 1} if self._counts_steps else {"initialized": True}

    def _torch_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Convert this rule's scalars to those of TorchRule."""
        return {"step": torch.tensor(self._phase(scalars))} if self._counts_steps else dict(scalars)

    def _reference_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scalars with which TorchRule's next step equals this rule's next step."""
        return self._torch_scalars(scalars)

    def _own_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the scalars of TorchRule to this rule's: the inverse of `_torch_scalars`."""
        return {"step": float(scalars["step"])} if self._counts_steps else dict(scalars)

    def load_scalars(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a checkpoint's scalars, of this rule or TorchRule, to this rule's. Raises ValueError for an
        impossible step count."""
        own = self._own_scalars(scalars)
        if self._counts_steps and not 0 <= own["step"] <= _MOST_STEPS:
            raise ValueError(f"expected a number of steps; found {own['step']}")
        return own

    def _completed(self, hyper: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a param group. Missing values get the class's defaults, and fused becomes None."""
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

    def update(self, slices: Sequence[Slice]) -> None:
        """Make one step on every slice. Raises InternalError, with nothing written, for arrays whose lengths, dtypes or
        memory the kernel cannot take."""
        alike: dict[Hashable, list[Slice]] = {}
        for part in slices:
            alike.setdefault(self.kind_of(part), []).append(part)
        tables = [self._pack(group) for group in alike.values() if self._steps_natively(group[0])]
        if tables and self.kernel:
            table = numpy.concatenate([batch.table for batch in tables])
            self.kernel.update(table.ctypes.data, len(table))
        for batch in tables:
            for part in batch.slices:
                part.scalars = dict(batch.scalars)
        for group in alike.values():
            if not self._steps_natively(group[0]):
                self._update_by_torch(group)

    def kind_of(self, part: Slice) -> Hashable:
        """Return a key for grouping slices. Slices with equal keys have the same options, step count, gradient scale
        and dtypes, and are stepped together."""
        dtypes = part.master.dtype, part.grad.dtype, None if part.out is None else part.out.dtype
        return id(part.hyper), self._phase(part.scalars), part.grad_scale, part.master.is_cpu, part.grad.is_cpu, dtypes

    def announce(self) -> None:
        """Log that the kernel computes the update, or warn that torch replaces it."""
        if not self.kernel:
            _LOG.warning("%s runs on torch's own operations. %s", self.name, missing_kernel())
            return
        _LOG.info(
            "%s runs on the native kernel (%s, %d threads).", self.name, self.kernel.level, self.kernel.num_threads
        )
        if not self.torch_bits:
            _LOG.warning("%s: %s", self.name, _ROUNDS_OTHERWISE)

    def _steps_natively(self, part: Slice) -> bool:
        if self.kernel is None or not part.master.is_cpu or not part.grad.is_cpu:
            return False
        return self.torch_bits or part.grad.dtype is not torch.float32

    def _pack(self, slices: list[Slice]) -> _Batch:
        """Make a batch for the kernel from `slices`: check their arrays, and write the addresses into a table.
        `kind_of` is equal for all `slices`. Raises InternalError if the kernel cannot take the arrays, and ModelError
        if the step needs state arrays that were not planned."""
        first = slices[0]
        values = self._completed(first.hyper)
        hyper = self._kernel_hyper(values, first.scalars)
        try:
            hyper.grad_type, hyper.master_type = _DTYPES[first.grad.dtype], _MASTER_DTYPES[first.master.dtype]
            hyper.out_type = Dtype.FLOAT32 if first.out is None else _DTYPES[first.out.dtype]
        except KeyError:
            raise InternalError(_MISFIT) from None
        names = self._array_names(values)
        self.refuse_unplanned(names, first.state)
        states = [[part.state[name] for part in slices] for name in names]
        hyper.state_type, hyper.grad_scale = _DTYPES[self.state_dtype], first.grad_scale
        if first.grad.dtype is torch.float32:
            hyper.flags |= self._root_flag

        outs = [part.out for part in slices if part.out is not None]
        # Column by column: with 10,000 small slices each microsecond counts.
        columns = [list(map(_MASTER, slices)), list(map(_GRAD, slices)), outs, *states]
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
            raise InternalError(_MISFIT)

        table = numpy.zeros((len(slices), ADDRESSES_PER_SLICE), numpy.uint64)
        for index, column in enumerate(columns):
            if column:
                table[:, index] = list(map(torch.Tensor.data_ptr, column))
        table[:, -2] = numels
        table[:, -1] = ctypes.addressof(hyper)
        return _Batch(slices=slices, table=table, hyper=hyper, scalars=self._next_scalars(values, first.scalars))

    def _update_by_torch(self, slices: Sequence[Slice]) -> None:
        """Step `slices` with torch's own code instead of the kernel. All slices have the same `kind_of`. If masters or
        state are not fp32, step fp32 copies."""
        first = slices[0]
        hyper = self._completed(first.hyper)
        self.refuse_unplanned(self._array_names(hyper), first.state)
        scalars = self._reference_scalars(hyper, first.scalars)
        if first.master.dtype is not torch.int16 and self.state_dtype is torch.float32:
            self._reference.update([replace(part, scalars=scalars, hyper=hyper) for part in slices])
        else:
            for batch in batches(slices):
                with packed(batch) as kept:
                    self._update_copies(kept, hyper, scalars)
        for part in slices:
            part.scalars = self._next_scalars(hyper, part.scalars)

    def _update_copies(self, kept: Slice, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> None:
        """Make a step on a slice with int16 masters or bf16 state. Convert these arrays to fp32, make the step, and
        convert the results back."""
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
        """Choose the kernel's square root, and return whether the kernel gives torch's bits for fp32 gradients."""
        kernel = self.kernel
        root_flag = choose_root(kernel) if kernel and self._takes_root else Flag(0)
        if kernel is None or root_flag is None:
            return False
        self._root_flag = root_flag
        key = self.name, self.state_dtype, kernel.path, kernel.level, kernel.root
        if key not in _torch_bits:
            self.torch_bits = True  # update() then uses the kernel
            _torch_bits[key] = all(self._steps_agree(self._completed(hyper)) for hyper in ({}, *self._variants))
        return _torch_bits[key]

    def _steps_agree(self, hyper: Mapping[str, Any]) -> bool:
        """Step the same random slices with the kernel and with torch. Return whether all results are equal."""
        ours, theirs = self._trial_slices(hyper), self._trial_slices(hyper)
        self.update(ours)
        self._update_by_torch(theirs)
        # If only one of the two fuses an operation, at least a tenth of all elements differ.
        return all(
            torch.equal(own.master, other.master)
            and all(torch.equal(array, other.state[name]) for name, array in own.state.items())
            for own, other in zip(ours, theirs, strict=True)
        )

    def _trial_slices(self, hyper: Mapping[str, Any]) -> list[Slice]:
        """Make slices of all trial lengths. Every call returns the same random values."""
        generator = torch.Generator().manual_seed(0)
        numel = sum(_TRIAL_NUMELS)
        values = torch.randn(2, numel, generator=generator, dtype=torch.float32, device="cpu")
        masters, grads = (row.split_with_sizes(_TRIAL_NUMELS) for row in values)
        scalars = self._next_scalars(hyper, {})
        slices = [
            Slice(master=master, grad=grad, state={}, scalars=dict(scalars), hyper=hyper)
            for master, grad in zip(masters, grads, strict=True)
        ]
        for field in self.state_fields((numel,), hyper):
            array = torch.rand(numel, generator=generator, dtype=torch.float32, device="cpu").to(field.dtype)
            for part, values in zip(slices, array.split_with_sizes(_TRIAL_NUMELS), strict=True):
                part.state[field.name] = values
        return slices


def open_kernel(num_threads: int | None = None) -> UpdateKernel | None:
    """Open the native kernel, and give it MKL's square root if torch has that. Return None if the kernel was not built,
    or has no code for this processor. `num_threads`: the size of its thread pool; None: as many threads as this process
    may keep busy."""
    path = find_library("_update")
    if path is None or not supported_levels(path):
        return None
    return UpdateKernel(path, num_threads=num_threads, root=find_torch_root())


def missing_kernel() -> str:
    """Return a text that says why there is no native kernel, and how to get it."""
    if find_library("_update"):
        return "The native kernel needs a processor with AVX2 and FMA, or with NEON."
    reason, fix = why_missing("_update")
    return f"The native library _update is missing: {reason}. To have it: {fix}."


def flags_of(**chosen: Any) -> Flag:
    """Combine the kernel's flags whose arguments are true: `flags_of(MAXIMIZE=True, AMSGRAD=False)` is MAXIMIZE."""
    return reduce(or_, (Flag[name] for name, is_set in chosen.items() if is_set), Flag(0))


def find_torch_root() -> MklRoot | None:
    """Return the addresses of the MKL functions for torch's fp32 square root; None if this torch exports none."""
    torch.ones(1, dtype=torch.float32, device="cpu").sqrt()  # MKL's first call must not race (pytorch#188792)
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        functions = library.VMSSQRT_, library.MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None
    square_root, set_threads = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
    return MklRoot(square_root, set_threads)


def choose_root(kernel: UpdateKernel) -> Flag | None:
    """Return the flag of the kernel's fastest square root whose results equal torch's in every bit; None if there is
    none."""
    key = kernel.path, kernel.level, kernel.root
    if key not in _roots:
        candidates = (flag for flag in _ROOTS if kernel.root or flag is not Flag.TORCH_ROOT)
        _roots[key] = next((flag for flag in candidates if _has_torch_bits(kernel, flag)), None)  # about 30 ms
    return _roots[key]


def _has_torch_bits(kernel: UpdateKernel, flag: Flag) -> bool:
    for values in _root_arguments():
        ours = numpy.empty_like(values)
        kernel.square_roots(values.ctypes.data, ours.ctypes.data, values.size, flag)
        theirs = torch.from_numpy(values).sqrt().numpy()
        if not numpy.array_equal(ours, theirs) and not numpy.array_equal(ours, theirs, equal_nan=True):
            return False
    return True


def _root_arguments() -> Iterator[numpy.ndarray[Any, Any]]:
    """Yield arrays of fp32 values to test square roots with."""
    yield numpy.array(_SPECIAL * 2, numpy.float32)
    step = _MANTISSAS // _BINADE_SAMPLES  # samples of every binade, the numbers with one exponent
    yield numpy.arange(step // 2 + 1, 255 * _MANTISSAS, step, dtype=numpy.int32).view(numpy.float32)
    # The ends of every binade, where code for special values would begin.
    ends = numpy.arange(1, 255)[:, None] * _MANTISSAS + numpy.arange(-_END_SAMPLES, _END_SAMPLES)
    yield ends.ravel().astype(numpy.int32).view(numpy.float32)
    yield numpy.arange(255 * _MANTISSAS - _LAST, 255 * _MANTISSAS, dtype=numpy.int32).view(numpy.float32)
    # All mantissas of two binades: an exponent larger by two only doubles a root.
    for start in range(_ONE, _ONE + 2 * _MANTISSAS, _ROOT_CHUNK_NUMEL):
        yield numpy.arange(start, start + _ROOT_CHUNK_NUMEL, dtype=numpy.int32).view(numpy.float32)


BIAS_CORRECTION = "bias_correction"


@final
class AdamRule(NativeRule):
    """The rule of Adam (Kingma and Ba, 2015; weight decay in the gradient) and AdamW (Loshchilov and Hutter, 2019).

    Param groups have torch's keys; lr and betas may be 0-d tensors. The group's decoupled_weight_decay chooses AdamW.
    The state arrays are exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq; the scalar is step. If DeepSpeed's key
    bias_correction is false, the moments are not corrected.
    """

    unsigned_field = "exp_avg_sq"
    _takes_root = True
    _variants = (
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "amsgrad": True, "betas": (0.3, 0.6), "eps": 1e-3},  # the other branch of lerp
    )

    def __init__(
        self, *, decoupled: bool, kernel: UpdateKernel | None, state_dtype: torch.dtype = torch.float32
    ) -> None:
        self._class = torch.optim.AdamW if decoupled else torch.optim.Adam
        super().__init__(kernel, state_dtype)

    @staticmethod
    def seed_of(step: float) -> int:
        """Return the seed of stochastic rounding in step `step`. Callers add the index of the state array."""
        return int(step) * 0x9E3779B1 & 0xFFFFFFFF

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if hyper["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        # may be 0-d tensors: torch then computes in fp32, and so do these lines
        lr, (beta1, beta2), weight_decay = hyper["lr"], hyper["betas"], hyper["weight_decay"]
        number, decoupled = self._phase(scalars) + 1, hyper["decoupled_weight_decay"]
        step = number if hyper.get(BIAS_CORRECTION, True) else math.inf
        return Hyper(
            rule=Rule.ADAM,
            flags=flags_of(MAXIMIZE=hyper["maximize"], AMSGRAD=hyper["amsgrad"], L2=weight_decay and not decoupled),
            seed=self.seed_of(number),
            l2=weight_decay,
            decay=float(1 - lr * weight_decay) if decoupled else 1.0,
            weight1=float(1 - beta1),
            beta2=float(beta2),
            weight2=float(1 - beta2),
            root2=float((1 - beta2**step) ** 0.5),
            eps=float(hyper["eps"]),
            rate=float(-(lr / (1 - beta1**step))),
        )

    def _reference_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        corrected = hyper.get(BIAS_CORRECTION, True)
        return self._torch_scalars(scalars) if corrected else {"step": torch.tensor(math.inf)}


@final
class SgdRule(NativeRule):
    """The rule of torch.optim.SGD. With momentum, its state array is momentum_buffer, which the first step fills."""

    _class = torch.optim.SGD
    _counts_steps = False
    _variants = (
        {"momentum": 0.0, "weight_decay": 0.1, "nesterov": False},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": False, "maximize": True},
        {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True},
    )

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if hyper["momentum"] else ()

    def _next_scalars(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> dict[str, Any]:
        has_buffer = hyper["momentum"] or self._phase(scalars)
        return super()._next_scalars(hyper, scalars) if has_buffer else {"momentum_buffer": "absent"}

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        flags = {name.upper(): hyper[name] for name in ("maximize", "momentum", "nesterov")}
        return Hyper(
            rule=Rule.SGD,
            flags=flags_of(**flags, L2=hyper["weight_decay"], FIRST=not self._phase(scalars)),
            l2=hyper["weight_decay"],
            beta2=hyper["momentum"],
            weight2=1 - hyper["dampening"],
            rate=float(-hyper["lr"]),
        )


@final
class AdagradRule(NativeRule):
    """The rule of torch.optim.Adagrad. The state array is sum; the scalar is step."""

    _class = torch.optim.Adagrad
    _takes_root = True
    _variants = ({"weight_decay": 0.1, "maximize": True, "lr_decay": 0.1, "eps": 1e-3},)

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def init_state(self, state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]) -> None:
        state["sum"].fill_(self._completed(hyper)["initial_accumulator_value"])

    def first_state(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> dict[str, Any]:
        state = super().first_state(shape, hyper)
        state["sum"].fill_(self._completed(hyper)["initial_accumulator_value"])
        return state

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        return Hyper(
            rule=Rule.ADAGRAD,
            flags=flags_of(MAXIMIZE=hyper["maximize"], L2=hyper["weight_decay"]),
            l2=hyper["weight_decay"],
            decay=1.0,
            root2=1.0,
            eps=hyper["eps"],
            rate=float(-hyper["lr"] / (1 + self._phase(scalars) * hyper["lr_decay"])),
        )


class Lion(Optimizer):
    """Lion as a plain torch optimizer: EvoLved Sign Momentum (Chen et al., 2023, "Symbolic Discovery of Optimization
    Algorithms", program 1). The defaults are those of DeepSpeed's Lion.

    c = b1 * m + (1 - b1) * g; p = p * (1 - lr * weight_decay) - lr * sign(c); m = b2 * m + (1 - b2) * g. The one state
    array is `exp_avg`, m.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not float(lr) >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"Invalid betas: {betas}; two numbers in [0, 1) are needed")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. Return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr = float(group["lr"])
            beta1, beta2 = cast("tuple[float, float]", group["betas"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = -parameter.grad if group["maximize"] else parameter.grad
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                exp_avg = state["exp_avg"]
                direction = exp_avg.lerp(grad, 1.0 - beta1).sign_()
                parameter.mul_(1.0 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                exp_avg.lerp_(grad, 1.0 - beta2)
        return loss


ELEMENTWISE.add(Lion)


@final
class LionRule(NativeRule):
    """The rule of `Lion`. The state array is exp_avg."""

    _class = Lion
    _counts_steps = False
    _variants = (
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "betas": (0.3, 0.6)},  # lerp with weights below and above one half
        {"betas": (0.6, 0.3)},
    )

    def _array_names(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",)

    def _kernel_hyper(self, hyper: Mapping[str, Any], scalars: Mapping[str, Any]) -> Hyper:
        lr = float(hyper["lr"])
        beta1, beta2 = (float(beta) for beta in hyper["betas"])
        return Hyper(
            rule=Rule.LION,
            flags=flags_of(MAXIMIZE=hyper["maximize"]),
            decay=1 - lr * hyper["weight_decay"],
            weight1=1 - beta1,
            weight2=1 - beta2,
            rate=-lr,
        )
