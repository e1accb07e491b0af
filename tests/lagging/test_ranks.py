"""Two ranks with a lagging device each: the bits, the files and the errors of two ranks on the CPU."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiered_zero
from tests.lagging.cuda import LaggingDevice
from tests.lagging.faults import lane_does_not_wait
from tests.lagging.ranks import LaggingRanks
from tests.ranks import routed
from tests.ranks.routed import Run
from tests.support.models import ParityGPT, batch
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import ConfigError, RankError
from tiered_zero.hardware.device.streams import StreamAccelerator
from tiered_zero.hardware.ranks.process_groups import make_collectives
from tiered_zero.hardware.ranks.rank_failures import CollectiveTransfer
from tiered_zero.hardware.runtime import build_accelerator, choose_device


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained. `placement`: of parameters and of state."""

    stage: int
    placement: tuple[str, str] = ("none", "none")
    accumulation: int = 1
    clipping: float = 0.0
    precision: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)


def rank() -> int:
    return int(os.environ["RANK"])


def begin(case: Case, where: str, **runtime: Any) -> Any:
    torch.manual_seed(3)
    model = ParityGPT(num_blocks=1)
    params, is_half = [param for param in model.parameters() if param.requires_grad], case.precision == "bf16"
    # AdamW's square root is not the same with 16-bit gradients (see tests/parity/test_half.py)
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9) if is_half else torch.optim.AdamW(params, lr=3e-3)
    offloads = ("offload_param", "offload_optimizer")
    tiers = {name: {"device": tier} for name, tier in zip(offloads, case.placement, strict=True)}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clipping,
        "bf16": {"enabled": is_half},
        "zero_optimization": {"stage": case.stage, **tiers, **case.zero},
        "tiered_zero": {
            "device": where, "host_memory_limit": "1GiB", "comm_timeout_s": 60, "debug_poison": True, **runtime,
        },
    }  # fmt: skip
    return tiered_zero.initialize(model=model, optimizer=optimizer, config=config)[0]


def train(engine: Any, case: Case, where: str, steps: range = range(3)) -> list[Any]:
    """Return what a rank sees. At stages 0 to 2 a layer is used by one rank alone."""
    seen = []
    with sdpa_kernel(SDPBackend.MATH):
        for step in steps:
            for micro in range(case.accumulation):
                tokens, targets = batch((step * case.accumulation + micro) * 2 + rank())
                detour = (step + (rank() if case.stage < 3 else 0)) % 2 == 1
                loss = engine(tokens.to(where), targets.to(where), detour=detour)
                engine.backward(loss)
                engine.step()
                seen.append(loss.item())
            seen.append(engine.get_global_grad_norm())
        with torch.no_grad():
            seen.append(engine(tokens.to(where), targets.to(where)).item())
    return seen


def change_by_hand(engine: Any) -> None:
    weight = engine.module.get_parameter("norm.weight")
    with tiered_zero.gathered(weight, modify=True, modifier_rank=1), torch.no_grad():
        weight.mul_(2.0 + rank())


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in engine.module.state_dict().items()}


