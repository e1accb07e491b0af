"""Adam on the kernel: torch's bits, an exact reference, every format, and what it says when there is no kernel."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered_zero.errors import InternalError, ModelError
from tiered_zero.native.update import UpdateKernel, supported_levels
from tiered_zero.rules.native_rules import AdamRule, find_torch_root, open_kernel
from tiered_zero.rules.rule import Slice
from tiered_zero.rules.state_layout import join_master, split_master

VARIANTS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"amsgrad": True, "weight_decay": 0.01},
    {"maximize": True},
    {"maximize": True, "weight_decay": 0.3, "amsgrad": True},
    {"betas": (0.3, 0.6), "eps": 1e-3, "lr": 0.3, "weight_decay": 0.02},  # lerp's other branch
]


ATEN_FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""There the kernel has torch's bits; elsewhere fp32 gradients may take torch's own code."""


@pytest.fixture
def kernel(library: Path) -> Iterator[UpdateKernel]:
    kernel = UpdateKernel(library, num_threads=3, root=find_torch_root())
    yield kernel
    kernel.close()


def make_run(rule: AdamRule, master: torch.Tensor, hyper: dict[str, Any], out: torch.Tensor | None = None) -> Slice:
    state = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in rule.state_fields(tuple(master.shape), hyper)}
    return Slice(master=master, grad=torch.empty(0), state=state, scalars={}, hyper=hyper, out=out)


def cut(run: Slice, places: list[int]) -> list[Slice]:
    """The same memory as several runs."""
    edges = [0, *places, run.master.numel()]
    return [
        Slice(
            master=run.master[a:b],
            grad=run.grad[a:b],
            state={name: array[a:b] for name, array in run.state.items()},
            scalars=dict(run.scalars),
            hyper=run.hyper,
            out=None if run.out is None else run.out[a:b],
            grad_scale=run.grad_scale,
        )
        for a, b in itertools.pairwise(edges)
    ]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit; a NaN equals any NaN."""
    kind = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return bool(((a.view(kind) == b.view(kind)) | (a.isnan() & b.isnan())).all())


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in fp32, rounded once: the product is exact in double, the sum is rounded to odd there."""
    product = a.double() * b.double()
    total = product + c.double()
    back = total - product
    error = (product - (total - back)) + (c.double() - back)
    bits = total.view(torch.int64)
    even = (error != 0) & error.isfinite() & (bits & 1 == 0)
    offloaded = torch.where((error > 0) == (total > 0), 1, -1)
    return (bits + torch.where(even, offloaded, 0)).view(torch.float64).float()


