"""A source tree in the working directory takes the libraries of the installed package, or says why it has none."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.native_build import ROOT, compile_shared
from tiered_zero import native


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages that has tiered_zero, before all others; its folder of libraries is empty."""
    monkeypatch.delenv(native.LIBRARY_DIR_VARIABLE, raising=False)
    metadata, libraries = (tmp_path / "site" / name for name in ("tiered_zero-0.1.0.dist-info", "tiered_zero/native"))
    for folder in (metadata, libraries):
        folder.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiered-zero\nVersion: 0.1.0\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    return libraries


@pytest.fixture
def tree(tmp_path: Path) -> ModuleType:
    """`tiered_zero.native` of a source tree without libraries."""
    folder = tmp_path / "tree/tiered_zero/native"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path / "tree")
    path = shutil.copy(native.__file__, folder)
    spec = importlib.util.spec_from_file_location("native_of_the_tree", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, version: int) -> Path:
    source = folder / "update.c"
    source.write_text(f"int tz_version(void) {{ return {version}; }}")
    return compile_shared(source, folder / "_update.so")


def test_the_installed_library_of_the_same_sources_is_taken(site: Path, tree: ModuleType) -> None:
    library = build(site, native.VERSION)
    assert tree.find_library("_update") == library
    assert tree.find_library("_direct_io") is None


def test_one_of_other_sources_is_not_taken_and_the_shadow_is_named(site: Path, tree: ModuleType) -> None:
    build(site, native.VERSION + 1)
    assert tree.find_library("_update") is None
    reason, fix = tree.why_missing("_update")
    assert f"the source tree in {Path(tree.__file__ or '').parents[2]} shadows the installed package" in reason
    assert "run from another directory" in fix


def test_without_an_installed_one_the_build_is_named(site: Path, tree: ModuleType) -> None:
    (site / "_update.so").write_bytes(b"no library")
    assert tree.find_library("_update") is None
    assert tree.why_missing("_update")[1].startswith("python setup.py build_ext --inplace")
    (Path(tree.__file__ or "").parents[2] / "setup.py").unlink()
    assert "no C compiler" in tree.why_missing("_update")[0]
