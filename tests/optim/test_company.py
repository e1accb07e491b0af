"""An OffloadedOptimizer beside an engine, under torch.compile, Ctrl-C and kill -9, with every schedule."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tiered_zero
from tests.optim.test_offloaded import Net, assert_same, assert_same_state, backward, models
from tests.support.configs import config_of, zero_section
from tests.support.forked import run_forked
from tests.support.inspection.insides import swap_store
from tests.support.schedulers import SCHEDULERS
from tiered_zero.cli.main import main
from tiered_zero.errors import ModelError
from tiered_zero.optim import OffloadedOptimizer

pytestmark = pytest.mark.usefixtures("one_thread")
ADAM = torch.optim.AdamW


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.optim")
def test_every_schedule_drives_it(name: str) -> None:
    seen: list[list[float]] = []
    plain, ours = ([nn.Parameter(torch.ones(3)) for _ in range(2)] for _ in range(2))
    groups = [[{"params": [param]} for param in params] for params in (plain, ours)]
    with OffloadedOptimizer(groups[1], ADAM, {"device": "cpu"}, lr=1e-2) as optimizer:
        for own, params in ((ADAM(groups[0], lr=1e-2), plain), (optimizer, ours)):
            scheduler, rates = SCHEDULERS[name](own), []
            for _ in range(10):
                for param in params:
                    param.grad = torch.ones(3)
                own.step()
                scheduler.step()
                rates += [float(group["lr"]) for group in own.param_groups]
            seen.append(rates)
    assert seen[0] == seen[1] and all(map(torch.equal, plain, ours))


def test_it_steps_beside_an_engine(swap_path: Path) -> None:
    plain, ours = models()
    reference = ADAM(plain.parameters(), lr=1e-2)
    offload = {"device": "nvme", "nvme_path": str(swap_path)}
    config = config_of(zero_section("cpu", "nvme", swap_path))
    other = nn.Linear(6, 6)
    engine, *_ = tiered_zero.initialize(model=other, optimizer=ADAM(other.parameters()), config=config)
    with pytest.raises(ModelError, match="belongs to an engine"):
        OffloadedOptimizer(other.parameters(), ADAM, offload)
    with engine, OffloadedOptimizer(ours.parameters(), ADAM, offload, lr=1e-2) as optimizer:
        for step in range(4):
            engine.backward(engine(torch.ones(2, 6)).sum())
            for net, own in ((plain, reference), (ours, optimizer)):
                backward(net, step)
                own.step()
                own.zero_grad()
            engine.step()
        assert_same(plain, ours)
    assert not list(swap_path.iterdir())


def test_backward_through_weights_of_before_a_step_is_an_error(swap_path: Path) -> None:
    """As with the plain optimizer: torch compares versions."""
    weight = nn.Parameter(torch.ones(3))
    with OffloadedOptimizer([weight], ADAM, {"device": "cpu"}) as optimizer:
        loss = weight.square().sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_average_of_weights_and_parametrizations_are_trained(swap_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 2))

    plain, ours = build(), build()
    offload = {"device": "nvme", "nvme_path": str(swap_path)}
    with OffloadedOptimizer(ours.parameters(), ADAM, offload, lr=1e-2) as optimizer:
        averages = []
        for net, own in ((plain, ADAM(plain.parameters(), lr=1e-2)), (ours, optimizer)):
            average = torch.optim.swa_utils.AveragedModel(
                net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
            )
            for step in range(4):
                net(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                own.step()
                own.zero_grad()
                average.update_parameters(net)
                if step == 1:  # the average becomes the model
                    net.load_state_dict(average.module.state_dict())
            averages.append(average)
        assert_same(plain, ours)
        assert_same(*averages)
        with pytest.raises(ModelError, match="cannot be copied"):
            copy.deepcopy(optimizer)


def test_named_parameters_keep_their_names() -> None:
    saved = []
    for make in (ADAM, lambda params, **options: OffloadedOptimizer(params, ADAM, {"device": "cpu"}, **options)):
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        optimizer = make(net.named_parameters(), lr=1e-2)
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        saved.append(optimizer.state_dict())
    optimizer.load_state_dict(saved[0])
    optimizer.close()
    assert_same_state(*saved)


def test_step_hooks_fire_once(swap_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    seen: list[str] = []
    with OffloadedOptimizer([weight], ADAM, {"device": "cpu"}) as optimizer:
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        optimizer.register_state_dict_post_hook(lambda own, state: seen.append("state") or {**state, "mine": 1})
        optimizer.step()
        assert optimizer.state_dict()["mine"] == 1
    assert seen == ["before", "after", "state"]


def test_ctrl_c_comes_when_the_step_is_done(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = models()
    reference = ADAM(plain.parameters(), lr=1e-2)
    write, presses = swap_store.SwapStore.write, [1]

    def pressed(*args: Any) -> Any:
        if presses:
            presses.clear()
            os.kill(os.getpid(), signal.SIGINT)
        return write(*args)

    with OffloadedOptimizer(
        ours.parameters(), ADAM, {"device": "nvme", "nvme_path": str(swap_path)}, lr=1e-2
    ) as optimizer:
        for step in range(3):
            for net, own in ((plain, reference), (ours, optimizer)):
                backward(net, step)
                if step == 1 and own is optimizer:
                    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                        patch.setattr(swap_store.SwapStore, "write", pressed)
                        own.step()
                else:
                    own.step()
                own.zero_grad()
            assert_same(plain, ours)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


KILLED = """
import os, signal, sys, torch
from tiered_zero.optim import OffloadedOptimizer
weight = torch.nn.Parameter(torch.ones(4000))
optimizer = OffloadedOptimizer([weight], torch.optim.AdamW, {"device": "nvme", "nvme_path": sys.argv[1]})
weight.grad = torch.ones(4000)
optimizer.step()
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "code"), [("kill", -signal.SIGKILL), ("exit", 0)])
def test_what_a_killed_process_leaves_is_removed_by_gc(end: str, code: int, swap_path: Path) -> None:
    if end == "kill":
        code_found = run_forked("-c", KILLED, swap_path, end).returncode
    else:  # what the interpreter does at its end is what is tested
        code_found = subprocess.run([sys.executable, "-c", KILLED, str(swap_path), end], timeout=500).returncode
    assert code_found == code
    assert len(list(swap_path.iterdir())) == (end == "kill")
    if end == "kill":
        assert CliRunner().invoke(main, ["swap", "gc", str(swap_path)]).exit_code == 0
    assert not list(swap_path.iterdir())


