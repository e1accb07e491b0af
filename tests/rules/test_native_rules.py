"""SGD, Adagrad and Lion on the kernel have the bits of their torch optimizers, in one piece or in many."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered_zero.native.update import UpdateKernel
from tiered_zero.rules import native_rules
from tiered_zero.rules.native_rules import (
    AdagradRule,
    Lion,
    LionRule,
    NativeRule,
    SgdRule,
    find_torch_root,
    open_kernel,
)
from tiered_zero.rules.rule import Slice

SGD, ADAGRAD = (SgdRule, torch.optim.SGD), (AdagradRule, torch.optim.Adagrad)
LION = (LionRule, Lion)
CASES: list[tuple[Any, dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01, "maximize": True}),
    (SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    (ADAGRAD, {"lr": 0.1}),
    (ADAGRAD, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "maximize": True}),
    (LION, {"lr": 0.01}),
    (LION, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.3, 0.95), "maximize": True}),
]


@pytest.fixture
def kernel(library: Path) -> Iterator[UpdateKernel]:
    kernel = UpdateKernel(library, num_threads=2, root=find_torch_root())
    yield kernel
    kernel.close()


def make_run(rule: NativeRule, master: torch.Tensor, hyper: dict[str, Any]) -> Slice:
    state = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in rule.state_fields(tuple(master.shape), hyper)}
    run = Slice(master=master, grad=torch.empty(0), state=state, scalars={}, hyper=hyper)
    rule.init_state(run.state, hyper)
    return run


def wild(numel: int) -> torch.Tensor:
    return torch.randn(numel) * 10.0 ** (torch.rand(numel) * 4 - 2) * (torch.rand(numel) > 0.05)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("pair", "hyper"), CASES, ids=str)
def test_has_the_bits_of_torch(kernel: UpdateKernel, pair: Any, hyper: dict[str, Any], native: bool) -> None:
    rule_class, optimizer_class = pair
    rule = rule_class(kernel if native else None)
    assert rule.torch_bits or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
    parameter = torch.nn.Parameter(wild(5003))
    optimizer = optimizer_class([parameter], **hyper)
    runs = [make_run(rule, part.clone(), hyper) for part in parameter.detach().split([1, 17, 4000, 985])]
    for _ in range(8):
        parameter.grad = wild(5003)
        for run, part in zip(runs, parameter.grad.split([1, 17, 4000, 985]), strict=True):
            run.grad = part.clone()
        optimizer.step()
        rule.update(runs)
        assert torch.equal(torch.cat([run.master for run in runs]), parameter.detach())
    for name in runs[0].state:
        assert torch.equal(torch.cat([run.state[name] for run in runs]), optimizer.state[parameter][name])


def test_momentum_that_starts_late_takes_the_gradient_first(kernel: UpdateKernel) -> None:
    """As torch, which makes the buffer in the first step that has use for it."""
    rule = SgdRule(kernel)
    parameter = torch.nn.Parameter(wild(100))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    run = make_run(rule, parameter.detach().clone(), {"lr": 0.1, "momentum": 0.9})
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        run.hyper = {"lr": 0.1, "momentum": momentum}
        parameter.grad = wild(100)
        run.grad = parameter.grad.clone()
        optimizer.step()
        rule.update([run])
        assert torch.equal(run.master, parameter.detach())


def test_state_of_sgd_without_momentum_is_empty(kernel: UpdateKernel) -> None:
    assert SgdRule(kernel).state_fields((3,), {}) == []
    assert [field.name for field in SgdRule(kernel, momentum=0.9).state_fields((3,), {})] == ["momentum_buffer"]


def test_a_processor_without_a_level_takes_torchs_operations_and_the_log_says_so(
    library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_rules, "find_library", lambda stem: library)
    assert open_kernel() is not None
    monkeypatch.setattr(native_rules, "supported_levels", lambda path: [])
    assert open_kernel() is None
    SgdRule(open_kernel()).announce()
    assert "torch's own operations. The native kernel needs a processor with AVX2" in caplog.text
