"""Machine facts, from made-up /proc and cgroup trees and from this machine."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from tiered_zero.hardware.probe import (
    available_device_nbytes,
    available_host_nbytes,
    cgroup_memory_limit_nbytes,
    huge_pages,
    total_host_nbytes,
)
from tiered_zero.sizes import GIB


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """write(path, text) into a made-up root; proc and cgroup folders of it. psutil reads this proc, too."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    (tmp_path / "cgroup").mkdir()
    sizes = {"MemTotal": 64 * GIB, "MemAvailable": 40 * GIB}
    sizes |= dict.fromkeys(("MemFree", "Buffers", "Cached", "Shmem", "Active", "Inactive"), GIB)
    lines = [f"{name}: {nbytes // 1024} kB" for name, nbytes in sizes.items()]
    write("proc/meminfo", "\n".join([*lines, "HugePages_Total: 0"]))
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    return write, tmp_path / "proc", tmp_path / "cgroup"


def test_without_a_cgroup_it_is_mem_available(tree):
    _, proc, cgroup = tree
    assert available_host_nbytes(proc, cgroup) == 40 * GIB
    assert total_host_nbytes() == 64 * GIB


def test_v2_limit_less_usage_where_page_cache_counts_as_free(tree):
    write, proc, cgroup = tree
    write("proc/self/cgroup", "0::/job/step")
    write("cgroup/job/step/memory.max", 16 * GIB)
    write("cgroup/job/step/memory.current", 10 * GIB)
    assert available_host_nbytes(proc, cgroup) == 6 * GIB
    write("cgroup/job/step/memory.stat", f"anon 5\ninactive_file {3 * GIB}")
    assert available_host_nbytes(proc, cgroup) == 9 * GIB


def test_the_tightest_ancestor_binds(tree):
    write, proc, cgroup = tree
    write("proc/self/cgroup", "0::/job/step")
    write("cgroup/job/step/memory.max", "max")
    write("cgroup/job/step/memory.current", GIB)
    write("cgroup/job/memory.max", 8 * GIB)
    write("cgroup/job/memory.current", 3 * GIB)
    assert available_host_nbytes(proc, cgroup) == 5 * GIB
    assert cgroup_memory_limit_nbytes(proc, cgroup) == 8 * GIB
    write("cgroup/job/memory.max", "max")
    assert cgroup_memory_limit_nbytes(proc, cgroup) is None


def test_v1_and_a_path_that_the_container_does_not_see(tree):
    write, proc, cgroup = tree
    write("proc/self/cgroup", "9:cpuset:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/")
    write("cgroup/memory/memory.limit_in_bytes", 4 * GIB)
    write("cgroup/memory/memory.usage_in_bytes", GIB)
    write("cgroup/memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}")
    assert available_host_nbytes(proc, cgroup) == 3.5 * GIB


def test_v1_without_a_limit_is_mem_available(tree):
    write, proc, cgroup = tree
    write("proc/self/cgroup", "4:memory:/")
    write("cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    write("cgroup/memory/memory.usage_in_bytes", GIB)
    assert available_host_nbytes(proc, cgroup) == 40 * GIB


def test_over_the_limit_is_none_left(tree):
    write, proc, cgroup = tree
    write("proc/self/cgroup", "0::/")
    write("cgroup/memory.max", GIB)
    write("cgroup/memory.current", 2 * GIB)
    assert available_host_nbytes(proc, cgroup) == 0


def test_this_machine():
    assert 0 < available_host_nbytes() <= total_host_nbytes()


@pytest.mark.parametrize(
    ("text", "found"),
    [("[always] madvise never", "always"), ("always [madvise] never", "madvise"), ("always madvise [never]", "never")],
)
def test_the_huge_pages_in_force_stand_in_brackets(tree, tmp_path, text, found):
    assert huge_pages(tmp_path) is None
    tree[0]("kernel/mm/transparent_hugepage/enabled", text)
    assert huge_pages(tmp_path) == found


def test_a_gpu_has_what_is_free_what_torch_keeps_and_what_the_model_leaves(monkeypatch):
    fakes = {
        "device_count": lambda: 2,
        "current_device_index": lambda: 1,
        "get_memory_info": lambda index: ((index + 1) * 10 * GIB, 80 * GIB),
        "memory_reserved": lambda index: 3 * GIB,
        "memory_allocated": lambda index: 2 * GIB,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert available_device_nbytes(torch.device("cuda")) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    assert available_device_nbytes(torch.device("cpu")) is None and available_device_nbytes(torch.device("xpu")) is None

    def tensor(place):
        return SimpleNamespace(device=torch.device(place), nbytes=GIB)

    own = [tensor("cuda:1"), tensor("cuda:1"), tensor("cuda:0"), tensor("cpu")]
    assert available_device_nbytes(torch.device("cuda"), own) == 23 * GIB
    assert available_device_nbytes(torch.device("cuda:0"), own) == 12 * GIB
    assert available_device_nbytes(torch.device("cuda:2"), own) is None