def wild(numel: int, spread: float = 6.0) -> torch.Tensor:
    """Gradients of very different sizes, some zero."""
    values = torch.randn(numel) * 10.0 ** (torch.rand(numel) * spread - spread / 2)
    return values * (torch.rand(numel) > 0.05)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_has_the_bits_of_torch(kernel: UpdateKernel, decoupled: bool, foreach: bool, variant: dict[str, Any]) -> None:
    rule = AdamRule(decoupled=decoupled, kernel=kernel)
    assert rule.torch_bits or not ATEN_FUSES
    numel = 40_037
    parameter = torch.nn.Parameter(wild(numel, 2.0))
    hyper = {"lr": 1e-2, **variant}
    optimizer = (torch.optim.AdamW if decoupled else torch.optim.Adam)([parameter], foreach=foreach, **hyper)
    run = make_run(rule, parameter.detach().clone(), {"weight_decay": optimizer.defaults["weight_decay"], **hyper})
    pieces = [run]
    for step in range(12):
        parameter.grad = wild(numel)
        run.grad = parameter.grad.clone()
        optimizer.param_groups[0]["lr"] = hyper["lr"] / (step + 1)
        run.hyper = {**run.hyper, "lr": hyper["lr"] / (step + 1)}
        optimizer.step()
        scalars = pieces[0].scalars
        pieces = cut(run, sorted(torch.randint(0, numel, (step,)).tolist()))
        for piece in pieces:
            piece.scalars = dict(scalars)
        rule.update(pieces)
        assert same_bits(run.master, parameter.detach()), f"step {step}"
    assert pieces[0].scalars == {"step": 12.0}
    for name, array in run.state.items():
        assert same_bits(array, optimizer.state[parameter][name]), name


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_without_bias_correction(kernel: UpdateKernel, decoupled: bool, native: bool) -> None:
    rule = AdamRule(decoupled=decoupled, kernel=kernel if native else None)
    master, exp_avg, exp_avg_sq = wild(4099, 2.0), torch.zeros(4099), torch.zeros(4099)
    run = make_run(rule, master.clone(), {"lr": 1e-2, "weight_decay": 0.1, "bias_correction": False})
    for _ in range(4):
        grad = wild(4099)
        run.grad = grad.clone()
        rule.update([run])
        if decoupled:
            master.mul_(1 - 1e-2 * 0.1)
        else:
            grad.add_(master, alpha=0.1)
        exp_avg.lerp_(grad, 1 - 0.9)
        exp_avg_sq.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
        master.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(1e-8), value=-1e-2)
        assert same_bits(run.master, master) and same_bits(run.state["exp_avg"], exp_avg)
    assert rule.export_state(run.state, run.scalars)["step"] == 4


@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 4097])
def test_bits_do_not_depend_on_the_size(kernel: UpdateKernel, numel: int) -> None:
    rule = AdamRule(decoupled=True, kernel=kernel)
    master, grads = wild(5000, 2.0), [wild(5000) for _ in range(3)]
    hyper = {"lr": 0.1, "amsgrad": True}
    whole, part = make_run(rule, master.clone(), hyper), make_run(rule, master[:numel].clone(), hyper)
    for grad in grads:
        whole.grad, part.grad = grad, grad[:numel].clone()
        rule.update([whole, part])
    assert same_bits(part.master, whole.master[:numel])


@pytest.mark.parametrize("special", [1e-42, -1e-45, float("inf"), -float("inf"), float("nan"), 3e38, -0.0])
def test_special_gradients_go_torchs_way(kernel: UpdateKernel, special: float) -> None:
    rule = AdamRule(decoupled=False, kernel=kernel)
    for place in (0, 20, 36):  # vector and tail
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 37))
        optimizer = torch.optim.Adam([parameter], weight_decay=0.1, amsgrad=True)
        run = make_run(rule, parameter.detach().clone(), {"weight_decay": 0.1, "amsgrad": True})
        for _ in range(3):
            parameter.grad = torch.full((37,), 0.25)
            parameter.grad[place] = special
            run.grad = parameter.grad.clone()
            optimizer.step()
            rule.update([run])
        assert same_bits(run.master, parameter.detach())


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_scale_in_one_pass(library: Path, grad_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """fp32 gradients: against torch's operations. 16 bit: the same, with fused multiply-add and an exact root."""
    kernel = UpdateKernel(library, root=find_torch_root())
    rule = AdamRule(decoupled=True, kernel=kernel)
    numel, scale = 3001, 0.37
    run = make_run(rule, wild(numel, 2.0), {"lr": 0.01}, torch.empty(numel, dtype=out_dtype))
    run.grad_scale = scale
    p, m, v = run.master.clone(), torch.zeros(numel), torch.zeros(numel)
    for step in range(1, 6):
        run.grad = wild(numel).to(grad_dtype)
        g = run.grad.clone().float().mul_(scale)
        rule.update([run])
        p.mul_(1 - 0.01 * 0.01)
        if grad_dtype is torch.float32:
            m.lerp_(g, 1 - 0.9)
            v.mul_(0.999).addcmul_(g, g, value=1 - 0.999)
            root = v.sqrt()
        else:
            m = fused(torch.tensor(1 - 0.9), g - m, m)
            v = fused(g * (1 - 0.999), g, v * 0.999)
            root = v.double().sqrt().float()
        p.addcdiv_(m, (root / (1 - 0.999**step) ** 0.5).add_(1e-8), value=-(0.01 / (1 - 0.9**step)))
        assert run.out is not None
        assert same_bits(run.master, p)
        assert same_bits(run.out, p.to(out_dtype))
    kernel.close()


@pytest.mark.parametrize(("lr", "decay"), [(1e-3, 0.0), (1e-2, 0.1)])
def test_exact_reference_over_1000_steps(kernel: UpdateKernel, lr: float, decay: float) -> None:
    """Float64 AdamW, as the paper has it: within 1e-5 relative, with a tail, and gradients from 1e-20 to 1e3.

    The decay factor is the fp32 number nearest to 1 - lr * decay, as in torch: its own rounding, up to 3e-8 a step and
    always the same way, is no error of the arithmetic.
    """
    rule = AdamRule(decoupled=True, kernel=kernel)
    numel, eps, scale = 1003, 1e-8, 0.5
    run = make_run(rule, torch.rand(numel) * 4 + 4, {"lr": lr, "weight_decay": decay, "eps": eps})
    run.grad_scale = scale
    p, m, v = run.master.double(), torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    size, factor = 10.0 ** torch.linspace(-20, 3, numel), torch.tensor(1 - lr * decay).item()
    for step in range(1, 1001):
        run.grad = (torch.randn(numel) * size).to(torch.bfloat16)
        g = run.grad.double() * scale
        rule.update([run])
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        p = factor * p - lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + eps)
    assert ((run.master.double() - p) / p).abs().max() <= 1e-5


