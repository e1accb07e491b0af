"""Several swap directories: bytes by measured speed, the same weights, and a clear error when one of them is lost."""

import logging
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.faulty_runs import (
    POLICIES,
    build,
    check_aftermath,
    data_files,
    differing,
    faulty_disks,
    reference,
    train,
    weights_after,
)
from tests.support.file_systems import mounted, shut_down
from tests.support.inspection.insides import data_files as record_data_files
from tests.support.inspection.insides import rack
from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.io.select import select_engine, weigh_directories
from tiered_zero.layout import extents

pytestmark = [pytest.mark.usefixtures("no_leaks")]


@pytest.fixture
def parents(swap_path: Path) -> list[Path]:
    found = [swap_path / "first", swap_path / "second"]
    for path in found:
        path.mkdir()
    return found


@pytest.fixture(autouse=True)
def several_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories lie on one drive here, which would be given equal shares without measuring."""
    monkeypatch.setattr(rack, "on_one_drive", lambda paths: len(paths) == 1)


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One page each, so that a model this small has hundreds of them, as a real one has of 4 MiB."""
    for module in (extents, record_data_files):
        monkeypatch.setattr(module, "STRIPE_NBYTES", 4096)


@pytest.fixture
def equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other load a directory may be measured so slow that hardly a byte goes there."""
    monkeypatch.setattr(rack, "weigh_directories", lambda *_: [0.5, 0.5])


def paths_in(parents: list[Path], as_list: bool) -> dict[str, object]:
    nvme = [str(path) for path in parents] if as_list else ", ".join(map(str, parents))
    both = {"device": "nvme", "nvme_path": nvme}
    return {"offload_param": {**both, "max_in_cpu": 0}, "offload_optimizer": both}


def assert_parity(engine: object, policy: str) -> None:
    weights = weights_after(engine)  # type: ignore[arg-type]
    assert isinstance(weights, dict) and not differing(reference(policy, 3), weights)


@pytest.mark.parametrize(
    ("shares", "policy"), list(zip([[0.75, 0.25], [0.5, 0.5], [0.2, 0.8], [0.75, 0.25]], POLICIES, strict=True))
)
def test_bytes_go_by_weight(
    shares: list[float], policy: str, parents: list[Path], small_stripes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rack, "weigh_directories", lambda *_: shares)
    as_list = shares[0] > 0.5
    with faulty_disks() as disks, build(parents[0], policy, zero=paths_in(parents, as_list)) as engine:
        (disk,) = disks
        planned = engine.plan.nbytes("nvme")
        sizes = [file.stat().st_size for parent in parents for file in data_files(parent)]
        assert sum(sizes) == planned
        assert train(engine, 3) is None
        engine.flush()
        moved: Counter[str] = Counter()
        for request in disk.requests:
            moved[str(Path(request.path).parents[1])] += request.nbytes
        for parent, share, size in zip(parents, shares, sizes, strict=True):
            assert abs(size / planned - share) < 0.05
            assert abs(moved[str(parent)] / sum(moved.values()) - share) < 0.05
        assert_parity(engine, policy)
    assert [list(parent.iterdir()) for parent in parents] == [[], []]


def test_speed_is_measured_and_said_once(parents: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "tiered_zero"),
        build(parents[0], "barrier", zero=paths_in(parents, True)) as engine,
    ):
        lines = [text for text in caplog.messages if "striped" in text]
        shares = [int(share) for share in re.findall(r"(\d+)% in ", lines[0])]
        assert len(lines) == 1 and len(shares) == 2 and 99 <= sum(shares) <= 101
        assert train(engine, 3) is None
        assert_parity(engine, "barrier")
    assert [list(parent.iterdir()) for parent in parents] == [[], []]


def test_a_slower_directory_gets_less(parents: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([3e9, 1e9, 1.1e9, 1e9])
    monkeypatch.setattr("tiered_zero.io.select.measure_rate", lambda *_, **__: next(rates))
    engine = select_engine(*parents).engine
    assert weigh_directories(engine, parents, 1 << 20) == [0.75, 0.25]
    assert weigh_directories(engine, parents, 1 << 20) == [0.5, 0.5], "what is nearly equal is equal"
    assert [list(parent.iterdir()) for parent in parents] == [[], []]
    engine.close()


def test_the_key_that_names_a_directory_is_said(swap_path: Path) -> None:
    state = {"zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "/proc/none"}}}
    saved = {"runtime": {"activations": {"device": "nvme", "nvme_path": "/proc/none", "limit": "1MB"}}}
    for options, key in (
        (state, r"zero_optimization\.offload_optimizer\.nvme_path"),
        (saved, r"tiered_zero\.activations\.nvme_path"),
    ):
        with pytest.raises(ConfigError, match=rf"^{key} /proc/none is missing"):
            build(swap_path, "barrier", placement=("cpu", "cpu"), **options)


def test_a_directory_that_is_missing_at_the_start(parents: list[Path]) -> None:
    parents[1].rmdir()
    with pytest.raises(ConfigError, match=rf"{parents[1]} cannot be used: ENOENT.*name another"):
        build(parents[0], "overlapped", zero=paths_in(parents, True))
    assert list(parents[0].iterdir()) == []


def test_a_directory_that_cannot_be_measured(parents: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, nbytes: int) -> None:
        raise OSError(28, os.strerror(28), path)

    monkeypatch.setattr("tiered_zero.io.select.fill_file", refuse)
    with pytest.raises(StoreError, match=rf"speed .* cannot be measured: .*{parents[0]}"):
        build(parents[0], "overlapped", zero=paths_in(parents, True))
    assert [list(parent.iterdir()) for parent in parents] == [[], []]


@pytest.mark.parametrize("policy", POLICIES)
def test_one_directory_is_cut_short(policy: str, parents: list[Path], small_stripes: None, equal_shares: None) -> None:
    engine = build(parents[0], policy, zero=paths_in(parents, True))
    assert train(engine, 2) is None
    engine.flush()
    os.truncate(data_files(parents[1])[0], 0)
    failure = train(engine, 5, first=2)
    assert failure is not None and str(parents[1]) in str(failure.error)
    check_aftermath(policy, engine, failure, parents[1])
    engine.close()
    assert [list(parent.iterdir()) for parent in parents] == [[], []]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_device_of_one_directory_is_gone(
    policy: str, parents: list[Path], small_stripes: None, equal_shares: None
) -> None:
    with mounted("ext4", parents[1]) as point:
        both = [parents[0], point]
        engine = build(parents[0], policy, zero=paths_in(both, True))
        assert train(engine, 2) is None
        engine.flush()
        shut_down(point)
        failure = train(engine, 5, first=2)
        assert failure is not None and failure.step == 2
        check_aftermath(policy, engine, failure, point)
        engine.close()
        assert list(parents[0].iterdir()) == []
