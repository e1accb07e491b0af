"""Names of torch.distributed that differ between the versions of torch."""

import runpy

import pytest
import torch
import torch.distributed as dist

from tiered_zero.hardware.ranks import backends
from tiered_zero.hardware.ranks.model_parallel import ModelParallelRanks


def test_a_gather_has_the_name_that_this_torch_gives_it(monkeypatch: pytest.MonkeyPatch):
    """2.13's is called all_gather_single, that of 2.11 and 2.12 all_gather_into_tensor, of which 2.13 warns."""
    assert backends.all_gather_single is getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    assert runpy.run_path(backends.__file__)["all_gather_single"] is dist.all_gather_into_tensor


def test_ranks_that_split_a_module_gather_without_a_warning():
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = torch.arange(3.0)
        assert torch.equal(ModelParallelRanks(dist.group.WORLD).gather(part), part)
    finally:
        if own:
            dist.destroy_process_group()
