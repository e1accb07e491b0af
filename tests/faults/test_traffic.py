"""What goes to disk in a step, to the byte and to the request: nothing twice, nothing that did not change."""

import functools
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.support.faulty_runs import POLICIES, build, differing, faulty_disks, train
from tests.support.inspection import param_slots, prefetched_nbytes, store_of, units
from tests.support.models import ParityGPT, batch, named_weights
from tests.support.trainers import Plain
from tiered_zero.sizes import MIB

pytestmark = [pytest.mark.usefixtures("no_leaks")]

ADAM_ARRAYS = 3
"""fp32 arrays a parameter: the master and two moments."""

every_policy = pytest.mark.parametrize("policy", POLICIES)


class Used(ParityGPT):
    """Every trainable parameter has a gradient in every step."""

    def __init__(self) -> None:
        super().__init__()
        del self.never_used

    def forward(self, tokens: Tensor, targets: Tensor, detour: bool = True) -> Tensor:
        return super().forward(tokens, targets, detour)


def trained_units(engine: tiered_zero.Engine) -> list[tuple[int, int]]:
    """(padded elements, bytes an element in compute) of every trainable unit."""
    return [(unit.numel, unit.dtype.itemsize) for unit in units(engine) if unit.trainable]


def step(engine: tiered_zero.Engine, number: int, micro_batches: int = 1) -> None:
    for micro in range(micro_batches):
        engine.backward(engine(*batch(10 * number + micro)))
        engine.step()
    engine.flush()


@every_policy
@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 1), ("bf16", 3)])
def test_bytes_written_are_the_closed_form(accumulation: int, dtype: str, policy: str, swap_path: Path) -> None:
    """A step writes masters, state and parameters of what is trained, once each; however many micro-batches it has."""
    bf16 = {"enabled": dtype == "bf16", "check_grad_overflow": False}
    with faulty_disks() as disks, build(swap_path, policy, Used, accumulation=accumulation, bf16=bf16) as engine:
        (disk,), store = disks, store_of(engine)
        trained = trained_units(engine)
        params = sum(numel * itemsize for numel, itemsize in trained)
        states = sum(4 * ADAM_ARRAYS * numel for numel, _ in trained)
        assert (2 if dtype == "bf16" else 4) == trained[0][1]
        for number in range(4):
            written, read = Counter(store.nbytes("write")), Counter(store.nbytes("read"))
            earlier = prefetched_nbytes(engine)
            first = len(disk.requests)
            step(engine, number, accumulation)
            now = Counter(store.nbytes("write")) - written
            assert now["state"] == states
            assert now["param"] + now["param_back"] == params
            # before its first step a sub-group has a master and no state yet
            later = prefetched_nbytes(engine)
            now = Counter(store.nbytes("read")) - read
            if policy == "delayed" and number == 1:
                earlier = 0  # the first step behind the scenes reads anew what was read for one that is not
            assert now["state"] + earlier - later == (states // ADAM_ARRAYS if number == 0 else states)
            assert later, "and the next step's first are read already"
            asked = sum(r.nbytes for r in disk.requests[first:] if r.kind == "write")
            assert asked == params + states, "what was asked of the disk is what was counted"


@every_policy
def test_what_does_not_change_is_never_written_again(policy: str, swap_path: Path) -> None:
    """Frozen units, from their birth on; evaluation and looks at the weights write nothing at all."""
    with faulty_disks() as disks, build(swap_path, policy) as engine:
        (disk,) = disks
        store = store_of(engine)
        frozen = [slot for slot, unit in param_slots(engine).items() if not unit.trainable]
        records = [store.records()[slot] for slot in frozen]
        assert len(records) == 2
        first = len(disk.requests)
        assert train(engine, 4) is None
        engine.flush()
        for record in records:
            extent = range(record.offsets[0], record.offsets[0] + record.extent_nbytes)
            assert not [r for r in disk.requests[first:] if r.kind == "write" and r.offset in extent]
        first = len(disk.requests)
        engine.eval()
        with torch.no_grad():
            engine(*batch(5))
        engine.module.state_dict()
        with tiered_zero.gathered(engine.module.norm):
            pass
        assert {r.kind for r in disk.requests[first:]} == {"read"}


class Many(nn.Module):
    """So many parameters of so many elements, in one group."""

    def __init__(self, num_params: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(numel) for _ in range(num_params))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        weights = torch.stack(list(self.weights))
        return (weights * (tokens.sum() % 7 + 1)).tanh().square().mean() + 0.0 * targets.sum()


@pytest.mark.parametrize("policy", ["overlapped", "delayed"])
def test_small_tensors_share_their_requests(policy: str, swap_path: Path) -> None:
    """5,000 tensors of 1 KiB: requests are bounded by bytes and chunks, not by tensors."""
    num_params, numel = 5000, 256

    def many() -> Many:
        return Many(num_params, numel)

    zero = {"sub_group_size": None, "stage3_max_live_parameters": None, "stage3_prefetch_bucket_size": None}
    with faulty_disks() as disks, build(swap_path, policy, many, zero=zero) as engine:
        (disk,) = disks
        step(engine, 0)
        for number in range(1, 3):
            first = len(disk.requests)
            step(engine, number)
            requests = disk.requests[first:]
            nbytes = sum(request.nbytes for request in requests)
            assert nbytes >= 16 * num_params * numel * 2 - num_params * numel * 4
            assert len(requests) <= nbytes / MIB + 8, f"{len(requests)} requests for {nbytes / MIB:.1f} MiB"


def tiny_many() -> Many:
    return Many(10_000, 3)


@functools.cache
def plain_many() -> dict[str, Tensor]:
    """Weights after two steps of plain PyTorch."""
    torch.manual_seed(0)
    plain = Plain(tiny_many(), clipping=1.0)
    for number in range(2):
        plain.backward(plain(*batch(number)))
        plain.step()
    return dict(named_weights(plain.module))


@pytest.mark.parametrize("policy", ["barrier", "overlapped in backward"])
def test_ten_thousand_parameters_in_one_group(policy: str, swap_path: Path) -> None:
    with build(swap_path, policy, tiny_many, zero={"sub_group_size": None}, clipping=1.0) as engine:
        assert len(engine.optimizer.param_groups[0]["params"]) == 10_000
        assert train(engine, 2) is None
        found = dict(named_weights(engine.module))
        assert not differing(plain_many(), found)
    assert list(swap_path.iterdir()) == []
