"""How an OffloadedOptimizer begins, fails and ends: bytes, plan, swap files, refusals."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from tests.support.inspection.insides import SwapStore, state_view
from tiered_zero.errors import BudgetError, ConfigError, EngineFailedError, ModelError, PlanError, StoreError
from tiered_zero.optim import OffloadedOptimizer
from tiered_zero.sizes import PAGE_NBYTES

pytestmark = pytest.mark.usefixtures("one_thread")
ADAM = torch.optim.AdamW
DTYPES = (torch.float32, torch.bfloat16)


def with_gradients(*params: nn.Parameter) -> list[nn.Parameter]:
    for param in params:
        param.grad = torch.ones_like(param)
    return list(params)


def on_disk(path: Path) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": str(path)}


def test_fp32_parameters_take_eight_bytes_and_no_copy(swap_path: Path) -> None:
    weight = nn.Parameter(torch.randn(700, 1024))
    [weight] = with_gradients(weight)
    address = weight.data_ptr()
    with OffloadedOptimizer([weight], ADAM, on_disk(swap_path)) as optimizer:
        assert optimizer.plan.nbytes("nvme", "state") == 8 * weight.numel()
        assert {row.kind for row in optimizer.plan.rows} == {"state", "staging_state"}
        version = weight._version
        optimizer.step()
        assert weight.data_ptr() == address and weight._version == version + 1
        report, ledger = optimizer.step_report, optimizer.ledger
        assert report is not None and report.step == 1
        assert report.link_nbytes["disk write"] == 8 * weight.numel()
        assert ledger.by_kind()["nvme"]["state"][0] == 8 * weight.numel()
        optimizer.step()
        assert optimizer.step_report is not report and optimizer.step_report.link_nbytes["disk read"] > 0
    assert not list(swap_path.iterdir())


def test_16_bit_parameters_get_masters_that_follow_them(swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an fp32 model that is rounded after each step; a value that is set by hand is its master."""
    weight, rounded = nn.Parameter(torch.randn(30, 50)), nn.Parameter(torch.empty(30, 50, dtype=torch.bfloat16))
    weight.data.copy_(weight.to(torch.bfloat16))
    rounded.data.copy_(weight.data)
    plain = torch.optim.NAdam([weight], lr=1e-2)
    optimizer = OffloadedOptimizer([rounded], torch.optim.NAdam, on_disk(swap_path), lr=1e-2)
    assert [r.getMessage() for r in caplog.records if "16-bit" in r.getMessage()]
    try:
        for step in range(6):
            if step == 2:
                with torch.no_grad():
                    rounded[3] = 2.0
                    weight[3] = 2.0
            if step == 4:  # the state dict holds the masters
                saved = optimizer.state_dict()
                optimizer.close()
                optimizer = OffloadedOptimizer([rounded], torch.optim.NAdam, on_disk(swap_path), lr=1.0)
                optimizer.load_state_dict(saved)
            rounded.grad = torch.randn(30, 50, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
            weight.grad = rounded.grad.float()
            plain.step()
            optimizer.step()
            assert torch.equal(rounded, weight.to(torch.bfloat16)), step
        assert torch.equal(optimizer.read_state(rounded)["master"], weight)
        other = torch.optim.NAdam([rounded], lr=1e-2)
        other.load_state_dict(optimizer.state_dict())
        other.step()
    finally:
        optimizer.close()


def test_mixed_dtypes_and_shapes_step_together(swap_path: Path) -> None:
    params = [
        nn.Parameter(torch.randn(shape, dtype=dtype))
        for shape in ((), (7,), (3, 0), (3, 5, 2), (4096, 600))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    params.append(nn.Parameter(torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last)))
    params.append(nn.Parameter(torch.randn(8, 6)[:, ::2]))
    masters = [nn.Parameter(param.detach().float()) for param in params]
    plain = torch.optim.NAdam(masters, lr=1e-2)
    with OffloadedOptimizer(params, torch.optim.NAdam, on_disk(swap_path), lr=1e-2) as optimizer:
        for _ in range(3):
            for param, master in zip(params, masters, strict=True):
                param.grad = torch.randn_like(param)
                master.grad = param.grad.float()
            plain.step()
            optimizer.step()
        for param, master in zip(params, masters, strict=True):
            assert torch.equal(param, master.to(param.dtype)), (param.dtype, param.shape)


@pytest.mark.parametrize("state_format", ["lossy_bf16_moments", "lossy_8bit_moments"])
def test_state_formats_take_fewer_bytes(state_format: str, swap_path: Path) -> None:
    [weight] = with_gradients(nn.Parameter(torch.zeros(64, 1024)))
    offload = {"device": "cpu", "state_format": state_format}
    with OffloadedOptimizer([weight], ADAM, offload, lr=1e-2, weight_decay=0.0) as optimizer:
        assert optimizer.plan.nbytes("host", "state") < 4.1 * weight.numel()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, -1e-2), rtol=1e-2, atol=0)


