"""No command of a test reads or writes the record of rates of the user who runs the tests."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_record(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder
