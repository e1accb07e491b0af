"""Offloaded activations in an engine: what moves, what stays, what is freed when, and what a failed transfer raises."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.fakes.io_faults import Fault
from tests.support.faulty_runs import faulty_disks
from tests.support.inspection import activations, ledger, pager
from tests.support.trainers import Plain, assert_same_bits, follow, tiered
from tiered_zero.errors import CorruptionError, ModelError, StoreError, TieredZeroError, TransferError

WIDTH, DEPTH = 64, 4
ROWS_NBYTES = 32 * WIDTH * 4


def rows(number: int = 0) -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(number))


class Layers(nn.Module):
    """`interrupt`: called in the middle of forward."""

    def __init__(self, interrupt: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.interrupt = interrupt

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if number == DEPTH // 2:
                x = self.interrupt(x)
        return x.square().mean()


def engine_of(model: nn.Module, path: Path, limit: str = "1MiB", **more: Any) -> tiered_zero.Engine:
    section = {"device": "nvme", "nvme_path": str(path), "limit": limit, "min_nbytes": 1024}
    runtime = {"activations": section, "device_memory_limit": None}
    return tiered(model, path, ("none", "none"), runtime=runtime, **more)


@pytest.fixture
def engine(swap_path: Path) -> Iterator[tiered_zero.Engine]:
    with engine_of(Layers(), swap_path) as engine:
        yield engine


def course(trainer: Any) -> list[Any]:
    """Two steps."""
    seen = []
    for number in range(2):
        seen.append(trainer(rows(number)))
        trainer.backward(seen[-1])
        seen[-1] = seen[-1].detach()
        trainer.step()
    return seen


def assert_goes_on_as_plain(engine: tiered_zero.Engine) -> None:
    """With the first weights, and nothing of the budget or of the device taken."""
    taken = []

    def script(trainer: Any) -> list[Any]:
        seen = course(trainer)
        taken[:] = [free_nbytes(engine), ledger(engine).by_kind()["device"]["activation_in_flight"][0]]
        return seen

    assert_same_bits(follow(course, Plain(Layers())), follow(script, engine))
    assert taken == [1 << 20, 0]


def free_nbytes(engine: tiered_zero.Engine) -> int:
    """Bytes of the budget that no record has."""
    mover = activations(engine)
    mover._free_dropped()
    return mover._extents.free_nbytes


# -- what moves --------------------------------------------------------------------------------------------------------


def test_without_activations_no_hook_is_added(swap_path: Path) -> None:
    with tiered(Layers(), swap_path, ("none", "none")) as engine:
        views = pager(engine).saved_views
        assert views.hooks_inside(None) == (views.pack, views.unpack)


def test_the_plan_has_rows_and_the_ledger_holds_them(engine: tiered_zero.Engine) -> None:
    planned = {(row.tier, row.kind): row.nbytes for row in engine.plan.rows}
    course(engine)
    found = ledger(engine).by_kind()
    for tier, kind in (("nvme", "activation"), ("host", "staging_activation")):
        assert planned[tier, kind] == found[tier][kind][1]
    assert planned["nvme", "activation"] == 1 << 20
    assert 0 < found["device"]["activation_in_flight"][1] <= planned["device", "activation_in_flight"]


def test_a_full_budget_leaves_tensors_on_the_device_and_counts_them(swap_path: Path) -> None:
    expected = follow(course, Plain(Layers()))
    engine = engine_of(Layers(), swap_path, str(2 * ROWS_NBYTES))
    counts = []

    def script(trainer: Any) -> list[Any]:
        seen = course(trainer)
        counts.append(trainer.step_report.activations)
        return seen

    assert_same_bits(expected, follow(script, engine))
    assert counts[0]["num_moved"] == 2
    assert counts[0]["kept_nbytes"] == counts[0]["num_kept"] * ROWS_NBYTES > 0


def test_views_of_one_storage_move_once(engine: tiered_zero.Engine) -> None:
    x = engine.module.layers[0](rows())
    with torch.autograd.graph.saved_tensors_hooks(*pager(engine).saved_views.hooks_inside(None)):
        products = [x.exp() for _ in range(2)]
        saved = [part * part.detach() for part in x.chunk(2, dim=1) for _ in range(2)]
        wide = rows()[:, :1].expand(32, WIDTH) * x
    counts = activations(engine).take_counts()
    assert counts["num_moved"] == 4, "the input of the layer, two outputs of exp(), and all parts of x as one"
    assert counts["num_shared"] == 3
    del products, saved, wide, x
    assert free_nbytes(engine) == 1 << 20


def test_parts_of_a_storage_that_are_written_one_by_one_keep_their_values(engine: tiered_zero.Engine) -> None:
    """`.data` gives each a version counter of its own, and all are at the same version."""
    slopes = []
    for hooks in ((lambda tensor: tensor, lambda tensor: tensor), pager(engine).saved_views.hooks_inside(None)):
        arena, factor = torch.empty(3, 32, WIDTH), torch.ones(32, WIDTH, requires_grad=True)
        total = factor.new_zeros(())
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            for number in range(3):
                part = arena.data[number]
                part.copy_(rows(number))
                total = total + (part * factor).sum()
        total.backward()
        slopes.append(factor.grad)
    assert activations(engine).take_counts()["num_moved"] == 3
    assert torch.equal(*slopes)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_a_graph_that_is_kept_is_read_again(engine: tiered_zero.Engine) -> None:
    def script(trainer: Any) -> list[Any]:
        loss = trainer(rows())
        trainer.backward(loss, retain_graph=True)
        trainer.backward(loss)
        trainer.step()
        return []

    assert_same_bits(follow(script, Plain(Layers())), follow(script, engine))


def test_a_second_derivative_is_plain_pytorchs(engine: tiered_zero.Engine) -> None:
    def script(trainer: Any) -> list[Any]:
        x = rows().requires_grad_()
        (slope,) = torch.autograd.grad(trainer(x), x, create_graph=True)
        trainer.backward(slope.square().sum())
        trainer.step()
        return [slope.detach()]

    assert_same_bits(follow(script, Plain(Layers())), follow(script, engine))


def test_forwards_without_backward_free_their_budget(engine: tiered_zero.Engine) -> None:
    for number in range(50):
        engine(rows(number))
    assert "num_kept" not in activations(engine).take_counts()
    assert free_nbytes(engine) == 1 << 20


def test_a_late_backward_is_refused(engine: tiered_zero.Engine) -> None:
    late = engine(rows(1))
    engine.backward(engine(rows()))
    engine.step()
    with pytest.raises(ModelError, match="activations of a step that is over"):
        late.backward()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient here")


def fail_in_forward(x: Tensor) -> Tensor:
    raise ArithmeticError("no output here")


def fail_in_a_hook(x: Tensor) -> Tensor:
    def hook(grad: Tensor) -> Tensor:
        raise ArithmeticError("no gradient here")

    x.register_hook(hook)
    return x


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("failure", [Fails.apply, fail_in_forward, fail_in_a_hook])
def test_a_failed_pass_frees_everything(engine: tiered_zero.Engine, failure: Any, own: bool) -> None:
    """`own`: the user's own backward, past the engine."""
    engine.module.interrupt = failure
    with pytest.raises(ArithmeticError):
        loss = engine(rows())
        loss.backward() if own else engine.backward(loss)
    engine.abort_step()
    if failure is not fail_in_forward:
        with pytest.raises((ModelError, RuntimeError)):
            loss.backward()
        engine.abort_step()
    engine.module.interrupt = lambda x: x
    assert_goes_on_as_plain(engine)


