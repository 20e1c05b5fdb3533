"""A record as one trace of all ranks, for Perfetto (ui.perfetto.dev) or chrome://tracing.

It is in the Trace Event Format, in JSON.

A rank is shown as a process, and a lane as a thread of it; where transfers overlap, a lane takes
several threads. The first lane has the job's own steps and spans. Arrows go from a send to its
receive. Counters show power and use of each GPU, cores, and loss. The format:
perfetto.dev/docs/getting-started/other-formats, "Chrome JSON".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from burst_rt.errors import ConfigError, InputError
from burst_rt.telemetry.messages import Hello, JobReport, PhaseEnded, SourceInfo, SourceSample
from burst_rt.telemetry.model.timeline import flow_views, spans_of_calls, wait_views
from burst_rt.telemetry.model.whole_calls import CallOfAll
from burst_rt.telemetry.read.calls import calls_of
from burst_rt.telemetry.read.record import Clocks, Record
from burst_rt.telemetry.read.tape import replay

__all__ = ["write_trace"]

_TraceEvent: TypeAlias = dict[str, object]
# Names of the threads of a rank's process, in the order in which they are shown.
_STEPS = "steps"
_LANES = (_STEPS, "control", "compute", "waits", "network", "d2h", "h2d")
_ROWS = 16  # maximum number of threads of a lane
# First number of the processes that represent sources: higher than the numbers of all ranks.
_FIRST_SOURCE = 1_000_000
_COUNTERS = (
    "power_w",
    "sm_percent",
    "gpm_tensor_percent",
    "memory_used_bytes",
    "nvlink_tx_bytes_per_s",
    "cpu_percent",
    "loss",
)


def write_trace(record: Record, path: Path) -> int:
    """Writes the trace of a record, and returns its number of events. Raises ConfigError where
    `path` cannot be written, and InputError where it is the record itself.
    """
    num_events = 0
    try:
        if path.exists() and path.samefile(record.path):
            raise InputError(f"{path} is the record itself; give the trace another name")
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for event in _events(record):
                file.write(",\n" if num_events else "\n")
                json.dump(event, file, separators=(",", ":"))
                num_events += 1
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write the trace to {path}: {error.strerror}; name a file in a folder that is "
            "there and has room"
        ) from error
    return num_events


def _events(record: Record) -> Iterator[_TraceEvent]:
    rows = _Rows()
    yield from _samples(record, rows)
    for number, call in enumerate(calls_of(record)):
        yield from _call(call, rows, number)
    for event in replay(record).events:
        about = {"text": event.text, "severity": str(event.severity)}
        instant = {"ph": "i", "name": event.kind, "ts": event.at_s * 1e6, "tid": 0, "pid": 0}
        place: _TraceEvent = {"s": "g"} if event.rank < 0 else {"s": "p", "pid": event.rank}
        yield instant | {"args": about} | place
    yield from rows.names()


class _Rows:
    """Where a span is drawn: in the first row of its lane that is free when the span starts."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, str], list[float]] = {}
        self._lanes = list(_LANES)  # and those of pipelines of one's own

    def place(
        self, rank: int, lane: str, started_s: float, ended_s: float, *, least: int = 0
    ) -> int:
        """least: the first row that will do."""
        ends = self._ends.setdefault((rank, lane), [])
        if lane not in self._lanes:
            self._lanes.append(lane)
        ends += [-math.inf] * (min(least, _ROWS - 1) - len(ends))
        row = next(
            (i for i, end_s in enumerate(ends) if i >= least and end_s <= started_s), len(ends)
        )
        if row >= _ROWS:
            row = min(range(_ROWS), key=ends.__getitem__)
        if row == len(ends):
            ends.append(ended_s)
        ends[row] = ended_s
        return self._thread(lane, row)

    def _thread(self, lane: str, row: int) -> int:
        return self._lanes.index(lane) * _ROWS + row + 1

    def names(self) -> Iterator[_TraceEvent]:
        """Names and order of the threads."""
        for (rank, lane), ends in self._ends.items():
            for row in range(len(ends)):
                thread = self._thread(lane, row)
                about = {
                    "thread_name": {"name": lane if row == 0 else f"{lane} {row + 1}"},
                    "thread_sort_index": {"sort_index": thread},
                }
                for name, args in about.items():
                    yield {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": args}


def _call(call: CallOfAll, rows: _Rows, serial: int) -> Iterator[_TraceEvent]:
    threads: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, (plan, part) in call.ranks.items():
        for span in sorted(spans_of_calls(plan, part), key=lambda s: s.started_s):
            task, times = plan.tasks[span.task], (span.started_s, span.ended_s)
            threads[rank, span.task] = rows.place(rank, span.lane, *times)
            ends[rank, span.task] = times
            about: _TraceEvent = {"call": f"{call.kind} {call.number}", "op": task.op}
            about["bytes"] = span.size_bytes
            if span.flops:
                about["flops"] = span.flops
            if task.hop >= 0:
                about["hop"] = task.hop
            yield _slice(rank, threads[rank, span.task], span.name, task.op, times, about)
    if call.whole is None:
        return
    for wait in wait_views(call.whole, [call.ranks[rank][1] for rank in call.members]):
        times, about = (wait.started_s, wait.ended_s), {"task": wait.task, "peer": wait.peer}
        thread = rows.place(wait.rank, "waits", *times)
        yield _slice(wait.rank, thread, wait.cause, wait.cause, times, about)
    for number, message in enumerate(flow_views(call.whole)):
        sender = message.sender, message.send_task
        receiver = message.receiver, message.receive_task
        flow: _TraceEvent = {"cat": "message", "name": "message", "id": f"{serial}.{number}"}
        # Both ends of an arrow must lie inside the slices that they belong to.
        sent_s, received_s = ends[sender][0], max(ends[receiver][0], ends[receiver][1] - 1e-7)
        start = {"ph": "s", "pid": sender[0], "tid": threads[sender], "ts": sent_s * 1e6}
        end = {"ph": "f", "bp": "e", "pid": receiver[0], "tid": threads[receiver]}
        yield flow | start
        yield flow | end | {"ts": max(sent_s, received_s) * 1e6}


def _slice(
    rank: int, thread: int, name: str, category: str, times: tuple[float, float], about: _TraceEvent
) -> _TraceEvent:
    where = {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category, "args": about}
    return where | {"ts": times[0] * 1e6, "dur": max(0.0, times[1] - times[0]) * 1e6}


def _phase(rank: int, phase: PhaseEnded, offset_s: float, rows: _Rows) -> _TraceEvent:
    """A step or a span of the job; what is inside another lies a row lower."""
    times = phase.started_s + offset_s, phase.ended_s + offset_s
    thread = rows.place(rank, _STEPS, *times, least=phase.depth)
    about: _TraceEvent = {"step": phase.step} if phase.step >= 0 else {}
    name, category = (phase.name, "span") if phase.name else (f"step {phase.step}", "step")
    return _slice(rank, thread, name, category, times, about)


def _samples(record: Record, rows: _Rows) -> Iterator[_TraceEvent]:
    """The names of ranks and sources, the job's steps and spans, and the counters."""
    clocks = Clocks()
    processes: dict[str, int] = {}
    for entry in record:
        rank, message = entry.rank, entry.message
        clocks.hear(entry)
        if isinstance(message, Hello):
            yield _process(rank, f"rank {rank} on {message.host}, {message.device}")
        elif isinstance(message, SourceInfo) and message.name not in processes:
            number = processes[message.name] = _FIRST_SOURCE + len(processes)
            yield _process(number, f"{message.about.get('name', '')} {message.name}".strip())
        elif isinstance(message, PhaseEnded):
            yield _phase(rank, message, clocks.offset_s(rank), rows)
        elif isinstance(message, SourceSample | JobReport):
            source = message.source if isinstance(message, SourceSample) else ""
            process = processes.get(source, rank)
            at_us = (message.at_s + clocks.offset_s(rank)) * 1e6
            yield from _counters(process, at_us, message.values)


def _process(number: int, name: str) -> _TraceEvent:
    return {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}


def _counters(process: int, at_us: float, values: dict[str, float]) -> Iterator[_TraceEvent]:
    for name in _COUNTERS:
        if math.isfinite(values.get(name, math.nan)):  # JSON has no other numbers
            counter = {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": at_us}
            yield counter | {"args": {name: values[name]}}
