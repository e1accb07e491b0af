"""The trace is JSON that opens, with a named row for each lane, also when the run was killed."""

from __future__ import annotations

import json
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tiered_zero.errors import ConfigError
from tiered_zero.telemetry.runlog import TraceWriter
from tiered_zero.telemetry.spans import LANES, WAIT_CAUSES, Span


def read_events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def rows(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Row name -> its spans, in file order."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def test_every_lane_and_every_wait_has_a_named_row(tmp_path: Path) -> None:
    spans = [
        Span(lane=lane, name=f"{lane} of block.0", start_s=1.0, end_s=2.0, nbytes=10, kind="work") for lane in LANES
    ]
    spans += [
        Span(lane="compute", name="block.0", start_s=3.0 + i, end_s=3.5 + i, nbytes=0, kind=cause)
        for i, cause in enumerate(WAIT_CAUSES)
    ]
    path = tmp_path / "trace.json"
    with closing(TraceWriter(path, {"model": "gpt"})) as trace:
        trace.write(spans)
    found = rows(read_events(path))
    assert set(found) == {*LANES, *WAIT_CAUSES}
    assert found["disk read"][0]["name"] == "disk read of block.0"
    assert found["disk read"][0]["args"] == {"lane": "disk read", "bytes": 10}
    assert found["wait_param"][0]["dur"] == pytest.approx(0.5e6)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_overlapping_requests_go_to_further_rows_and_nested_spans_do_not(tmp_path: Path) -> None:
    reads = [Span(lane="disk read", name=f"r{i}", start_s=float(i), end_s=i + 2.5) for i in range(4)]
    nested = [
        Span(lane="compute", name="outer", start_s=0.0, end_s=9.0),
        Span(lane="compute", name="inner", start_s=1.0, end_s=2.0),
        Span(lane="compute", name="later", start_s=9.0, end_s=9.5),
    ]
    with closing(TraceWriter(tmp_path / "trace.json")) as trace:
        trace.write(reversed(reads + nested))
    found = rows(read_events(tmp_path / "trace.json"))
    assert [event["name"] for event in found["compute"]] == ["outer", "inner", "later"]
    assert {name: len(events) for name, events in found.items() if "read" in name} == {
        "disk read": 2,
        "disk read (2)": 1,
        "disk read (3)": 1,
    }


def test_spans_on_a_row_nest_across_batches(tmp_path: Path) -> None:
    """A span of the last step that ends in this one comes late; no row may then hold a partial overlap."""
    with closing(TraceWriter(tmp_path / "trace.json")) as trace:
        trace.write([Span(lane="update", name="a", start_s=5.0, end_s=6.0)])
        trace.write(
            [
                Span(lane="update", name="late", start_s=4.0, end_s=5.5),
                Span(lane="update", name="b", start_s=6.0, end_s=7.0),
            ]
        )
    for events in rows(read_events(tmp_path / "trace.json")).values():
        starts = [event["ts"] for event in events]
        assert starts == sorted(starts)


def test_a_killed_run_leaves_a_trace_that_opens(tmp_path: Path) -> None:
    trace = TraceWriter(tmp_path / "trace.json")
    trace.write([Span(lane="compute", name="forward", start_s=1.0, end_s=2.0)])
    text = (tmp_path / "trace.json").read_text()
    assert text.startswith("[") and text.endswith(",\n"), "the array form, whose end may be missing"
    assert len(json.loads(text.rstrip(",\n") + "]")) == 5
    trace.close()
    trace.close()
    assert len(read_events(tmp_path / "trace.json")) == 6


def test_a_path_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiered_zero\.trace: expected a file"):
        TraceWriter(tmp_path / "absent" / "trace.json")
