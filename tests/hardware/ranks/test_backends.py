"""Names of torch.distributed that differ between the versions of torch."""

import runpy

import pytest
import torch.distributed as dist

from tiered_zero.hardware.ranks import launcher


def test_a_gather_has_the_name_that_this_torch_gives_it(monkeypatch: pytest.MonkeyPatch):
    """2.13's is called all_gather_single, that of 2.11 and 2.12 all_gather_into_tensor, of which 2.13 warns."""
    assert launcher.all_gather_single is getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    assert runpy.run_path(launcher.__file__)["all_gather_single"] is dist.all_gather_into_tensor
