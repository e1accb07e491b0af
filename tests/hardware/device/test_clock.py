"""Spans of lanes are timed by the device's events, wherever the host is by then."""

import pytest
import torch

from tiered_zero.hardware.device import streams as module
from tiered_zero.hardware.device.streams import DeviceClock
from tiered_zero.telemetry.spans import Recorder


class Event:
    """Comes at a time of the device's clock, in ms."""

    now_ms = 0.0
    complete_ms = 0.0

    def __init__(self, device, enable_timing=False):
        assert enable_timing

    def record(self, stream):
        self.ms = Event.now_ms

    def query(self):
        return self.ms <= Event.complete_ms

    def synchronize(self):
        Event.complete_ms = max(Event.complete_ms, self.ms)

    def elapsed_time(self, end):
        return end.ms - self.ms


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)
    monkeypatch.setattr(Event, "now_ms", 0.0)
    monkeypatch.setattr(Event, "complete_ms", 0.0)
    return DeviceClock(torch.device("cuda"))


def test_a_span_is_the_devices_and_comes_once_it_is_over(clock):
    recorder = Recorder()
    for start_ms, end_ms in ((0, 30), (50, 90)):
        Event.now_ms = start_ms
        with clock.span(recorder, "fetch", "fetch", f"at {start_ms}", 1000):
            Event.now_ms = end_ms
    Event.complete_ms = 90
    clock.add_spans()
    totals = recorder.take_totals()
    assert totals.busy_s["fetch"] == pytest.approx(0.07) and totals.nbytes == {"fetch": 2000}


def test_what_is_under_way_comes_with_the_next_step_and_a_failure_not_at_all(clock):
    recorder = Recorder(keep_spans=True)
    with clock.span(recorder, "fetch", "fetch", "first"):
        Event.now_ms = 10
    Event.complete_ms = 10
    clock.add_spans()
    with pytest.raises(OSError, match="planted"), clock.span(recorder, "fetch", "fetch", "failed"):
        raise OSError("planted")
    with clock.span(recorder, "fetch", "fetch", "second"):
        Event.now_ms = 25
    clock.add_spans()
    assert [span.name for span in recorder.take_spans()] == ["first"]
    Event.complete_ms = 25
    clock.add_spans()
    [second] = recorder.take_spans()
    assert (second.start_s, second.end_s) == (pytest.approx(100.0), pytest.approx(100.015))


def test_a_span_that_a_lane_adds_while_another_is_looked_at_drops_none(clock, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 1)
    clock, recorder, query = DeviceClock(torch.device("cuda")), Recorder(keep_spans=True), Event.query

    def query_late(event):
        monkeypatch.setattr(Event, "query", query)
        with clock.span(recorder, "fetch", "fetch", "second"):
            pass
        return event.query()

    with clock.span(recorder, "fetch", "fetch", "first"):
        pass
    monkeypatch.setattr(Event, "query", query_late)
    clock.add_spans()
    assert [span.name for span in recorder.take_spans()] == ["first", "second"]