def test_denormal_moments_are_kept(kernel: UpdateKernel) -> None:
    rule = AdamRule(decoupled=True, kernel=kernel)
    run = make_run(rule, torch.ones(35), {"weight_decay": 0.0})
    run.grad = torch.full((35,), 1e-38)
    rule.update([run])
    assert torch.equal(run.state["exp_avg"], torch.zeros(35).lerp_(run.grad, 1 - 0.9))
    assert 0 < run.state["exp_avg"][0] < torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("remainder", [False, True])
def test_torchs_own_code_gives_the_same_bits(kernel: UpdateKernel, state_dtype: torch.dtype, remainder: bool) -> None:
    rules = [AdamRule(decoupled=True, kernel=k, state_dtype=state_dtype) for k in (kernel, None)]
    numel = (1 << 17) + 77  # more than a chunk
    values = wild(numel, 2.0)
    values[::7] = with_ties(values[::7])
    parameter, low, mark = split_master(values)
    hyper = {"lr": torch.tensor(0.01), "amsgrad": True, "weight_decay": 0.1}
    runs = [make_run(rule, low.clone() if remainder else values.clone(), hyper, parameter.clone()) for rule in rules]
    if remainder:
        for run in runs:
            set_marks(run, mark)
    for _ in range(4):
        grad = wild(numel)
        for rule, run in zip(rules, runs, strict=True):
            run.grad, run.grad_scale = grad.clone(), 0.7
            rule.update([run])
    native, fallback = runs
    assert native.out is not None and fallback.out is not None
    assert same_bits(native.out, fallback.out)
    assert torch.equal(native.master, fallback.master)
    assert native.scalars == fallback.scalars == {"step": 4.0}
    for name, array in native.state.items():
        assert array.dtype == state_dtype
        assert same_bits(array, fallback.state[name])


def with_ties(values: torch.Tensor) -> torch.Tensor:
    """The same, moved to lie exactly between two bf16 numbers."""
    return ((values.view(torch.int32) & -0x10000) | 0x8000).view(torch.float32)


