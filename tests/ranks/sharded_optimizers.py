"""What ranks do to compare ZeroRedundancyOptimizer with torch's class: each function runs on every rank of a pool."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tiered_zero.errors import ConfigError, PlanError, RankError
from tiered_zero.layout.subgroups import Segment
from tiered_zero.optim import OffloadedOptimizer, ZeroRedundancyOptimizer, offloaded
from tiered_zero.optim.zero_redundancy import params_of


def torch_class() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchClass  # which warns as it is imported

    return TorchClass


def net() -> nn.Sequential:
    torch.manual_seed(5)
    sizes = (6, 30, 20, 20, 4)
    return nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [param for param in model.parameters() if param.dim() == 1], "lr": 3e-3},
    ]


def backward(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss = model(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()
    loss.backward()
    return loss.detach()


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().view(torch.int32).clone() for param in model.parameters()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, bits(one), bits(other)))


@contextmanager
def group() -> Iterator[int]:
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.barrier()


def assert_same_state(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, values in left["state"].items():
        assert values.keys() == right["state"][index].keys()
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(right["state"][index][name])), (index, name)


RULES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.Adam, {"lr": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.RMSprop, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.Adafactor, {"lr": 1e-2}),
]


def train_beside_torch(swap_path: str) -> None:
    """Every rule; buckets on and off; plain, host and nvme state: bitwise torch's class under DDP, with a schedule, two
    groups and clipping. Each loads the state that it has saved."""
    nvme = {"device": "nvme", "nvme_path": swap_path}
    with group() as rank:
        settings = [
            (rule, index % 2 == 0, (None, {"device": "cpu"}, nvme)[index % 3]) for index, rule in enumerate(RULES)
        ]
        settings += [(RULES[2], False, offload) for offload in (None, nvme)]
        settings.append((RULES[-1], False, {"device": "cpu"}))  # its defaults are not all options of its groups
        for (kind, options), buckets, offload in settings:
            plain, own = DistributedDataParallel(net()), DistributedDataParallel(net())
            reference = torch_class()(groups_of(plain), kind, parameters_as_bucket_view=buckets, **options)
            with ZeroRedundancyOptimizer(
                groups_of(own), kind, parameters_as_bucket_view=buckets, offload=offload, **options
            ) as optimizer:
                pairs = [
                    (model, one, torch.optim.lr_scheduler.StepLR(one, 2, 0.5))
                    for model, one in ((plain, reference), (own, optimizer))
                ]
                for step in range(4):
                    for model, one, schedule in pairs:
                        backward(model, step, rank)
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                        one.step()
                        schedule.step()
                        one.zero_grad()
                    assert same(plain, own), (kind, buckets, offload, step)
                assert_same_partition(reference, optimizer)
                reference.consolidate_state_dict(0)
                optimizer.consolidate_state_dict(0)
                if rank == 0:
                    assert_same_state(reference.state_dict(), optimizer.state_dict())
                elif optimizer.optim.state:
                    assert "has not been consolidated on this rank" in error_of(optimizer.state_dict, RuntimeError)
                saved = [optimizer.state_dict() if rank == 0 else None]
                dist.broadcast_object_list(saved)
                optimizer.load_state_dict(saved[0])


def train_one_parameter_on_two_ranks() -> None:
    """Rank 1 owns none. After steps with and without an lr and gradients, which count, both have the same weights."""
    with group():
        param, plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        pairs = [
            (param, ZeroRedundancyOptimizer([param], torch.optim.Adam, lr=0.1)),
            (plain, torch.optim.Adam([plain], lr=0.1)),
        ]
        for step, gradient in enumerate((1.0, 0.0, 2.0)):
            for each, optimizer in pairs:
                optimizer.param_groups[0]["lr"] = 0.1 if gradient else 0.0
                each.grad = torch.full((3,), gradient)
                optimizer.step()
            assert torch.equal(param, plain), step
        pairs[0][1].consolidate_state_dict(0)
        if dist.get_rank() == 0:
            assert_same_state(
                {**pairs[0][1].state_dict(), "param_groups": 0}, {**pairs[1][1].state_dict(), "param_groups": 0}
            )


def assert_same_partition(reference: Any, optimizer: ZeroRedundancyOptimizer) -> None:
    def shapes(parts: list[list[dict[str, Any]]]) -> list[list[list[torch.Size]]]:
        return [[[param.shape for param in group["params"]] for group in groups] for groups in parts]

    assert shapes(optimizer.partition_parameters()) == shapes(reference._partition_parameters())


def error_of(act: Callable[[], Any], error: type[Exception]) -> str:
    try:
        act()
    except error as raised:
        return str(raised)
    raise AssertionError(f"{error.__name__} was expected")


def move_state(offload: dict[str, Any] | None) -> None:
    """State goes from each of torch's class, a plain optimizer and ours to each other, and training on is the same."""
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    kind = torch.optim.AdamW

    def make(name: str, model: nn.Module) -> Any:
        if name == "plain":
            return kind(groups_of(model), **options)
        if name == "torch":
            return torch_class()(groups_of(model), kind, **options)
        return ZeroRedundancyOptimizer(groups_of(model), kind, offload=offload, **options)

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            backward(model, step, 0)
            optimizer.step()
            optimizer.zero_grad()

    with group() as rank:
        expected = net()
        train(expected, make("plain", expected), range(5))
        for source, target in (
            ("ours", "plain"),
            ("plain", "ours"),
            ("ours", "torch"),
            ("torch", "ours"),
            ("ours", "ours"),
        ):
            model = net()
            first = make(source, model)
            train(model, first, range(2))
            saved = io.BytesIO()
            for to in range(dist.get_world_size()):
                if source != "plain":
                    first.consolidate_state_dict(to)
                if rank == to:
                    torch.save(first.state_dict(), saved)
            saved.seek(0)
            state = torch.load(saved, weights_only=True)
            if source == "ours":
                first.close()
            before = copy.deepcopy(state)
            second = make(target, model)
            second.load_state_dict(state)
            if target == "ours":
                assert_same_state(before, state)  # what is loaded is left as it was
            train(model, second, range(2, 5))
            assert same(expected, model), (source, target)
            if target == "ours":
                second.close()


