"""The device's process group: gloo's results, and NCCL's order. A call returns at once, and its data come late, for the
streams that wait for it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.lagging.child import on_device
from tests.lagging.cuda import BACKEND, LaggingDevice
from tests.lagging.ranks import on_ranks
from tiered_zero.deepspeed.accelerator import CurrentAccelerator

LATE_S = 0.05
"""Of a kernel."""


def join(timeout_s: float = 60.0) -> tuple[int, torch.device]:
    """Initialize torch.distributed; return this rank and its device, which is made the current one."""
    backend = dist.get_default_backend_for_device("cuda")
    assert backend == BACKEND
    dist.init_process_group(f"cpu:gloo,cuda:{backend}", timeout=timedelta(seconds=timeout_s))
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    return dist.get_rank(), place


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1, numel + 1).mul(rank + 1).div(3).to(dtype)


def every_collective(place: str | torch.device, dtype: torch.dtype, group: Any = None) -> dict[str, torch.Tensor]:
    """Results of each, on the CPU."""
    rank, found = dist.get_rank(), {}
    own, whole = values(rank, 6, dtype).to(place), values(rank, 12, dtype).to(place)

    found["broadcast"] = own.clone()
    dist.broadcast(found["broadcast"], 1, group=group)
    for name in ("SUM", "MAX", "MIN", "PRODUCT"):
        found[name] = own.clone()
        dist.all_reduce(found[name], getattr(dist.ReduceOp, name), group=group)
    found["reduce"] = own.clone()
    dist.reduce(found["reduce"], 1, group=group)
    if rank == 0:
        del found["reduce"]  # gloo's own is undefined there
    found["all_gather_into_tensor"] = torch.zeros(12, dtype=dtype, device=place)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], own, group=group)
    rows = [torch.zeros_like(own) for _ in range(2)]
    dist.all_gather(rows, own, group=group)
    found["all_gather"] = torch.cat(rows)
    found["reduce_scatter_tensor"] = torch.zeros_like(own)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], whole, group=group)
    found["all_to_all_single"] = torch.zeros(12, dtype=dtype, device=place)
    dist.all_to_all_single(found["all_to_all_single"], whole, group=group)
    sizes = ([4, 1], [5, 3])
    found["all_to_all of parts"] = torch.zeros(sizes[0][rank] + sizes[1][rank], dtype=dtype, device=place)
    dist.all_to_all_single(
        found["all_to_all of parts"], whole[: sum(sizes[rank])].clone(), [sizes[0][rank], sizes[1][rank]], sizes[rank]
    )
    rows = [torch.zeros_like(own) for _ in range(2)]
    dist.gather(own, rows if rank == 1 else None, dst=1, group=group)
    found["gather"] = torch.cat(rows)
    found["scatter"] = torch.zeros_like(own)
    dist.scatter(found["scatter"], [own + 1, own + 2] if rank == 0 else None, src=0, group=group)
    found["message"] = own.clone()
    dist.send(own, 1, group=group) if rank == 0 else dist.recv(found["message"], 0, group=group)
    there = torch.zeros_like(own)
    operations = [dist.P2POp(dist.isend, own, 1 - rank, group), dist.P2POp(dist.irecv, there, 1 - rank, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    found["messages"] = there
    dist.barrier(group=group)
    return {name: value.cpu() for name, value in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@on_ranks
def test_results_are_those_of_gloo(device: LaggingDevice, dtype: torch.dtype):
    rank, place = join()
    expected = every_collective("cpu", dtype)
    for seed in (-1, 1, 2):
        device.set(delay_seed=seed)
        found = every_collective(place, dtype)
        wrong = [name for name, value in expected.items() if not torch.equal(value, found[name])]
        assert not wrong, (seed, wrong)
    assert torch.cuda.memory_allocated(1 - rank) == 0, "rank r uses device r alone"


@on_device
def test_a_script_finds_the_backend_of_its_device(device: LaggingDevice):
    assert CurrentAccelerator().communication_backend_name() == BACKEND
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(dist.Backend.default_device_backend_map, "cuda", "nccl")
        assert CurrentAccelerator().communication_backend_name() == "gloo", "nccl is not in this build"


def meet() -> None:
    """Wait for the other rank, on the CPU."""
    dist.all_reduce(torch.zeros(1))


@on_ranks
def test_a_call_returns_at_once_and_its_data_come_late(device: LaggingDevice):
    """In the order of the caller's stream, which alone waits."""
    rank, place = join()
    own, whole = torch.zeros(4, device=place), torch.zeros(8, device=place)
    torch.cuda.synchronize(place)
    device.set(kernel_s=LATE_S)
    if rank == 1:
        meet()  # rank 0 has called, and looked
    device.take_counts()
    own.fill_(rank + 1)
    work = dist.all_gather_into_tensor(whole, own, async_op=True)
    event = torch.Event("cuda")
    if rank == 0:
        with torch.Stream(place):
            assert whole.tolist() == [0.0] * 8, "a stream that has not waited sees what was there"
            device.take_counts()
            work.wait()
            event.record()
        assert not event.query() and not work.is_completed()
        assert not any(name.startswith("host_wait") for name in device.take_counts())
        meet()
    work.wait()
    assert whole.tolist() == [1.0] * 4 + [2.0] * 4, "it was launched behind the kernel that fills its input"
    dist.all_reduce(own)
    own.mul_(2)
    assert own.tolist() == [6.0] * 4, "a call without async_op is of the caller's stream"