def set_marks(run: Slice, mark: torch.Tensor) -> None:
    run.state["exp_avg_sq"].copy_(torch.where(mark, -run.state["exp_avg_sq"], run.state["exp_avg_sq"]))


def test_a_split_master_is_its_rounded_parameter_and_comes_back_bit_for_bit() -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):  # around every bf16 number, both ties of each
        master = (halves | low).view(torch.float32)
        parameter, remainder, mark = split_master(master)
        assert same_bits(parameter, master.bfloat16())
        assert same_bits(join_master(parameter, remainder, mark), master)
        assert low == 0x8000 or not mark.any()


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_group_decides_whether_its_decay_is_decoupled(kernel: UpdateKernel, decoupled: bool) -> None:
    rule = AdamRule(decoupled=not decoupled, kernel=kernel)
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.Adam([parameter], lr=0.1, weight_decay=0.5, decoupled_weight_decay=decoupled)
    hyper = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    run = make_run(rule, parameter.detach().clone(), hyper)
    for _ in range(3):
        parameter.grad = torch.randn(1000)
        run.grad = parameter.grad.clone()
        optimizer.step()
        rule.update([run])
        assert same_bits(run.master, parameter.detach())


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_remainder_is_the_fp32_master_bit_for_bit(kernel: UpdateKernel, native: bool, decoupled: bool) -> None:
    """Ties too, before the step and after it: a step of 0 leaves each where it is, to be rounded once more."""
    rule = AdamRule(decoupled=decoupled, kernel=kernel if native else None)
    numel, hyper = 10_007, {"lr": 0.05, "weight_decay": 0.1}
    values = wild(numel)
    values[::2] = with_ties(values[::2])
    parameter, low, mark = split_master(values)
    assert 0.2 * numel < mark.sum() < 0.3 * numel
    plain = make_run(rule, values.clone(), hyper, parameter.clone())
    joined = make_run(rule, low, hyper, parameter)
    set_marks(joined, mark)
    for step in range(30):
        plain.hyper = joined.hyper = {**hyper, "lr": 0.05 if step % 3 == 2 else 0.0}
        plain.grad = wild(numel).bfloat16()
        joined.grad = plain.grad.clone()
        rule.update([plain, joined])
        assert joined.out is not None and plain.out is not None
        assert same_bits(joined.out, plain.out)
        mark = joined.state["exp_avg_sq"].signbit()
        assert same_bits(join_master(joined.out, joined.master, mark), plain.master)
        assert same_bits(joined.state["exp_avg_sq"].abs(), plain.state["exp_avg_sq"])
        assert same_bits(joined.state["exp_avg"], plain.state["exp_avg"])


def test_bf16_moments_follow_fp32_ones(kernel: UpdateKernel) -> None:
    """Lossy, but unbiased: the mean of many second moments stays within 1%; rounding to nearest would freeze it."""
    exact, lossy = (AdamRule(decoupled=True, kernel=kernel, state_dtype=d) for d in (torch.float32, torch.bfloat16))
    numel = 20_000
    runs = [make_run(rule, torch.zeros(numel), {}) for rule in (exact, lossy)]
    for step in range(300):
        grad = torch.randn(numel) * (10.0 if step < 5 else 1.0)  # then it decays by less than half a unit a step
        for rule, run in zip((exact, lossy), runs, strict=True):
            run.grad = grad.clone()
            rule.update([run])
    means = [run.state["exp_avg_sq"].double().mean() for run in runs]
    assert abs(means[1] / means[0] - 1) < 0.01
    assert (runs[0].master - runs[1].master).abs().max() < 0.05 * runs[0].master.abs().max()


