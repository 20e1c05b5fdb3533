"""What ranks and the hub say to each other, as typed messages (msgspec, MessagePack), never
pickles.

A connection carries frames (`wire`), each one message. A record file holds the same messages, each
with when the hub had it and from whom; so the model (`state`) is fed in one way, live or replayed.
Messages are arrays, not maps: a newer version may append fields with defaults, and nothing else, so
that old records stay readable.

Times named `*_s` in messages of a rank are seconds of that rank's `time.perf_counter`; its
heartbeats say how far the hub's clock is ahead. What viewers get is in `views`, all in seconds
since the hub began.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

import msgspec

__all__ = [
    "VERSION", "Ask", "Bye", "Call", "Candidate", "Counters", "FromRank", "Group", "Heartbeat",
    "Hello", "Item", "LaneCounters", "Note",
    "Notice", "Ping", "Plan", "Pong", "Presence", "RecordHeader", "Recorded", "Report", "Sample",
    "Severity", "Source", "Stopping",
    "TaskInfo", "ToRank", "Wire",
]  # fmt: skip

# Of the messages' meaning; a hub refuses ranks of another one.
VERSION = 1

# Peer (rank of the group), tag, bytes.
Wire: TypeAlias = tuple[int, int, int]


class Severity(StrEnum):
    """How much an event matters to who looks on."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _Message(msgspec.Struct, array_like=True):
    pass


class Hello(_Message, tag="hello"):
    """The first message of a rank. `rank`: in the job. device: "cpu" or "cuda:N"; gpu: its source,
    "" without. command: of the program.
    """

    version: int
    secret: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: str
    gpu: str
    command: str
    package: str
    sample_hz: float


class Heartbeat(_Message, tag="beat"):
    """Twice a second. sent_s: when, by the rank's clock.

    offset_s: hub's clock minus the rank's, by the ping-pong with the shortest way (half of rtt_s is
    its error bound; -1: none yet). call: number of the call under way in `group`, -1 outside any.
    doing: its task, or what it waits for; since_s: since when (both empty outside a call). hop: of
    that task, -1 where it has none.
    """

    sent_s: float
    offset_s: float
    rtt_s: float
    group: str
    call: int
    doing: str
    since_s: float
    hop: int = -1


class Group(_Message, tag="group"):
    """A context of this rank. name: the same on all its ranks. ranks: of the job, in the group's
    order; a peer is a place in this list.
    """

    name: str
    ranks: list[int]
    transport: str
    reason: str


class TaskInfo(_Message):
    """A task of a plan. op: of the graph, "exchange" for a transfer; hop: of the ring, -1 where it
    has none; ordered: on a stream.
    """

    name: str
    lane: str
    op: str
    hop: int
    size_bytes: int
    flops: int
    ordered: bool
    sends: list[Wire]
    recvs: list[Wire]


class Candidate(_Message):
    """A strategy that a plan was chosen from. size_bytes: that all ranks together send in one run.
    predicted_s: None where not forecast.
    """

    strategy: str
    size_bytes: int
    predicted_s: float | None


class Plan(_Message, tag="plan"):
    """A graph that this rank runs; sent once. number: its own, of this rank. kind: "forward",
    "backward" or "pipeline".

    explain: strategy, kernel and why, bytes, memory, in words. predicted_s: what a simulated run on
    a machine like this takes, None where that is not known or another rank says it. problem:
    layout, shapes, mask, in words, the same on all ranks of a group. strategy: the one of the
    candidates that runs; "" for a pipeline.
    """

    number: int
    group: str
    kind: str
    tasks: list[TaskInfo]
    explain: str
    predicted_s: float | None
    problem: str = ""
    strategy: str = ""
    candidates: list[Candidate] = []


class Call(_Message, tag="call"):
    """A call that has ended: `spans` are 16 bytes each (`timeline.SPAN`: task, and issued, started,
    ended in seconds after `started_s`).

    number: of the call, the same on all ranks of the group. wait_s: the compute lane idled while a
    transfer was under way.
    """

    group: str
    number: int
    plan: int
    started_s: float
    ended_s: float
    compute_s: float
    wait_s: float
    spans: bytes