@on_ranks
def test_calls_in_another_order_hang_until_the_timeout(device: LaggingDevice):
    rank, place = join()
    group = dist.new_group(backend=BACKEND, timeout=timedelta(seconds=1))
    x, y = torch.ones(4, device=place), torch.ones(4, device=place)
    meet()
    if rank == 0:
        dist.broadcast(x, 0, group=group)
    work = dist.all_reduce(y, group=group, async_op=True)
    with pytest.raises(RuntimeError, match=r"timeout: rank ., call 0 of all, (broadcast|all_reduce)"):
        torch.cuda.synchronize(place)
    with pytest.raises(dist.DistBackendError, match="timeout"):
        work.wait()
    with pytest.raises(dist.DistBackendError, match="has failed"):
        dist.all_reduce(x, group=group)


@on_ranks
def test_a_group_that_is_aborted_ends_what_hangs(device: LaggingDevice):
    rank, place = join()
    group = dist.new_group(backend=BACKEND)
    if rank == 0:
        work = dist.all_reduce(torch.ones(4, device=place), group=group, async_op=True)
        assert not work.is_completed()
        group.abort()
        torch.cuda.synchronize(place)
        with pytest.raises(dist.DistBackendError, match="aborted on rank 0 in call 0 of all, all_reduce"):
            work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


@on_ranks
def test_ranks_on_one_device_are_refused(device: LaggingDevice):
    join()
    x = torch.ones(4, device="cuda:0")
    found = []
    for act in (lambda: dist.all_reduce(x), x.tolist):  # the first raises too where the other rank came before
        try:
            act()
        except RuntimeError as error:
            found.append(str(error))
    assert found and all("Duplicate GPU detected" in text for text in found)


@on_ranks
def test_groups_have_streams_of_their_own(device: LaggingDevice):
    """What one group waits for, another does not."""
    rank, place = join()
    slow, quick = (dist.new_group(backend=BACKEND) for _ in range(2))
    x, y = torch.ones(4, device=place), torch.ones(4, device=place)
    if rank == 0:
        late = dist.all_reduce(x, group=slow, async_op=True)
    dist.all_reduce(y, group=quick, async_op=True).wait()
    assert y.tolist() == [2.0] * 4
    if rank == 0:
        assert not late.is_completed()
    dist.barrier(group=quick)
    if rank == 1:
        late = dist.all_reduce(x, group=slow, async_op=True)
    late.wait()
    assert x.tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match=r"must be CUDA|No backend"):
        dist.all_reduce(torch.ones(4), group=slow)