def test_compiled_models_are_trained() -> None:
    plain, ours = models()
    reference = ADAM(plain.parameters(), lr=1e-2)
    with OffloadedOptimizer(ours.parameters(), ADAM, {"device": "cpu"}, lr=1e-2) as optimizer:
        for net, own in ((plain, reference), (ours, optimizer)):
            compiled: Any = torch.compile(net, backend="eager")
            assert isinstance(net, Net)
            for step in range(3):
                backward(compiled, step)
                own.step()
                own.zero_grad()
        assert_same(plain, ours)


def test_a_model_that_changes_its_dtype_keeps_its_state() -> None:
    """Masters are made where there are none, and left out where the parameters are fp32 again."""
    weight = nn.Parameter(torch.randn(30, 40))
    with OffloadedOptimizer([weight], torch.optim.NAdam, {"device": "cpu"}, lr=1e-2) as optimizer:
        for step, dtype in enumerate((torch.float32, torch.bfloat16, torch.float32)):
            before = optimizer.read_state(weight)
            weight.data, weight.grad = weight.data.to(dtype), None
            optimizer.step()
            found = optimizer.read_state(weight)
            assert ("master" in found) == (dtype is torch.bfloat16 and step > 0)
            assert all(torch.equal(before[name], found[name]) for name in before.keys() - {"master"})
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            assert optimizer.read_state(weight)["step"] == step + 1