def test_an_interrupt_frees_everything(engine: tiered_zero.Engine) -> None:
    def interrupt(x: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGINT)
        return x

    engine.module.interrupt = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine(rows())
    engine.module.interrupt = lambda x: x
    assert_goes_on_as_plain(engine)


# -- faults of the disk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("read", 2, "flip"), CorruptionError),
        (Fault("read", 2, "short"), TransferError),
        (Fault("write", 2), TransferError),
        (Fault("write", 2, "torn"), CorruptionError),
    ],
    ids=lambda value: f"{value.kind} {value.effect}" if isinstance(value, Fault) else "",
)
def test_a_fault_raises_in_its_step(fault: Fault, error: type[TieredZeroError], swap_path: Path) -> None:
    with faulty_disks(fault), engine_of(Layers(), swap_path) as engine:
        before = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(error):
            course(engine)
        assert all(torch.equal(value, before[name]) for name, value in engine.module.state_dict().items())
        if error is CorruptionError:  # the step is dropped; the disk works on
            assert_goes_on_as_plain(engine)
        else:
            with pytest.raises(TieredZeroError, match="failed earlier"):
                course(engine)
    assert not any(swap_path.iterdir())


def test_a_disk_that_is_too_small_is_refused_before_the_start(swap_path: Path) -> None:
    free = os.statvfs(swap_path)
    with pytest.raises((StoreError, TransferError), match="free"):
        engine_of(Layers(), swap_path, str(2 * free.f_blocks * free.f_frsize))
    assert not any(swap_path.iterdir())
