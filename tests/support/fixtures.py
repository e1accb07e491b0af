"""What all tests share: a fixed start, a swap directory on a real disk, and a look for what they leave."""

import gc
import logging
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from hypothesis import settings

from tests.ranks.pool import RankPool
from tests.support.children import NUM_THREADS
from tests.support.collection import import_tests, put_long_files_first
from tests.support.failed_tests import end_failed_test
from tests.support.imports import freeze_imports
from tests.support.inspection.insides import swap_dir
from tests.support.native_build import UPDATE_SOURCE, compile_shared
from tests.support.rings import mark_full
from tiered_zero.io.select import filesystem_type, is_local
from tiered_zero.native import find_library
from tiered_zero.native.update import supported_levels

torch.set_num_threads(NUM_THREADS)
settings.register_profile("tiered_zero", deadline=None, derandomize=True, database=None)
settings.load_profile("tiered_zero")

# A run started in the background may inherit an ignored SIGINT, and so would the children whose end by it is tested.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """See `import_tests`."""
    import_tests(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """See `mark_full`."""
    mark_full(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See `put_long_files_first`. Of the tests that were chosen."""
    put_long_files_first(items)


def pytest_collection_finish() -> None:
    """See `freeze_imports`."""
    freeze_imports()


seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
"""The first also formats the stack, once for each kind of device that is not there."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """See `end_failed_test`. Before the fixtures of the test end."""
    report = yield
    if report.failed and call.excinfo is not None and not item.config.getoption("usepdb"):
        end_failed_test(call.excinfo.value)
    return report


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    random.seed(0)
    numpy.random.seed(0)
    seed(0)
    yield
    logging.getLogger("tiered_zero").setLevel(logging.NOTSET)  # commands that ran in this process have set it


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The update kernel, built from the checkout, or as installed where there is no compiler."""
    if shutil.which("cc") is None and (installed := find_library("_update")) is not None:
        path = installed
    else:
        path = compile_shared(UPDATE_SOURCE, tmp_path_factory.mktemp("native") / "_update.so")
    if not supported_levels(path):
        pytest.skip("the kernel has no code for this processor")
    return path


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The processes of ranks that tests share."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models so small that two OpenMP threads would spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def swap_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory, mode 0700, on a real disk: /tmp is memory on many machines, /var/tmp is not.

    Where all disks are shared ones no run is known to be dead; tests take them for local.
    """
    if not is_local(filesystem_type(tmp_path)):
        monkeypatch.setattr(swap_dir, "filesystem_type", lambda path: "ext4")
    with tempfile.TemporaryDirectory(dir="/var/tmp" if _in_memory(tmp_path) else tmp_path) as path:
        yield Path(path)


def _in_memory(path: Path) -> bool:
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype in ("tmpfs", "ramfs")


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails the test if a thread started in it still runs, or a file opened in it is still open, a minute after."""

    def held() -> set[object]:
        threads = (thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))
        return {*threads, *((file.path, file.fd) for file in psutil.Process().open_files())}

    before = held()
    yield
    deadline_s = time.monotonic() + 60
    gc.collect()
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left, f"left behind: {left}"
    gc.freeze()  # what a failed engine leaves, and pytest's reports, the collections of later tests need not walk