def follow(case: Case, where: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    engine = begin(case, where)
    seen = train(engine, case, where)
    change_by_hand(engine)
    seen += train(engine, case, where, range(3, 4))
    for row in (row for rows in engine.memory_report().values() for row in rows.values()):
        assert row["peak"] <= row["planned"], engine.memory_report()
    weights = weights_of(engine)
    engine.close()
    return seen, weights


def differences(case: Case) -> list[str]:
    """Of ranks on devices, beside ranks on the CPU."""
    (expected_seen, expected), (seen, weights) = follow(case, "cpu"), follow(case, "cuda")
    wrong = [name for name, value in expected.items() if not torch.equal(value, weights[name])]
    return wrong + [
        f"{i}: {pair}" for i, pair in enumerate(zip(expected_seen, seen, strict=True)) if pair[0] != pair[1]
    ]


CASES = {
    "stage 0": Case(stage=0, accumulation=2, clipping=0.05, zero={"overlap_comm": True}),
    "stage 1": Case(stage=1, clipping=0.05),
    "stage 2": Case(
        stage=2, placement=("none", "cpu"), accumulation=2, clipping=0.05, zero={"reduce_bucket_size": 2000}
    ),
    "stage 3": Case(stage=3, placement=("cpu", "cpu"), clipping=0.05),
    "stage 3, bf16": Case(stage=3, placement=("none", "cpu"), precision="bf16", accumulation=2),
}


def compare(device: LaggingDevice, name: str) -> list[str]:
    device.set(delay_seed=10 + rank())
    return differences(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_devices_have_the_bits_of_the_cpu(lagging_ranks: LaggingRanks, name: str) -> None:
    assert lagging_ranks.run(compare, name=name) == [[], []]


# -- one queue for all streams: a device has fewer than streams may be made ------------------------------------------


def route_in_one_queue(device: LaggingDevice, run: Run) -> list[str]:
    """Which weights and losses differ from those of ranks on the CPU."""
    expected = routed.train_tiered(run, "")
    device.set(one_queue=1, delay_seed=30 + rank())
    found = routed.train_tiered(replace(run, runtime={"device": "cuda", "comm_timeout_s": 20}), "")
    wrong = [name for name, value in expected["weights"].items() if not torch.equal(value, found["weights"][name])]
    return wrong + [f"losses {found['losses']}"] * (found["losses"] != expected["losses"])


@pytest.mark.parametrize("lists", [False, True])
def test_ranks_with_other_experts_end_where_all_streams_share_a_queue(lagging_ranks: LaggingRanks, lists: bool) -> None:
    """A collective in the queue holds up those behind it, so all ranks have to launch them in one order. `lists`: what
    is used is no module, so that each rank's own gradients alone say which of them are to come."""
    run = Run(zero={"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 2048}, lists=lists)
    assert lagging_ranks.run(route_in_one_queue, run=run) == [[], []]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resume_elsewhere(device: LaggingDevice, stage: int, path: Path) -> list[str]:
    """Two steps on a device, one on the CPU, one on a device: each goes on from the files of the one before."""
    case = Case(stage=stage, placement=("none", "cpu"))
    device.set(delay_seed=20 + rank())
    expected = begin(case, "cpu")
    seen = [train(expected, case, "cpu", steps) for steps in (range(2), range(2, 3), range(3, 4))]
    for number, where in enumerate(("cuda", "cpu", "cuda")):
        engine = begin(case, where)
        if number:
            engine.load_checkpoint(str(path))
        first = (0, 2, 3)[number]
        assert train(engine, case, where, range(first, (2, 3, 4)[number])) == seen[number]
        engine.save_checkpoint(str(path))
        found = weights_of(engine)
        engine.close()
    wrong = [name for name, value in weights_of(expected).items() if not torch.equal(value, found[name])]
    expected.close()
    return wrong


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_of_devices_and_of_the_cpu_are_one(lagging_ranks: LaggingRanks, stage: int, tmp_path: Path) -> None:
    assert lagging_ranks.run(resume_elsewhere, stage=stage, path=tmp_path) == [[], []]


# -- what fails --------------------------------------------------------------------------------------------------------


def connect(timeout_s: float) -> tuple[Any, Any]:
    """Return collectives and the accelerator of this rank."""
    ranks = make_collectives(timeout_s)
    ranks.open()
    choose_device(ranks, "cuda")
    accelerator = build_accelerator("cuda")
    ranks.connect_device(accelerator)
    return ranks, accelerator


def reduce_alone(device: LaggingDevice, late_s: float) -> str:
    """Rank 1 makes no reduction; rank 0 waits for its own in a call of torch's. NCCL ends the process then."""
    ranks, accelerator = connect(3.0)
    text = ""
    if rank() == 0:
        bucket = torch.ones(8, device=accelerator.device)
        try:
            after = [accelerator.record_compute()]
            accelerator.wait_on_compute(ranks.reduce_scatter(bucket, bucket[4:].clone(), "some gradients", after=after))
            bucket.tolist()
        except RuntimeError as error:
            text = str(error)
    else:
        time.sleep(late_s)
    ranks.close()
    accelerator.close()
    return text


def test_the_backend_ends_a_collective_that_hangs_after_comm_timeout_s(lagging_ranks: LaggingRanks) -> None:
    text, _ = lagging_ranks.run(reduce_alone, late_s=8.0)
    assert "Watchdog caught collective operation timeout" in text and "ran for 3000 milliseconds" in text, text


def gather_behind_a_failure(device: LaggingDevice, order: bool) -> tuple[str, list[float]]:
    """What comes before the first of two gathers fails on rank 1, which makes the second as well."""
    ranks, accelerator = connect(10.0)

    def read() -> None:
        if rank() == 1:
            raise OSError("the disk of this rank is broken")

    units, gathers = [torch.full((4,), -1.0, device=accelerator.device) for _ in range(2)], []
    for number, flat in enumerate(units):
        shard = torch.full((2,), float(number), device=accelerator.device)
        after = [accelerator.lane("fetch").submit(read) if number == 0 else accelerator.record_compute()]
        gathers.append(ranks.all_gather(flat, shard, after=after, order=f"unit {number}" if order else None))
    text = "no error"
    try:
        for gather in gathers[::-1] if rank() == 1 else gathers:
            gather.wait()
    except (OSError, RankError, RuntimeError) as error:
        text = str(error)
        ranks.fail(text)
    ranks.close()
    accelerator.close()
    return text, units[0].tolist()


@pytest.mark.parametrize("order", [False, True])
def test_a_gather_that_fails_on_one_rank_never_meets_the_next(lagging_ranks: LaggingRanks, order: bool) -> None:
    (first, unit), (second, _) = lagging_ranks.run(gather_behind_a_failure, order=order)
    assert second == "the disk of this rank is broken", "the second gather is not made where the first has failed"
    assert first != "no error"
    assert 1.0 not in unit, "bytes of the second"


def gather_other_units(device: LaggingDevice) -> tuple[str, bool]:
    """Units of one size: without a comparison each rank would have a part of each. Returns the error, and whether no
    byte of another rank was received."""
    ranks, accelerator = connect(60.0)
    flat = torch.full((4,), -1.0, device=accelerator.device)
    shard = torch.full((2,), float(rank()), device=accelerator.device)
    after = [accelerator.record_compute()]
    text = "no error"
    try:
        accelerator.wait_on_compute(ranks.all_gather(flat, shard, after=after, order=f"block {rank()}"))
    except RankError as error:
        text = str(error)
        ranks.fail(text)
    ranks.close()
    accelerator.close()
    return text, float(1 - rank()) not in flat.tolist()


def test_units_of_one_size_are_never_mixed(lagging_ranks: LaggingRanks) -> None:
    for text, is_apart in lagging_ranks.run(gather_other_units):
        assert "now rank 0 gathers block 0, as collective 3, rank 1 gathers block 1, as collective 3" in text, text
        assert is_apart


def close_beside_a_stopped_rank(device: LaggingDevice, order: bool, path: Path) -> bool:
    """Rank 1 gathers nothing, and closes when rank 0 has closed; return whether it has before rank 1 gives up."""
    ranks, accelerator = connect(120.0)
    if rank() == 1:
        deadline_s = time.monotonic() + 75
        while not path.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
    else:
        flat = torch.zeros(4, device=accelerator.device)
        ranks.all_gather(flat, flat[:2], after=[accelerator.record_compute()], order="unit 1" if order else None)
    has_closed = path.exists()
    ranks.close()
    accelerator.close()
    path.touch()
    return has_closed or rank() == 0


@pytest.mark.parametrize("order", [False, True])
def test_a_rank_closes_though_its_gather_hangs(lagging_ranks: LaggingRanks, order: bool, tmp_path: Path) -> None:
    assert lagging_ranks.run(close_beside_a_stopped_rank, order=order, path=tmp_path / "closed") == [True, True]


def raise_in_backward(device: LaggingDevice) -> str:
    def fail(_: torch.Tensor) -> None:
        raise OSError("the data has ended")

    case = Case(stage=3, placement=("none", "cpu"))
    engine = begin(case, "cuda")
    try:
        train(engine, case, "cuda", range(1))
        if rank() == 1:
            engine.module.get_parameter("norm.weight").register_hook(fail)
        train(engine, case, "cuda", range(1, 3))
    except (OSError, RankError) as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def test_the_error_of_one_rank_ends_the_others_before_their_next_gather(lagging_ranks: LaggingRanks) -> None:
    """Which is compared on the host. At other stages a rank may wait for its device then, until the backend, or the
    launcher, ends it."""
    text, _ = lagging_ranks.run(raise_in_backward)
    assert "Rank 1 failed" in text and "the data has ended" in text


def ask_for(device: LaggingDevice, where: str, local_rank: int | None) -> str:
    if local_rank is not None:
        os.environ["LOCAL_RANK"] = str(local_rank + rank())
    try:
        begin(Case(stage=0), where)
    except (ConfigError, RankError) as error:
        return str(error)
    return "no error"


def test_each_rank_has_a_device_of_its_own(lagging_ranks: LaggingRanks) -> None:
    for text in lagging_ranks.run(ask_for, where="cuda:1", local_rank=None):
        assert "found ranks 0, 1 on cuda:1" in text and "LOCAL_RANK" in text
    for text in lagging_ranks.run(ask_for, where="cuda", local_rank=1):
        assert "expected cuda:2 for the rank with LOCAL_RANK 2" in text and "--nproc-per-node 2" in text


def ask_without_backend(device: LaggingDevice) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dist.Backend.default_device_backend_map, "cuda", "nccl")
        return ask_for(device, "cuda", None)


def test_a_device_without_a_backend_is_refused(lagging_ranks: LaggingRanks) -> None:
    for text in lagging_ranks.run(ask_without_backend):
        assert "its backend nccl is not in this build" in text


# -- planted faults ----------------------------------------------------------------------------------------------------


def compute_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    wait = StreamAccelerator.wait_on_compute

    def wait_for_launch(self: StreamAccelerator, transfer: Transfer) -> None:
        if isinstance(transfer, CollectiveTransfer):
            transfer.check_launched()
        else:
            wait(self, transfer)

    patch.setattr(StreamAccelerator, "wait_on_compute", wait_for_launch)


FAULTS = {
    "compute does not wait for gathers": (compute_does_not_wait, {"kernel_s": 1e-3}, Case(stage=3)),
    "gathers do not wait": (
        lane_does_not_wait("collectives"),
        {"h2d_bytes_per_s": 4e6},
        Case(stage=3, placement=("cpu", "cpu")),
    ),
    "reductions do not wait for compute": (
        lane_does_not_wait("collectives"),
        {"kernel_s": 1e-3},
        Case(stage=2, placement=("none", "cpu")),
    ),
}


def train_with(device: LaggingDevice, name: str, planted: bool) -> list[str]:
    plant, settings, case = FAULTS[name]
    device.set(**settings)
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            plant(patch)
        return differences(case)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(lagging_ranks: LaggingRanks, name: str) -> None:
    outcomes = lagging_ranks.outcomes(train_with, name=name, planted=True)
    assert any(each.value or each.error for each in outcomes), outcomes
    assert lagging_ranks.run(train_with, name=name, planted=False) == [[], []]


# -- a crash, after which the processes start anew ------------------------------------------------------------------


def die_between_steps(device: LaggingDevice, stage: int) -> str:
    case = Case(stage=stage, placement=("none", "cpu"))
    engine = begin(case, "cuda")
    train(engine, case, "cuda", range(1))
    if rank() == 1:
        os._exit(9)
    try:
        train(engine, case, "cuda", range(1, 3))
    except RankError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


def test_a_rank_that_dies_ends_the_others(lagging_ranks: LaggingRanks) -> None:
    first, second = lagging_ranks.outcomes(die_between_steps, stage=3)
    assert second.error == "exit 9" and "the connection to another rank was lost" in first.value, (first, second)