def test_groups_and_steps_do_not_mix(kernel: UpdateKernel) -> None:
    """Runs of several param groups and ages in one call, against each by itself."""
    rule = AdamRule(decoupled=True, kernel=kernel)
    hypers: list[dict[str, Any]] = [{"lr": 0.1, "weight_decay": 0.0}, {"lr": 0.01, "amsgrad": True}]
    together = [make_run(rule, wild(100 + i, 2.0), hypers[i % 2]) for i in range(10)]
    alone = [make_run(rule, run.master.clone(), run.hyper) for run in together]
    for step in range(5):
        grads = [wild(run.master.numel()) for run in together]
        for run, other, grad in zip(together, alone, grads, strict=True):
            run.grad, other.grad = grad, grad.clone()
        rule.update(together[step:])
        for other in alone[step:]:
            rule.update([other])
    for run, other in zip(together, alone, strict=True):
        assert same_bits(run.master, other.master)
        assert run.scalars == other.scalars


def test_level_does_not_change_bits(library: Path) -> None:
    results = []
    for level in supported_levels(library):
        torch.manual_seed(1)
        kernel = UpdateKernel(library, level, root=find_torch_root())
        rule = AdamRule(decoupled=True, kernel=kernel)
        run = make_run(rule, wild(999, 2.0), {"lr": 0.1})
        for _ in range(5):
            run.grad = wild(999)
            rule.update([run])
        results.append(run.master)
        assert kernel.level == level
        kernel.close()
    assert all(same_bits(results[0], other) for other in results)


@pytest.mark.parametrize(
    "broken",
    [
        {"grad": torch.zeros(9, dtype=torch.bfloat16)},
        {"grad": torch.zeros(20, dtype=torch.bfloat16)[::2]},
        {"grad": torch.zeros(10, dtype=torch.float64)},
        {"out": torch.zeros(10, dtype=torch.int64)},
        {"master": torch.zeros(10, dtype=torch.int16)},
        {"state": {"exp_avg": torch.zeros(10), "exp_avg_sq": torch.zeros(10, dtype=torch.bfloat16)}},
    ],
)
def test_a_run_that_does_not_fit_is_refused_before_any_write(kernel: UpdateKernel, broken: dict[str, Any]) -> None:
    rule = AdamRule(decoupled=True, kernel=kernel)
    good, bad = make_run(rule, torch.ones(10), {}), make_run(rule, torch.ones(10), {})
    good.grad, bad.grad = torch.ones(10).bfloat16(), torch.ones(10).bfloat16()
    for name, value in broken.items():
        setattr(bad, name, value)
    with pytest.raises(InternalError, match="expected to be contiguous arrays"):
        rule.update([good, bad])
    assert torch.equal(good.master, torch.ones(10)) and good.scalars == {}


@pytest.mark.parametrize("is_native", [True, False])
def test_an_option_that_needs_more_state_than_was_planned_is_refused_by_name(
    kernel: UpdateKernel, is_native: bool
) -> None:
    rule = AdamRule(decoupled=True, kernel=kernel if is_native else None)
    run = make_run(rule, torch.ones(10), {})
    run.grad, run.hyper = torch.ones(10), {"amsgrad": True}
    with pytest.raises(ModelError, match=r"max_exp_avg_sq.* amsgrad .* before tiered_zero.initialize"):
        rule.update([run])
    assert torch.equal(run.master, torch.ones(10)) and run.scalars == {}


def test_state_bytes(kernel: UpdateKernel) -> None:
    for dtype, nbytes in ((torch.float32, 8), (torch.bfloat16, 4)):
        fields = AdamRule(decoupled=True, kernel=kernel, state_dtype=dtype).state_fields((1,), {})
        assert sum(field.dtype.itemsize for field in fields) == nbytes
    with pytest.raises(ModelError, match="bfloat16 was expected"):
        AdamRule(decoupled=True, kernel=kernel, state_dtype=torch.float16)


def test_without_library_one_notice_names_the_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))
    with caplog.at_level(logging.INFO, "tiered_zero"):
        rule = AdamRule(decoupled=True, kernel=open_kernel())
        rule.announce()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"TIERED_ZERO_NATIVE_DIR is {tmp_path}" in record.message