class Counting(torch.optim.SGD):
    """Adds a key to its groups, and takes an argument of its own."""

    def step(self, closure: Any = None, kwarg: list[int] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for param_group in self.param_groups:
            param_group["new_key"] = param_group.get("new_key", 0) + 1
        if kwarg is not None:
            kwarg.append(5)
        return loss


class WithoutClosure(torch.optim.SGD):
    """Its step takes no argument."""

    def step(self) -> Any:  # type: ignore[override]
        return super().step()


def follow_the_cases_of_torch(swap_path: str) -> None:
    """The cases of PyTorch's own tests of its class, anew: groups, closures, keys, trainability, constructor, join."""
    with group() as rank:
        world = dist.get_world_size()
        check_constructor(rank)
        # new keys of the local groups, changed values of the exposed ones, arguments of the local step
        params = [nn.Parameter(torch.ones(2)) for _ in range(2 * world)]
        optimizer = ZeroRedundancyOptimizer(params, Counting, lr=0.1)
        arguments: list[int] = []
        for param in params:
            param.grad = torch.ones(2)
        optimizer.step(None, kwarg=arguments)
        assert arguments == [5] and optimizer.param_groups[0]["new_key"] == 1
        optimizer.param_groups[0]["lr"] = 0.01
        loss = optimizer.step(closure=lambda: torch.tensor(3.0))
        assert float(loss) == 3.0 and optimizer.optim.param_groups[0]["lr"] == 0.01
        assert all(torch.allclose(param, torch.full((2,), 0.89)) for param in params)
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
        alone = nn.Parameter(torch.ones(1))
        alone.grad = torch.ones(1)
        ZeroRedundancyOptimizer([alone], WithoutClosure, lr=0.1).step()
        assert torch.allclose(alone, torch.tensor([0.9]))
        # a group is added; those of before stay on their ranks, and keep what a scheduler has set since the last step
        optimizer.param_groups[0]["lr"] = 0.5
        assert optimizer.local_state_dict()["param_groups"][0]["lr"] == 0.5
        optimizer.param_groups[0]["lr"] = 0.25
        before = [
            {id(param) for group in groups for param in group["params"]} for groups in optimizer.partition_parameters()
        ]
        added = [nn.Parameter(torch.ones(size)) for size in (9, 3, 5, 1)]
        optimizer.add_param_group({"params": added, "lr": 1.0})
        assert [each["lr"] for each in optimizer.param_groups] == [0.25, 1.0]
        parts = optimizer.partition_parameters()
        assert all(
            ids <= {id(p) for group in groups for p in group["params"]}
            for ids, groups in zip(before, parts, strict=True)
        )
        for param in added:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert all(torch.equal(param, torch.zeros_like(param)) for param in added)
        assert len(optimizer.optim.param_groups) == 2
        check_few_parameters(swap_path)
        check_trainability(swap_path)
        check_join(rank, world)
        check_new_groups(rank, world)


def check_constructor(rank: int) -> None:
    weight = nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD
    assert "iterable of Tensors" in error_of(lambda: ZeroRedundancyOptimizer(weight, sgd, lr=0.1), TypeError)
    assert "empty parameter list" in error_of(lambda: ZeroRedundancyOptimizer([], sgd, lr=0.1), ValueError)
    assert "only optimize Tensors" in error_of(lambda: ZeroRedundancyOptimizer([weight, 1], sgd, lr=0.1), TypeError)
    sparse = [torch.ones(2, 2).to_sparse().requires_grad_()]
    assert "dense parameters" in error_of(lambda: ZeroRedundancyOptimizer(sparse, sgd, lr=0.1), ValueError)
    assert "functional" in error_of(lambda: ZeroRedundancyOptimizer([weight], nn.Linear, lr=0.1), ValueError)  # type: ignore[arg-type]
    overlapped = error_of(lambda: ZeroRedundancyOptimizer([weight], sgd, overlap_with_ddp=True, lr=0.1), ConfigError)
    assert "first two or three" in overlapped
    optimizer = ZeroRedundancyOptimizer(iter([weight]), sgd, group=dist.group.WORLD, lr=0.1)
    assert optimizer.group is optimizer.process_group is dist.group.WORLD
    assert (optimizer.rank, optimizer.global_rank) == (rank, rank)
    assert optimizer.defaults["lr"] == 0.1 and optimizer.state_dict()["state"] == {}
    torch.optim.lr_scheduler.OneCycleLR(
        ZeroRedundancyOptimizer([weight], torch.optim.AdamW, lr=0.1), max_lr=0.1, total_steps=10
    )


def mixed_net(third: torch.dtype = torch.float64) -> nn.Sequential:
    """Layers of several dtypes, so that each rank has some of all."""
    model = net()
    for layer, dtype in zip(model, (torch.float32, torch.bfloat16, third, torch.float16), strict=True):
        layer.to(dtype)
    return model


def train_mixed_dtypes(is_alone: bool = False) -> None:
    """Parameters of several dtypes: bitwise the plain optimizer; also once state is reset, and in a process without a
    process group."""
    with contextlib.nullcontext() if is_alone else group():
        plain, own = mixed_net(), mixed_net()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = ZeroRedundancyOptimizer(own.parameters(), torch.optim.AdamW, lr=1e-2)
        for step in range(5):
            generator = torch.Generator().manual_seed(step)
            for left, right in zip(plain.parameters(), own.parameters(), strict=True):
                left.grad = torch.randn(left.shape, generator=generator).to(left.dtype)
                right.grad = left.grad.clone()
            for one in (reference, optimizer):
                if step == 3:
                    one.state = defaultdict(dict)
                one.step()
            assert all(map(torch.equal, plain.parameters(), own.parameters())), step
        optimizer.consolidate_state_dict(0)
        if optimizer.rank == 0:
            assert_same_state(reference.state_dict(), {**optimizer.state_dict()})


def train_mixed_dtypes_offloaded() -> None:
    """Parameters of 32 and 16 bits: bitwise those of the plain optimizer over fp32 masters, also after a reset."""
    with group():
        own = mixed_net(torch.float32)
        plain = copy.deepcopy(own).float()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        optimizer = ZeroRedundancyOptimizer(own.parameters(), torch.optim.AdamW, offload={"device": "cpu"}, lr=1e-2)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            for left, right in zip(plain.parameters(), own.parameters(), strict=True):
                right.grad = torch.randn(left.shape, generator=generator).to(right.dtype)
                left.grad = right.grad.float()
            for one in (reference, optimizer):
                if step == 2:
                    one.state = defaultdict(dict)
                one.step()
            for left, right in zip(plain.parameters(), own.parameters(), strict=True):
                assert torch.equal(left.to(right.dtype), right), step


def check_trainability(swap_path: str) -> None:
    """A parameter is frozen and thawed: the bits of a plain optimizer, no state lost."""
    for offload in (None, {"device": "nvme", "nvme_path": swap_path}):
        plain, own = net(), net()
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        with ZeroRedundancyOptimizer(own.parameters(), torch.optim.AdamW, offload=offload, lr=1e-2) as optimizer:
            for step in range(6):
                for model, one in ((plain, reference), (own, optimizer)):
                    model[1].requires_grad_(step not in (2, 3))
                    backward(model, step, 0)
                    one.step()
                    one.zero_grad()
                assert same(plain, own), step


def check_few_parameters(swap_path: str) -> None:
    """A rank that steps nothing takes part all the same, and gets a parameter later."""
    weight, later = nn.Parameter(torch.ones(3)), [nn.Parameter(torch.ones(2)) for _ in range(8)]
    offload = {"device": "nvme", "nvme_path": swap_path}
    with ZeroRedundancyOptimizer([weight], torch.optim.AdamW, offload=offload, lr=0.5, weight_decay=0) as optimizer:
        weight.grad = torch.ones(3)
        optimizer.step()
        optimizer.add_param_group({"params": later})
        for param in later:
            param.grad = torch.ones(2)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.zeros(3), rtol=0, atol=1e-6)
        for param in later:
            torch.testing.assert_close(param.detach(), torch.full((2,), 0.5), rtol=0, atol=1e-6)
        optimizer.consolidate_state_dict(0)
        assert optimizer.rank or len(optimizer.state_dict()["state"]) == 9


