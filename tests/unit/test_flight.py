"""The flight record (job/flight.py, job/flights.py): what is read of it, however a rank ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import burst_rt
from burst_rt import Context
from burst_rt.job import flight as format_of
from burst_rt.job.flight import (
    CALL_ENTRY,
    MESSAGE_ENTRY,
    NUM_ENTRIES,
    TASK_ENTRY,
    FlightRecord,
)
from burst_rt.job.flights import Flight, read_flight
from burst_rt.scheduler import Graph, GraphBuilder


def _graph(rank: int = 0) -> Graph:
    """A tile, an exchange of one message each way, and a tile on what came."""
    g = GraphBuilder(rank, 2)
    mine, theirs = (g.buffer(name, size_bytes=8, initialised=True) for name in ("mine", "theirs"))
    g.compute("own tile", "work", accumulates=[mine], hop=0)
    g.exchange("hop 1", sends=[(mine, 1 - rank)], recvs=[(theirs, 1 - rank)], tag=0, hop=1)
    g.compute("last tile", "work", reads=[theirs], accumulates=[mine], hop=1)
    return g.build()


def _read(folder: Path, rank: int = 0) -> Flight:
    flight = read_flight(folder, rank)
    assert flight is not None
    return flight


def test_a_task_has_its_times_and_its_names(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path, 0, 2)
    began_s = time.perf_counter() - 10
    record.enter(3, "größer" * 100, began_s, _graph())
    end = record.add(TASK_ENTRY, began_s + 1, began_s + 2)
    doing = _read(tmp_path)
    assert (doing.place[:12], doing.doing and doing.doing.name) == ("in call 3 (g", "own tile")
    record.times[end] = began_s + 3
    between = _read(tmp_path)
    assert between.doing is None
    (entry,) = between.entries
    assert (entry.asked_s, entry.begun_s, entry.ended_s) == (began_s + 1, began_s + 2, began_s + 3)
    record.leave()
    left = _read(tmp_path)
    assert (left.place, left.last_call, left.closed) == ("in no call", 3, False)
    assert [entry.kind for entry in left.entries] == [CALL_ENTRY, TASK_ENTRY]
    record.close(closed=True)
    assert _read(tmp_path).closed
    # One clock, and where it is beside the wall's.
    assert abs(left.wall(time.perf_counter()) - time.time()) < 1.0


def test_what_is_taken_back_leaves_the_others(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path, 0, 2)
    record.enter(1, "forward", 10.0, _graph())
    end = record.add(TASK_ENTRY, 11.0, 11.0)
    assert _read(tmp_path).doing is not None
    record.take_back(end)
    assert _read(tmp_path).entries == []
    for number in range(NUM_ENTRIES + 2):  # all around the ring
        record.add(8 * 2 + TASK_ENTRY, 11.0, 12.0 + number)
        record.take_back(record.add(TASK_ENTRY, 11.0, 11.0))
    entries = _read(tmp_path).entries
    assert [entry.task for entry in entries] == [2] * (NUM_ENTRIES - 1)  # the first one's place
    first, second = (record.add(8 * task + TASK_ENTRY, 5e4, 5e4 + task) for task in (0, 2))
    record.take_back(first)
    assert second != first
    assert [entry.task for entry in _read(tmp_path).entries if entry.begun_s >= 5e4] == [2]


def test_messages_are_under_way_until_they_have_ended(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path, 0, 2)
    record.enter(1, "forward", 10.0, _graph())
    assert _read(tmp_path).call is None  # nothing is written before something begins
    record.note_call()
    assert _read(tmp_path).place.endswith("waiting for all ranks to enter it")
    end = record.add(8 + TASK_ENTRY, 11.0, 11.0)
    both = _read(tmp_path).under_way
    assert [(each.peer, each.size_bytes, each.is_recv) for each in both] == [
        (1, 8, True), (1, 8, False)
    ]  # fmt: skip
    record.add(8 + MESSAGE_ENTRY, 0, 12.0)  # the send has ended
    (still,) = _read(tmp_path).under_way
    assert str(still) == "a message of 8 bytes from rank 1 in task 'hop 1' (hop 1)"
    record.times[end] = 13.0
    assert _read(tmp_path).under_way == []


def test_the_ring_keeps_the_last_entries(tmp_path: Path) -> None:
    record = FlightRecord(tmp_path, 0, 1)
    num_calls = NUM_ENTRIES + 100
    for number in range(1, num_calls + 1):
        record.enter(number, "sum", float(number), _graph() if number == 1 else None)
        record.leave()
    calls = [entry.call for entry in _read(tmp_path).entries if entry.ended_s]
    # A call without a graph has two entries: as it begins, and as it ends.
    assert calls == list(range(num_calls - NUM_ENTRIES // 2 + 1, num_calls + 1))
    assert len(_read(tmp_path).entries) == NUM_ENTRIES


class _Dying:
    """The words of a record, whose process dies at the store with a number; both views share it."""

    def __init__(self, words: Any, left: list[int]) -> None:  # a memoryview of floats or integers
        self._words, self._left = words, left

    def __setitem__(self, at: int, value: float) -> None:
        self._left[0] -= 1
        if self._left[0] < 0:
            raise SystemExit
        self._words[at] = value


def test_half_an_entry_is_none(tmp_path: Path) -> None:
    for num_stores in count():
        record: Any = FlightRecord(tmp_path, 0, 1)  # its views are replaced
        graph = _graph()
        for number in range(1, NUM_ENTRIES + 1):
            record.enter(number, "forward", float(number), graph)
            record.add(TASK_ENTRY, float(number), float(number))
        record.enter(NUM_ENTRIES + 1, "forward", 1e6, graph)
        left = [num_stores]
        record.times, record._words = _Dying(record.times, left), _Dying(record._words, left)
        try:
            record.add(8 + TASK_ENTRY, 1e6, 1e6)
            died = False
        except SystemExit:
            died = True
        entries = _read(tmp_path).entries
        # The oldest entry is whole, or gone.
        assert all(x.call == x.begun_s == x.asked_s for x in entries[:-1])
        newest = NUM_ENTRIES if died else NUM_ENTRIES + 1
        assert entries[-1].call == newest
        assert len(entries) == NUM_ENTRIES - (died and num_stores > 0)
        if not died:
            break


def test_a_file_that_is_cut_short_is_no_record(tmp_path: Path) -> None:
    FlightRecord(tmp_path, 0, 1)
    path = tmp_path / "rank-0.flight"
    whole = path.read_bytes()
    for cut in (whole[:-1], whole[:10], b""):
        path.write_bytes(cut)
        assert read_flight(tmp_path, 0) is None
    assert read_flight(tmp_path, 1) is None


def test_on_a_full_disk_there_is_no_record_or_one_without_names(tmp_path: Path) -> None:
    """The limit of a file's size is met as a full disk is: the kernel refuses to go on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    record = FlightRecord(tmp_path, 1, 2)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(OSError, match="too large"):
            FlightRecord(tmp_path, 0, 2)
        record.enter(1, "forward", 10.0, _graph())
        record.add(TASK_ENTRY, 11.0, 11.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    # The file of names holds the beginning of a line.
    flight = _read(tmp_path, 1)
    assert flight.place == "in call 1 (its name is not kept), a task whose name is not kept"
    # The next line is whole again.
    record.enter(2, "backward", 12.0, _graph())
    record.add(TASK_ENTRY, 13.0, 13.0)
    assert _read(tmp_path, 1).place == "in call 2 (backward), task 'own tile' (hop 0)"


def test_names_are_bounded_and_calls_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_of, "_MAX_NAMES_BYTES", 2_000)
    record = FlightRecord(tmp_path, 0, 2)
    record.enter(1, "sum", 1.0)
    record.leave()
    graphs = [_graph() for _ in range(50)]
    for number, graph in enumerate(graphs, 2):
        now_s = time.perf_counter()
        record.enter(number, "forward", now_s, graph)
        record.add(TASK_ENTRY, now_s, now_s)
    sizes = [path.stat().st_size for path in tmp_path.glob("rank-0.names*")]
    assert len(sizes) == 2
    assert max(sizes) < 2_500
    flight = _read(tmp_path)
    named = [entry.call for entry in flight.entries if flight.row(entry).name]
    assert 10 < len(named) < 50
    assert named[-1] == 51
    assert "sum" in flight.calls.values()
    # A graph that is run again after its names are gone is written again.
    now_s = time.perf_counter()
    record.enter(60, "forward", now_s, graphs[0])
    record.add(TASK_ENTRY, now_s, now_s)
    assert _read(tmp_path).place == "in call 60 (forward), task 'own tile' (hop 0)"


