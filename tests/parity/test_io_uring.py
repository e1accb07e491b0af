"""Everything on NVMe through io_uring: the same bits as without any disk, whichever way the updates run."""

import logging
from pathlib import Path

import pytest

from tests.io.conftest import io_uring_refusal
from tests.support.faulty_runs import POLICIES, build, differing, train
from tests.support.models import ParityGPT, batch, named_weights
from tests.support.native_build import DIRECT_IO_SOURCE, compile_shared
from tests.support.trainers import assert_parity
from tests.support.trainers import train as train_and_look

THROUGH_RING = {"io_engine": "native", "io_uring": True}


@pytest.fixture(autouse=True)
def _ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = tmp_path / "native"
    built.mkdir()
    compile_shared(DIRECT_IO_SOURCE, built / "_direct_io.so")
    if refusal := io_uring_refusal(built):
        pytest.skip(refusal)
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(built))


@pytest.mark.parametrize("clipping", [0.0, 0.5])
def test_the_bits_of_plain_torch(clipping, swap_path, caplog):
    caplog.set_level(logging.INFO, "tiered_zero")
    options = {"accumulation": 2, "clipping": clipping, "runtime": {**THROUGH_RING, "update": "overlapped"}}

    def script(trainer):
        return train_and_look(trainer, batch, 6, accumulation=2)

    assert_parity(ParityGPT, script, swap_path, [("nvme", "nvme")], **options)
    assert any(text.startswith("swap I/O: native engine with io_uring, ") for text in caplog.messages)
    assert any("of memory are registered" in text or "ulimit -l" in text for text in caplog.messages)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bits_of_a_run_without_a_disk(policy, swap_path):
    found = []
    for placement, runtime in ((("cpu", "cpu"), {}), (("nvme", "nvme"), THROUGH_RING)):
        with build(swap_path, policy, placement=placement, runtime=runtime) as engine:
            assert train(engine, 6) is None
            found.append(dict(named_weights(engine.module)))
    assert not differing(*found)