def check_join(rank: int, world: int) -> None:
    """Rank r has r + 3 batches: all ranks end with the same weights, which were stepped as often as the last one."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(rank + 3):
            backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    found = [torch.empty_like(next(model.parameters())) for _ in range(world)]
    dist.all_gather(found, next(model.parameters()).detach().contiguous())
    assert all(torch.equal(found[0], other) for other in found)


def check_new_groups(rank: int, world: int) -> None:
    """A group of some ranks, in which ranks have other numbers."""
    if world < 2:
        return
    members = [world - 2, world - 1]
    some = dist.new_group(members)
    if rank not in members:
        return
    params = [nn.Parameter(torch.full((4,), float(rank))) for _ in range(3)]
    for param in params:
        param.grad = torch.zeros(4)
    optimizer = ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=some, lr=0.1, momentum=0.9)
    optimizer.step()
    owners = [
        next(r for r, g in enumerate(optimizer.partition_parameters()) if any(p is q for q in g[0]["params"]))
        for p in params
    ]
    assert [float(param[0]) for param in params] == [float(members[owner]) for owner in owners]
    optimizer.consolidate_state_dict(1)
    if optimizer.rank == 1:
        assert len(optimizer.state_dict()["state"]) == 3
    assert (optimizer.rank, optimizer.global_rank) == (members.index(rank), rank)


def broadcast_in_the_order_of_updates() -> None:
    """The last sub-group is updated only once the first parameter is broadcast: where it is not, the wait ends in an
    error."""
    size, offloaded._IN_PLACE_NUMEL = offloaded._IN_PLACE_NUMEL, 1 << 12
    with group() as rank:
        params = [nn.Parameter(torch.full((1 << 12,), float(rank))) for _ in range(2 * 3)]
        for param in params:
            param.grad = torch.ones_like(param)
        host = {"device": "cpu"}
        with ZeroRedundancyOptimizer(params, torch.optim.SGD, offload=host, lr=1.0, momentum=0.9) as optimizer:
            assert isinstance(optimizer.optim, OffloadedOptimizer)
            source, begun = optimizer.optim._running().params, threading.Event()
            part, broadcast = source.part, optimizer._ranks.broadcast

            def late_part(segment: Segment) -> torch.Tensor:
                assert segment.unit.index < 2 or begun.wait(60), "no parameter is broadcast under the update"
                return part(segment)

            def noted(tensor: torch.Tensor, owner: int) -> Any:
                begun.set()
                return broadcast(tensor, owner)

            source.part, optimizer._ranks.broadcast = late_part, noted  # type: ignore[method-assign]
            optimizer.step()
            for owner, groups in enumerate(optimizer.partition_parameters()):
                assert all(torch.equal(p, torch.full_like(p, owner - 1.0)) for p in params_of(groups))
    offloaded._IN_PLACE_NUMEL = size


def open_together(swap_path: str) -> None:
    """One rank cannot open its tiers, as where a disk has no room for all of them: none keeps any, and all say so."""
    offload = {"device": "nvme", "nvme_path": swap_path}
    with group() as rank:
        params = [nn.Parameter(torch.ones(1 << 14)) for _ in range(4)]

        def make() -> ZeroRedundancyOptimizer:
            return ZeroRedundancyOptimizer(params, torch.optim.AdamW, offload=offload, lr=1e-2)

        if rank:
            offload["host_memory_limit"] = "1KiB"
        assert "host_memory_limit" in error_of(make, PlanError if rank else RankError)
        dist.barrier()
        assert not os.listdir(swap_path)
        dist.barrier()  # else the other rank opens its tiers first
        offload.pop("host_memory_limit", None)
        with make() as optimizer:
            if rank:
                params[1].data = torch.ones(1 << 15)[::2]  # this rank alone opens anew
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            assert all(torch.equal(params[0], param) for param in params)