class LaneCounters(_Message):
    """Of one lane since the start: tasks done, bytes (sent, on the network; moved, else),
    floating-point operations.
    """

    tasks: int
    size_bytes: int
    flops: int


class Counters(_Message, tag="counters"):
    """Cumulative counts of a rank since its start, exact even where spans were dropped.

    compute_s: of tiles; wait_s: the compute lane idled while a transfer was under way; transfer_s:
    at least one transfer was; overlap_s: one was while compute was busy. The last two stand for
    `traced_calls` of the `calls`. dropped: messages that found no room.
    """

    at_s: float
    calls: int
    traced_calls: int
    compute_s: float
    wait_s: float
    total_s: float
    transfer_s: float
    overlap_s: float
    lanes: dict[str, LaneCounters]
    dropped: int


class Source(_Message, tag="source"):
    """Something that is sampled: a GPU ("gpu:UUID"), a host ("host:NAME") or a rank's process
    ("rank:N"), from its first sample on.

    metrics: names in `metrics.METRICS` that it has; others it has not. about: words for people
    (name, driver, memory, cores).
    """

    name: str
    kind: str
    host: str
    metrics: list[str]
    about: dict[str, str]


class Sample(_Message, tag="sample"):
    """What a source measured. values: by metric; details: vectors of which only the last is kept
    (cores, processes, threads).
    """

    source: str
    at_s: float
    values: dict[str, float]
    details: dict[str, list[float]] = {}


class Report(_Message, tag="report"):
    """What a job says of itself (`telemetry.report`): loss, tokens/s and whatever else, at a
    step.
    """

    at_s: float
    step: int
    values: dict[str, float]


class Note(_Message, tag="note"):
    """Something worth an event: a throttled GPU, an XID, NVML that does not answer."""

    at_s: float
    severity: Severity
    kind: str
    text: str


class Bye(_Message, tag="bye"):
    """The last message of a rank that ends by itself: its exit code, and why where it failed. A
    connection that ends without is a rank lost.
    """

    at_s: float
    code: int
    text: str = ""


FromRank: TypeAlias = (
    Hello | Heartbeat | Group | Plan | Call | Counters | Source | Sample | Report | Note | Bye
)


class Ping(_Message, tag="ping"):
    """For the clocks; the hub answers at once with `Pong`. sent_s: when, by the rank's clock."""

    sent_s: float


class Pong(_Message, tag="pong"):
    """Answers a `Ping`: when that was sent (the rank's clock) and when it arrived (seconds since
    the hub began).
    """

    sent_s: float
    hub_s: float


class Notice(_Message, tag="notice"):
    """An event, for the log of a rank: under a bare mpirun the hub has no terminal of its own."""

    severity: Severity
    text: str


ToRank: TypeAlias = Pong | Notice


class Ask(_Message, tag="ask"):
    """A viewer's question; the first on a connection must carry the secret. Answered by one frame
    of JSON (`views`).

    what: "snapshot", "first_lost", "series" or "timeline"; for the last two a window in seconds
    since the hub began (negative: before now), sources or ranks (none: all), and how much at most.
    """

    secret: str
    what: str
    since_s: float = -10.0
    until_s: float | None = None
    sources: list[str] = []
    metrics: list[str] = []
    ranks: list[int] = []
    limit: int = 2000


class Stopping(_Message, tag="stopping"):
    """The launcher's word before it ends the job, for whoever asked it to: ranks that end from now
    on are not lost. signal: its name.

    On a connection as a viewer's; answered by one frame of JSON (null) once the hub knows.
    """

    secret: str
    signal: str


class RecordHeader(_Message, tag="header"):
    """Begins a record. began_at_s: when the hub began, in seconds since the epoch."""

    version: int
    package: str
    began_at_s: float


class Presence(_Message, tag="presence"):
    """What the hub itself sees of a rank: "lost" (its connection ended without a `Bye`); or of the
    job (rank -1): "stopping" (text: by which signal).
    """

    rank: int
    status: str
    text: str


class Recorded(_Message):
    """One entry of a record: when the hub had the message, and the rank it came from (-1: the hub
    itself).
    """

    at_s: float
    rank: int
    message: FromRank | Presence


# What a State takes.
Item: TypeAlias = FromRank | Presence
