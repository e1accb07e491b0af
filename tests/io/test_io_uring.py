"""io_uring serves a run that asks for it by name, and no other; where it cannot, the run is refused with the reason."""

import os
from pathlib import Path

import pytest

from tests.io.conftest import io_uring_refusal
from tests.io.test_select import works
from tiered_zero.errors import ConfigError
from tiered_zero.io.native import NativeEngine
from tiered_zero.io.select import BUILDERS, config_of, select_engine


@pytest.fixture(autouse=True)
def _native(native_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if refusal := io_uring_refusal(native_dir):
        pytest.skip(refusal)
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(native_dir))


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("prefer", ["auto", "native"])
@pytest.mark.usefixtures("no_leaks")
def test_the_setting_decides(swap_path: Path, prefer: str, wanted: bool) -> None:
    selection = select_engine(swap_path, prefer=prefer, io_uring=wanted)
    assert isinstance(selection.engine, NativeEngine) and selection.engine.io_uring == wanted
    assert selection.reasons[-1].startswith(f"swap I/O: native engine{' with io_uring' * wanted}, ")
    assert works(selection, swap_path)


@pytest.mark.usefixtures("no_leaks")
def test_threads_serve_where_nothing_is_asked_for(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    build = NativeEngine.__init__

    def count(self: NativeEngine, *, io_uring: bool = False, **options: object) -> None:
        opened.append(io_uring)
        build(self, io_uring=io_uring, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeEngine, "__init__", count)
    assert works(select_engine(swap_path), swap_path)
    assert opened and not any(opened), "a ring was opened"


def test_a_setting_that_cannot_be_met_is_an_error(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="io_uring is of the engine native, not of threads"):
        select_engine(swap_path, prefer="threads", io_uring=True)
    read = NativeEngine.read

    def damage(self: NativeEngine, file: object, offset: int, into: memoryview, **options: bool) -> object:
        transfer = read(self, file, offset, into, **options)  # type: ignore[arg-type]
        transfer.wait()
        into[-1] ^= self.io_uring
        return transfer

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "read", damage)
        with pytest.raises(ConfigError, match=r"io_uring is true, but .* read back is not what .* Leave it out"):
            select_engine(swap_path, io_uring=True)
        assert works(select_engine(swap_path), swap_path)
    monkeypatch.setenv("TIERED_ZERO_NATIVE_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"io_uring is true, but .* its library is missing"):
        select_engine(swap_path, io_uring=True)
    assert os.listdir(swap_path) == []


@pytest.mark.parametrize("name", list(BUILDERS))
def test_every_builder_can_be_written_into_a_config(swap_path: Path, name: str) -> None:
    config = config_of(name)
    selection = select_engine(swap_path, prefer=config["io_engine"], io_uring=config["io_uring"])
    assert selection.engine.name == config["io_engine"]
    assert getattr(selection.engine, "io_uring", False) == config["io_uring"] == (name == "io_uring")
    selection.engine.close()