def test_graphs_of_a_process_have_numbers_of_their_own() -> None:
    first, second = _graph(), _graph()
    assert first == second
    assert first.number != second.number


def test_the_record_of_a_killed_process_says_where_it_was(tmp_path: Path) -> None:
    program = dedent(
        """
        import os, signal, sys
        from pathlib import Path
        import torch
        import burst_rt
        from burst_rt.job.flight import FlightRecord
        from burst_rt.kernels import KERNELS

        with burst_rt.init(device="cpu") as ctx:
            ctx.runtime.flight = FlightRecord(Path(sys.argv[1]), 0, 1)
            q = torch.zeros(1, 8, 2, 16)
            for _ in range(3):
                burst_rt.burst_attention(q, q, q, layout=ctx.layout(8))
            type(KERNELS["cpu"]).forward = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            burst_rt.burst_attention(q, q, q, layout=ctx.layout(8))
        """
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    flight = _read(tmp_path)
    assert flight.call is not None
    assert flight.doing is not None
    assert flight.doing.hop == 0
    calls = [entry for entry in flight.entries if entry.kind == CALL_ENTRY]
    assert [entry.call for entry in calls] == [flight.call.number - n for n in (3, 2, 1)]
    for entry in calls:
        assert 0 < entry.begun_s <= entry.asked_s <= entry.ended_s


def test_a_whole_run_is_in_the_record(tmp_path: Path) -> None:
    """On two ranks: every task once, as the driver's trace has it."""

    def run(ctx: Context) -> None:
        ctx.runtime.flight = FlightRecord(tmp_path, ctx.rank, 2)
        layout = ctx.layout(32)
        q = torch.randn(1, layout.shard_len, 2, 16, requires_grad=True)
        burst_rt.burst_attention(q, q, q, causal=True, layout=layout).sum().backward()
        graph, driver = ctx.runtime.last_run or pytest.fail("nothing has run")
        assert driver is not None
        flight = _read(tmp_path, ctx.rank)
        tasks = [
            entry
            for entry in flight.entries
            if entry.kind == TASK_ENTRY and entry.graph == graph.number
        ]
        spans = {span.task: span for span in driver.trace}
        control = {task.id for task in graph.tasks if task.lane == "control"}
        assert sorted(entry.task for entry in tasks) == sorted(spans.keys() - control)
        for entry in tasks:
            span, task = spans[entry.task], graph.tasks[entry.task]
            assert (entry.begun_s, entry.ended_s) == (span.started_s, span.ended_s)
            row = flight.row(entry)
            assert (row.name, row.hop) == (task.name, task.hop)
            assert row.sends == tuple((m.peer, m.size_bytes) for m in task.sends)

    burst_rt.run_local(2, run)


def test_a_header_of_any_length_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ü" * 10_000])
    FlightRecord(tmp_path, 0, 1)
    assert _read(tmp_path).program == "ü" * 300


def test_no_entry_outlives_its_record(tmp_path: Path) -> None:
    """A process that makes its record anew must not leave older entries in it."""
    numbers = count(1)
    for _ in range(2):
        record = FlightRecord(tmp_path, 0, 1)
        record.enter(next(numbers), "sum", 1.0)
    assert [entry.call for entry in _read(tmp_path).entries] == [2]
    assert json.loads(os.fsdecode((tmp_path / "rank-0.names").read_bytes()).splitlines()[-1])


def test_any_command_line_leaves_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argument in ("\N{FACE WITH TEARS OF JOY}" * 300, "\x01" * 300, "caf\udce9" * 60):
        monkeypatch.setattr(sys, "argv", ["train.py", argument])
        FlightRecord(tmp_path, 0, 1)
        assert _read(tmp_path).program.startswith("train.py ")
