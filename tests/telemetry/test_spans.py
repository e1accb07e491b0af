"""Totals are own seconds, bytes that arrived, and the union of what overlaps."""

from __future__ import annotations

import random
import threading

import pytest

from tests.telemetry.conftest import Clock
from tiered_zero.telemetry.spans import Recorder


def test_a_wait_inside_a_span_takes_its_seconds_from_it(clock: Clock) -> None:
    recorder = Recorder()
    with recorder.span("compute", "forward"):
        clock.sleep(0.02)
        with recorder.span("compute", "wait_param", "block.0"):
            clock.sleep(0.04)
    causes = recorder.take_totals().causes
    assert causes["wait_param"] == pytest.approx(0.04)
    assert causes["forward"] == pytest.approx(0.02)


def test_a_finished_wait_that_is_added_inside_an_open_span_counts_once(clock: Clock) -> None:
    recorder = Recorder()
    with recorder.span("compute", "step"):
        start_s = clock.perf_counter()
        clock.sleep(0.02)
        recorder.add("compute", "wait_state", "group.0", start_s, clock.perf_counter())
    totals = recorder.take_totals()
    assert totals.causes["step"] == pytest.approx(0.0)
    assert totals.busy_s["compute"] == pytest.approx(0.0)


def test_grandchildren_are_taken_from_their_parent_only(clock: Clock) -> None:
    recorder = Recorder()
    with recorder.span("compute", "forward"), recorder.span("compute", "inner"), recorder.span("compute", "wait_param"):
        clock.sleep(0.02)
    causes = recorder.take_totals().causes
    assert causes["wait_param"] == pytest.approx(0.02)
    assert causes["inner"] == pytest.approx(0.0)
    assert causes["forward"] == pytest.approx(0.0)


def test_the_driver_at_work_for_another_lane_is_a_cause_and_busies_that_lane_only(clock: Clock) -> None:
    recorder = Recorder()
    with recorder.span("compute", "step"):
        clock.sleep(0.01)
        with recorder.span("update", "wait_state"):
            clock.sleep(0.02)
        with recorder.span("update", "update"):
            clock.sleep(0.04)
    totals = recorder.take_totals()
    assert totals.causes == pytest.approx({"step": 0.01, "wait_state": 0.02, "update": 0.04})
    assert totals.busy_s["compute"] == pytest.approx(0.01)
    assert totals.busy_s["update"] == pytest.approx(0.04)


def test_a_worker_of_another_lane_is_no_cause_and_takes_nothing(clock: Clock) -> None:
    recorder = Recorder()

    def work() -> None:
        with recorder.span("fetch", "fetch"), recorder.span("fetch", "wait_lease"):
            clock.sleep(0.02)

    with recorder.span("compute", "forward"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    totals = recorder.take_totals()
    assert set(totals.causes) == {"forward"}
    assert totals.causes["forward"] == totals.busy_s["compute"] == pytest.approx(0.02)
    assert totals.busy_s["fetch"] == pytest.approx(0.0)


def test_a_request_that_the_driver_records_is_not_its_own_work(clock: Clock) -> None:
    recorder = Recorder()
    with recorder.span("compute", "forward"):
        clock.sleep(0.01)
        recorder.add("disk read", "read", "", clock.perf_counter() - 9.0, clock.perf_counter(), 512)
    totals = recorder.take_totals()
    assert set(totals.causes) == {"forward"} and totals.causes["forward"] == pytest.approx(0.01)
    assert totals.busy_s["disk read"] == pytest.approx(9.0)


def test_autograds_thread_waits_inside_mains_backward(clock: Clock) -> None:
    recorder = Recorder()

    def wait() -> None:
        with recorder.span("compute", "wait_param"):
            clock.sleep(0.2)

    with recorder.span("compute", "backward"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
    causes = recorder.take_totals().causes
    assert causes == pytest.approx({"backward": 0.0, "wait_param": 0.2})


def test_failed_work_counts_no_bytes_but_its_time() -> None:
    recorder = Recorder()
    with pytest.raises(OSError), recorder.span("disk read", "read", nbytes=4096):
        raise OSError("bad sector")
    with recorder.span("disk read", "read", nbytes=512):
        pass
    totals = recorder.take_totals()
    assert totals.nbytes == {"disk read": 512}
    assert totals.busy_s.keys() == {"disk read"}


def test_a_wait_moves_no_bytes() -> None:
    recorder = Recorder()
    recorder.add("fetch", "wait_lease", "", 0.0, 1.0, nbytes=4096)
    assert not recorder.take_totals().nbytes


@pytest.mark.parametrize("seed", range(20))
def test_busy_is_the_union_of_overlapping_requests_in_any_order(seed: int) -> None:
    generator = random.Random(seed)
    starts = [generator.randrange(200) for _ in range(40)]
    requests = [(start, start + generator.randrange(1, 9)) for start in starts]
    recorder = Recorder()
    for start, end in requests:
        recorder.add("disk write", "write", "", float(start), float(end), nbytes=1)
    covered = {second for start, end in requests for second in range(start, end)}
    totals = recorder.take_totals()
    assert totals.busy_s["disk write"] == pytest.approx(len(covered))
    assert totals.nbytes["disk write"] == 40


def test_taking_starts_anew() -> None:
    recorder = Recorder()
    recorder.add("update", "update", "", 0.0, 1.0, nbytes=7)
    assert recorder.take_totals().busy_s == {"update": 1.0}
    again = recorder.take_totals()
    assert not again.causes and not again.nbytes and not again.busy_s


def test_spans_are_kept_on_request_only() -> None:
    recorder = Recorder()
    recorder.add("update", "update", "group.0", 0.0, 1.0)
    assert recorder.take_spans() == []
    recorder.keep_spans = True
    recorder.add("update", "wait_state", "", 1.0, 2.0)
    (span,) = recorder.take_spans()
    assert (span.name, span.kind) == ("wait_state", "wait_state")
    assert recorder.take_spans() == []


def test_many_threads_lose_nothing() -> None:
    recorder = Recorder()

    def work() -> None:
        for _ in range(500):
            recorder.add("compute", "read", "", 0.0, 1.0, nbytes=3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = recorder.take_totals()
    assert totals.nbytes["compute"] == 4 * 500 * 3
    assert totals.causes["read"] == pytest.approx(2000.0)
    assert totals.busy_s["compute"] == 1.0