def test_a_failed_update_latches(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = with_gradients(*(nn.Parameter(torch.ones(1 << 20)) for _ in range(2)))
    with OffloadedOptimizer(params, ADAM, on_disk(swap_path)) as optimizer:
        optimizer.step()

        def broken(*_: Any) -> None:
            raise OSError("the disk is gone")

        with monkeypatch.context() as patch, pytest.raises(OSError, match="the disk is gone"):
            patch.setattr(SwapStore, "write", broken)
            optimizer.step()
        for act in (optimizer.step, optimizer.state_dict):
            with pytest.raises(EngineFailedError, match="load the last checkpoint"):
                act()
    assert not list(swap_path.iterdir())


def test_an_exception_of_the_closure_changes_nothing(swap_path: Path) -> None:
    [weight] = with_gradients(nn.Parameter(torch.ones(5)))

    def closure() -> float:
        assert torch.is_grad_enabled()
        raise KeyError("x")

    with OffloadedOptimizer([weight], ADAM, {"device": "cpu"}) as optimizer:
        with pytest.raises(KeyError):
            optimizer.step(closure)
        assert torch.equal(weight, torch.ones(5)) and not optimizer.state_dict()["state"]
        assert optimizer.step(lambda: 3.5) == 3.5
        weight.grad = None
        before = weight.detach().clone()
        optimizer.step()
        assert torch.equal(weight, before)


def refused(make: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_what_cannot_be_stepped_is_refused(swap_path: Path) -> None:
    weight, host = nn.Parameter(torch.ones(3, 4)), {"device": "cpu"}
    refused(lambda: OffloadedOptimizer([weight], ADAM, {"device": "none"}), ConfigError, '"cpu" or "nvme"')
    refused(lambda: OffloadedOptimizer([weight], ADAM, {"device": "nvme"}), ConfigError, "nvme_path")
    refused(lambda: OffloadedOptimizer([weight], ADAM, {**host, "ratio": 0.5}), ConfigError, "found 'ratio'")
    unseen = {**host, "state_format": "bf16_remainder"}
    refused(lambda: OffloadedOptimizer([weight], ADAM, unseen), ConfigError, "bf16_remainder")
    refused(lambda: OffloadedOptimizer([weight.double()], ADAM, host), ValueError, "non-leaf")
    wrapped = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    refused(lambda: OffloadedOptimizer([wrapped], ADAM, host), ModelError, "found TwoTensor")
    double = nn.Parameter(torch.ones(3, dtype=torch.float64))
    refused(lambda: OffloadedOptimizer([double], ADAM, host), ModelError, "float64")
    refused(lambda: OffloadedOptimizer([weight], torch.optim.LBFGS, host), ModelError, "LBFGS")
    refused(lambda: OffloadedOptimizer([], ADAM, host), ValueError, "empty parameter list")
    refused(lambda: OffloadedOptimizer([weight], ADAM, host, lr=-1.0), ValueError, "Invalid learning rate")
    small = {**host, "host_memory_limit": PAGE_NBYTES}
    large = nn.Parameter(torch.ones(1 << 20))
    refused(lambda: OffloadedOptimizer([large], ADAM, small), PlanError, "host_memory_limit")
    with OffloadedOptimizer([weight], ADAM, host) as optimizer:
        weight.grad = torch.ones(3, 4).to_sparse()
        refused(optimizer.step, ModelError, "sparse=False")
        weight.grad = torch.ones(3, 4)
        optimizer.step()  # nothing was changed, nothing latches
        optimizer.param_groups[0]["params"] = []
        refused(optimizer.step, ModelError, "1 parameters that it had")
    refused(optimizer.step, ModelError, "closed")
    refused(optimizer.state_dict, ModelError, "closed")
    optimizer.close()


def test_a_forgotten_one_frees_its_files(swap_path: Path, no_leaks: None) -> None:
    optimizer = OffloadedOptimizer(with_gradients(nn.Parameter(torch.ones(9))), ADAM, on_disk(swap_path))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert len(list(swap_path.iterdir())) == 1
    del optimizer, scheduler
    gc.collect()
    assert not list(swap_path.iterdir())


def test_a_forked_child_leaves_it_alone(swap_path: Path) -> None:
    params = with_gradients(nn.Parameter(torch.ones(9)))
    with OffloadedOptimizer(params, ADAM, on_disk(swap_path)) as optimizer:
        optimizer.step()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                optimizer.step()
            except ModelError:
                optimizer.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        optimizer.step()


def test_two_of_them_and_their_params_do_not_meet(swap_path: Path) -> None:
    params = [with_gradients(nn.Parameter(torch.ones(2000))) for _ in range(2)]
    with OffloadedOptimizer(params[0], ADAM, on_disk(swap_path)) as one:
        with OffloadedOptimizer(params[1], ADAM, on_disk(swap_path)) as other:
            for optimizer in (one, other, one, other):
                optimizer.step()
        one.step()
    plain = ADAM(with_gradients(nn.Parameter(torch.ones(2000))))
    for _ in range(2):
        plain.step()
    assert torch.equal(plain.param_groups[0]["params"][0], params[1][0])


def test_state_larger_than_memory_goes_through_files(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameter by parameter: fp32 and 16 bits, one without state, cut by sub-groups; the next steps are the same."""

    def make(seed: int) -> list[nn.Parameter]:
        torch.manual_seed(seed)
        shapes = ((5,), (1100, 1024), (3, 4))
        params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes for dtype in DTYPES]
        for param in params[1:]:
            param.grad = torch.randn_like(param)
        return params

    first, second = make(1), make(1)
    with OffloadedOptimizer(first, ADAM, on_disk(swap_path), lr=torch.tensor(1e-2)) as optimizer:
        optimizer.step()
        with monkeypatch.context() as patch, pytest.raises(BudgetError, match=r"optimizer.save_state\(directory\)"):
            patch.setattr(state_view, "available_host_nbytes", lambda: 1 << 23)
            optimizer.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(state_view, "available_host_nbytes", lambda: 14 << 20)  # of the largest parameter
            assert [path.name for path in optimizer.save_state(tmp_path / "state")] == ["optimizer.safetensors"]
        saved = optimizer.state_dict()
        for own, param in zip(second, first, strict=True):
            own.data.copy_(param.data)
        optimizer.step()
    with OffloadedOptimizer(second, ADAM, on_disk(swap_path), lr=1.0) as optimizer:
        optimizer.load_state(tmp_path / "state")
        found = optimizer.state_dict()
        assert found["state"].keys() == saved["state"].keys() == set(range(1, 6))
        for index, values in saved["state"].items():
            assert all(torch.equal(value, found["state"][index][name]) for name, value in values.items())
        optimizer.step()
        assert all(map(torch.equal, first, second))
        refused(lambda: optimizer.load_state(tmp_path), StoreError, "save_state")
    with OffloadedOptimizer(second[:2], ADAM, {"device": "cpu"}) as optimizer:
        refused(lambda: optimizer.load_state(tmp_path / "state"), StoreError, "same groups")
