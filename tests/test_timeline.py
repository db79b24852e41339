"""The lane arithmetic: busy is a union, hidden is an overlap, exposed is a sum of waits."""

from __future__ import annotations

import json
import time

from hypothesis import given
from hypothesis import strategies as st

from infinity.kinds import Lane
from infinity.timeline import Recording, Span, Timeline, save_chrome_trace, summarize


def by_lane(spans):
    return {row.lane: row for row in summarize(spans)}


def test_reads_under_compute_are_hidden_and_the_rest_is_not():
    second = 1_000_000_000
    rows = by_lane(
        [
            Span(Lane.GPU, "forward", 0, 4 * second),
            Span(Lane.ADAM, "update", 6 * second, 8 * second),
            Span(Lane.NVME_READ, "a", 1 * second, 3 * second, 100),
            Span(Lane.NVME_READ, "b", 2 * second, 7 * second, 50),
            Span(Lane.NVME_READ, "b", 4 * second, 6 * second, is_stall=True),
        ]
    )
    read = rows[Lane.NVME_READ]
    assert (read.busy_s, read.hidden_s, read.exposed_s, read.nbytes, read.count) == (6.0, 3.0 + 1.0, 2.0, 150, 2)


@given(st.lists(st.tuples(st.sampled_from([Lane.GPU, Lane.NVME_READ]), st.integers(0, 60), st.integers(0, 20)), max_size=30))
def test_union_and_overlap_equal_counting_every_tick(raw):
    spans = [Span(lane, "x", start, start + length) for lane, start, length in raw]
    ticks = {lane: {t for s in spans if s.lane is lane for t in range(s.start_ns, s.stop_ns)} for lane in Lane}
    rows = by_lane(spans)
    for lane, row in rows.items():
        assert round(row.busy_s * 1e9) == len(ticks[lane])
    if Lane.NVME_READ in rows:
        assert round(rows[Lane.NVME_READ].hidden_s * 1e9) == len(ticks[Lane.NVME_READ] & ticks[Lane.GPU])


def test_the_record_is_bounded_but_totals_are_not():
    timeline = Timeline(max_spans=100)
    for i in range(1000):
        timeline.record(Lane.UPLOAD, "u", i, i + 1, 10)
    assert len(timeline.spans()) <= 100
    assert timeline.moved_bytes()[Lane.UPLOAD] == 10_000


def read_events(path):
    return json.loads(path.read_text())["traceEvents"]


def test_chrome_trace_has_one_row_per_lane_and_one_for_waits(tmp_path):
    timeline = Timeline()
    with timeline.span(Lane.GPU, "h.0 forward"), timeline.stall(Lane.NVME_READ, "h.0"):
        pass
    timeline.save_chrome_trace(tmp_path / "trace.json")
    events = read_events(tmp_path / "trace.json")
    rows = {event["tid"] for event in events if event["ph"] == "X"}
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert rows == {0, names["gpu"]} and names["waits"] == 0


def test_chrome_trace_of_ranks_has_a_process_for_each_by_one_clock(tmp_path):
    """Rank 1 shares rank 0's clock, whatever the time of day was when each looked; rank 2's began 700 s later."""
    span = Span(Lane.COMM, "gather", 5_000, 7_000, nbytes=8)
    clocks = [("a", 1_000_000_000_000), ("a", 1_000_000_900_000), ("b", 1_700_000_000_000)]
    save_chrome_trace(tmp_path / "trace.json", [Recording(spans=[span], host=host, wall_ns=wall_ns) for host, wall_ns in clocks])
    events = read_events(tmp_path / "trace.json")
    assert {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"} == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    drawn = {event["pid"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert drawn == {0: (5.0, 2.0), 1: (5.0, 2.0), 2: (700e6 + 5.0, 2.0)}


def test_recordings_of_one_machine_know_it():
    here, there = Timeline().recording(), Timeline().recording()
    assert here.host == there.host and abs(here.wall_ns + time.monotonic_ns() - time.time_ns()) < 60e9
