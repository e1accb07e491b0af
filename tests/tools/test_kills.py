"""tools/kills.py: a round is recorded."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "kills.py"


def test_a_round_is_recorded(tmp_path: Path, swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOL.parents[1])
    tool = importlib.import_module("tools.kills")
    out = tmp_path / "kills.jsonl"
    assert tool.main(["--kills", "2", "--dir", str(swap_path), "--out", str(out)]) == 0
    (found,) = map(json.loads, out.read_text().splitlines())
    assert found["arguments"] == {"case": "overlapped, fp32, nvme", "kills": 2, "seed": 0}
    assert found["killed"]["num_kills"] == 2 and not found["failure"]
    assert [*swap_path.iterdir()] == []
