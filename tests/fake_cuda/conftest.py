"""Tests under the fake CUDA runtime, chosen by name (`pytest -m cuda_wheel`); without CUDA in torch they fail."""

import pytest

from tests.fake_cuda.build import build, why_not
from tests.fake_cuda.child import FakeCudaProcesses


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCudaProcesses:
    """Processes whose device is the fake one."""
    if reason := why_not():
        pytest.fail(reason)
    return FakeCudaProcesses(build(tmp_path_factory.mktemp("fake_cuda")))
