"""A record as one trace of all ranks, for Perfetto (ui.perfetto.dev) or chrome://tracing.

It is in the Trace Event Format, in JSON.

A rank is shown as a process, and a lane as a thread of it; where transfers overlap, a lane takes
several threads. Arrows go from a send to its receive. Counters show power and use of each GPU,
cores, and loss. The format: perfetto.dev/docs/getting-started/other-formats, "Chrome JSON".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from burst_rt.errors import ConfigError, InputError
from burst_rt.telemetry.messages import Heartbeat, Hello, JobReport, Sample, Source
from burst_rt.telemetry.model.timeline import spans_of
from burst_rt.telemetry.read.calls import CallOfAll, calls_of
from burst_rt.telemetry.read.record import Record, replay

__all__ = ["write_trace"]

_TraceEvent: TypeAlias = dict[str, object]
# Names of the threads of a rank's process, in the order in which they are shown.
_LANES = ("control", "compute", "waits", "network", "d2h", "h2d")
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
    yield from _samples(record)
    rows = _Rows()
    for number, call in enumerate(calls_of(record)):
        yield from _call(call, rows, number)
    for event in replay(record).events:
        about = {"text": event.text, "severity": str(event.severity)}
        place: _TraceEvent = {"s": "g"} if event.rank < 0 else {"s": "p", "pid": event.rank}
        yield {
            "ph": "i",
            "name": event.kind,
            "ts": event.at_s * 1e6,
            "tid": 0,
            "pid": 0,
            "args": about,
        } | place
    yield from rows.names()


class _Rows:
    """Where a span is drawn: in the first row of its lane that is free when the span starts."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, str], list[float]] = {}

    def place(self, rank: int, lane: str, started_s: float, ended_s: float) -> int:
        ends = self._ends.setdefault((rank, lane), [])
        row = next((i for i, end_s in enumerate(ends) if end_s <= started_s), len(ends))
        if row >= _ROWS:
            row = min(range(_ROWS), key=ends.__getitem__)
        if row == len(ends):
            ends.append(ended_s)
        ends[row] = ended_s
        return _thread(lane, row)

    def names(self) -> Iterator[_TraceEvent]:
        """Names and order of the threads."""
        for (rank, lane), ends in self._ends.items():
            for row in range(len(ends)):
                thread = _thread(lane, row)
                name = lane if row == 0 else f"{lane} {row + 1}"
                yield {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": rank,
                    "tid": thread,
                    "args": {"name": name},
                }
                yield {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": rank,
                    "tid": thread,
                    "args": {"sort_index": thread},
                }


def _thread(lane: str, row: int) -> int:
    first = _LANES.index(lane) if lane in _LANES else len(_LANES)
    return first * _ROWS + row + 1


def _call(call: CallOfAll, rows: _Rows, serial: int) -> Iterator[_TraceEvent]:
    threads: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, (plan, kept) in call.ranks.items():
        for span in sorted(spans_of(plan, kept), key=lambda s: s.started_s):
            task = plan.tasks[span.task]
            thread = threads[rank, span.task] = rows.place(
                rank, span.lane, span.started_s, span.ended_s
            )
            ends[rank, span.task] = (span.started_s, span.ended_s)
            about: _TraceEvent = {
                "call": f"{call.kind} {call.number}",
                "op": task.op,
                "bytes": span.size_bytes,
            }
            if span.flops:
                about["flops"] = span.flops
            if task.hop >= 0:
                about["hop"] = task.hop
            yield _slice(rank, thread, span.name, task.op, span.started_s, span.ended_s, about)
    if call.whole is None:
        return
    for place, waits in enumerate(call.whole.waits):
        rank = call.members[place]
        for wait in waits:
            name = "exposed" if wait.on_wire else "skew"
            thread = rows.place(rank, "waits", wait.started_s, wait.ended_s)
            about = {
                "task": call.whole.plans[place].tasks[wait.task].name,
                "peer": call.members[wait.peer],
            }
            yield _slice(rank, thread, name, name, wait.started_s, wait.ended_s, about)
    for number, (end, source) in enumerate(call.whole.matched.items()):
        sender, receiver = (
            (call.members[source.rank], source.task),
            (call.members[end.rank], end.task),
        )
        flow: _TraceEvent = {"cat": "message", "name": "message", "id": f"{serial}.{number}"}
        # Both ends of an arrow must lie inside the slices that they belong to.
        sent_s, received_s = ends[sender][0], max(ends[receiver][0], ends[receiver][1] - 1e-7)
        yield flow | {"ph": "s", "pid": sender[0], "tid": threads[sender], "ts": sent_s * 1e6}
        yield flow | {
            "ph": "f",
            "bp": "e",
            "pid": receiver[0],
            "tid": threads[receiver],
            "ts": max(sent_s, received_s) * 1e6,
        }


def _slice(
    rank: int,
    thread: int,
    name: str,
    category: str,
    started_s: float,
    ended_s: float,
    about: _TraceEvent,
) -> _TraceEvent:
    times = {"ts": started_s * 1e6, "dur": max(0.0, ended_s - started_s) * 1e6}
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "cat": category,
        "args": about,
    } | times


def _samples(record: Record) -> Iterator[_TraceEvent]:
    """The names of ranks and sources, and the counters."""
    offsets: dict[int, float] = {}
    processes: dict[str, int] = {}
    for entry in record:
        rank, message = entry.rank, entry.message
        if isinstance(message, Hello):
            yield _process(rank, f"rank {rank} on {message.host}, {message.device}")
        elif isinstance(message, Heartbeat):
            offsets[rank] = message.offset_s if message.rtt_s >= 0 else entry.at_s - message.sent_s
        elif isinstance(message, Source) and message.name not in processes:
            processes[message.name] = _FIRST_SOURCE + len(processes)
            yield _process(
                processes[message.name], f"{message.about.get('name', '')} {message.name}".strip()
            )
        elif isinstance(message, Sample):
            process = processes.get(message.source, rank)
            yield from _counters(
                process, (message.at_s + offsets.get(rank, 0.0)) * 1e6, message.values
            )
        elif isinstance(message, JobReport):
            yield from _counters(
                rank, (message.at_s + offsets.get(rank, 0.0)) * 1e6, message.values
            )


def _process(number: int, name: str) -> _TraceEvent:
    return {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}


def _counters(process: int, at_us: float, values: dict[str, float]) -> Iterator[_TraceEvent]:
    for name in _COUNTERS:
        if math.isfinite(values.get(name, math.nan)):  # JSON has no other numbers
            yield {
                "ph": "C",
                "name": name,
                "pid": process,
                "tid": 0,
                "ts": at_us,
                "args": {name: values[name]},
            }
