"""What ranks and the hub say to each other: typed messages, never pickles.

The types are msgspec's; messages travel as MessagePack.

A connection carries frames (`wire`), one message each. A record file holds the same messages, each
with the time at which the hub had it and the rank that it came from. So the model (`JobModel`) is
fed in one way, live or replayed. A message is an array, not a map: a newer version may append
fields with defaults, and nothing else, so that old records stay readable. It may have new messages,
which an older reader of records passes over.

Times named `*_s` in messages of a rank are seconds of that rank's `time.perf_counter`; the rank's
heartbeats say how far the hub's clock is ahead of it. `views` has the types for viewers, where all
times are seconds since the hub began.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TypeAlias

import msgspec

__all__ = [
    "VERSION",
    "Agreed",
    "Ask",
    "Bye",
    "Candidate",
    "Counters",
    "Counts",
    "EndedCall",
    "FromRank",
    "Group",
    "Heartbeat",
    "Hello",
    "HubReport",
    "Item",
    "JobReport",
    "LaneCounters",
    "LogLine",
    "MessageInfo",
    "Note",
    "PhaseEnded",
    "Ping",
    "PlanSummary",
    "Pong",
    "PostMortemLines",
    "RecordHeader",
    "Recorded",
    "Severity",
    "SourceInfo",
    "SourceSample",
    "Stopping",
    "TaskInfo",
    "ToRank",
]  # fmt: skip

# Version of the messages' meaning. A hub refuses ranks of another version.
VERSION = 1

# A message that a task sends or receives: peer (rank of the group), tag, bytes.
MessageInfo: TypeAlias = tuple[int, int, int]


class Severity(StrEnum):
    """The importance of an event for the person who watches."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def level(self) -> int:
        """The level at which Python's logging has it."""
        return int(logging.getLevelNamesMapping()[self.name])


class _Message(msgspec.Struct, array_like=True):
    pass


class Hello(_Message, tag="hello", kw_only=True):
    """The first message of a rank."""

    version: int
    secret: str
    rank: int  # number of the rank in the job
    world_size: int
    local_rank: int
    host: str
    pid: int
    device: str  # "cpu" or "cuda:N"
    gpu: str  # name of its source, "" without a GPU
    command: str  # command of the program
    package: str  # version of burst_rt
    sample_hz: float
    restarts: int = 0  # how often the job has been started again


class Heartbeat(_Message, tag="beat", kw_only=True):
    """Comes twice a second. Outside a call, `call` is -1 and what describes the call is empty."""

    sent_s: float
    # The hub's clock minus the rank's, as the ping with the shortest way tells it. The error is at
    # most half of rtt_s, the time of that way; rtt_s is -1 before the first answer.
    offset_s: float
    rtt_s: float
    group: str
    call: int  # number of the call under way in `group`
    doing: str  # the task of the call that is under way, or what the call waits for
    since_s: float  # when `doing` began
    hop: int = -1  # hop of that task; -1 if it has none


class Group(_Message, tag="group"):
    """A context of this rank."""

    name: str  # the same on all ranks of the group
    ranks: list[int]  # ranks of the job, in the group's order; a peer is a place in this list
    transport: str
    reason: str  # why this transport


class TaskInfo(_Message, kw_only=True):
    """A task of a plan."""

    name: str
    lane: str
    op: str  # operation of the graph, "exchange" for a transfer
    hop: int  # hop of the ring, -1 if the task belongs to none
    size_bytes: int
    flops: int
    ordered: bool  # the task runs on a stream
    sends: list[MessageInfo]
    recvs: list[MessageInfo]


class Candidate(_Message):
    """A strategy that a plan was chosen from."""

    strategy: str
    size_bytes: int  # bytes that all ranks together send in one run
    predicted_s: float | None  # None without a forecast


class PlanSummary(_Message, tag="plan", kw_only=True):
    """A graph that this rank runs; sent once, before the first call that runs it."""

    number: int  # this rank's own
    group: str
    kind: str  # "forward", "backward" or "pipeline"
    tasks: list[TaskInfo]
    explain: str  # strategy, kernel and why, bytes, memory, in words
    # Time of a simulated run on a machine like this one. None where that is not known, or where
    # another rank says it.
    predicted_s: float | None
    problem: str = ""  # layout, shapes and mask in words, the same on all ranks of the group
    strategy: str = ""  # the candidate that runs; "" for a pipeline
    candidates: list[Candidate] = []


class EndedCall(_Message, tag="call", kw_only=True):
    """A call that has ended."""

    group: str
    number: int  # number of the call, the same on all ranks of the group
    plan: int  # number of the plan
    started_s: float
    ended_s: float
    compute_s: float
    wait_s: float  # the compute lane idled: a transfer was under way, or a rank had not come yet
    spans: bytes  # 16 bytes each, see `timeline.SPAN`; times count from started_s
    after_gap: bool = False  # the rank's call before this one was dropped


class Agreed(_Message, tag="agreed"):
    """A call that ran no plan, in which the ranks agreed: on a cache's step, on a reduction."""

    group: str
    number: int  # number of the call, the same on all ranks of the group
    started_s: float  # when this rank entered it
    ended_s: float  # when the ranks had agreed
    after_gap: bool = False  # as in `EndedCall`


class LaneCounters(_Message):
    """The work of one lane since the start."""

    tasks: int
    size_bytes: int  # sent, on the network's lane; moved, on the others
    flops: int  # floating-point operations


class Counts(msgspec.Struct, kw_only=True):
    """The counts of a rank since its start, also of calls whose spans were dropped: exact, but for
    the times of such calls on a device, which count as the mean of the others.

    A new count is a field here, with a default, at the end; `calls` counts it, and viewers have it.
    """

    at_s: float = 0.0  # when the counts were as they are here
    calls: int = 0
    # Number of calls whose spans were looked at; only these count in transfer_s and overlap_s.
    traced_calls: int = 0
    compute_s: float = 0.0  # time in tiles
    wait_s: float = 0.0  # as in `EndedCall`, and in calls that only agree
    total_s: float = 0.0  # time in calls
    transfer_s: float = 0.0  # at least one transfer was under way
    overlap_s: float = 0.0  # a transfer was under way while the compute lane was busy
    lanes: dict[str, LaneCounters] = {}
    dropped: int = 0  # messages that found no room
    steps: int = 0  # steps of the job that have ended well (`telemetry.step`)
    step_s: float = 0.0  # time in those
    step_call_s: float = 0.0  # the part of it in calls that run a graph: attention, and pipelines


class Counters(Counts, array_like=True, tag="counters", kw_only=True):
    """The counts of a rank, as they are now."""


class SourceInfo(_Message, tag="source", kw_only=True):
    """Something that is sampled. Comes before the source's first sample."""

    name: str  # "gpu:UUID", "host:NAME", or "rank:N" for the process of a rank
    kind: str
    host: str
    metrics: list[str]  # names in `metrics.METRICS` that this source has
    about: dict[str, str]  # words for people: name, driver, memory, cores


class SourceSample(_Message, tag="sample"):
    """The measurements of a source."""

    source: str
    at_s: float
    values: dict[str, float]  # keyed by metric
    details: dict[str, list[float]] = {}  # for cores, processes, threads; only the last are kept


class JobReport(_Message, tag="report"):
    """The figures that a job reports at a step (`telemetry.report`): loss, tokens/s and other
    values.
    """

    at_s: float
    step: int
    values: dict[str, float]


class PhaseEnded(_Message, tag="phase"):
    """A step or a span of the job has ended (`telemetry.step`, `telemetry.span`)."""

    name: str  # "" for a step
    step: int  # number of the step, or of the one that the span is in; -1 outside of steps
    depth: int  # number of steps and spans around it
    started_s: float
    ended_s: float
    aside: bool = False  # in a thread beside the rank's own, which went on


class Note(_Message, tag="note"):
    """Something worth an event: a throttled GPU, an XID, NVML that does not answer."""

    at_s: float
    severity: Severity
    kind: str
    text: str


class Bye(_Message, tag="bye"):
    """The last message of a rank that ends by itself: its exit code, and the reason of a failure. A
    rank whose connection ends without a `Bye` is lost.
    """

    at_s: float
    code: int
    text: str = ""


FromRank: TypeAlias = (
    Hello
    | Heartbeat
    | Group
    | PlanSummary
    | EndedCall
    | Agreed
    | Counters
    | SourceInfo
    | SourceSample
    | JobReport
    | PhaseEnded
    | Note
    | Bye
)


class Ping(_Message, tag="ping"):
    """Asks for the hub's clock; the hub answers at once with `Pong`."""

    sent_s: float  # time on the rank's clock


class Pong(_Message, tag="pong"):
    """Answers a `Ping`."""

    sent_s: float  # when the ping was sent, by the rank's clock
    hub_s: float  # when the ping arrived, in seconds since the hub began


class LogLine(_Message, tag="log_line"):
    """An event for the log of a rank: under a bare mpirun the hub has no terminal of its own."""

    severity: Severity
    text: str


ToRank: TypeAlias = Pong | LogLine


class Ask(_Message, tag="ask", kw_only=True):
    """A viewer's question. The first question on a connection must carry the secret. The answer is
    one frame of JSON (`views`).
    """

    secret: str
    what: str  # "snapshot", "first_lost", "series" or "timeline"; the rest is for the last two
    since_s: float = -10.0  # seconds since the hub began; negative: before now
    until_s: float | None = None
    sources: list[str] = []  # none: all
    metrics: list[str] = []
    ranks: list[int] = []
    limit: int = 2000  # maximum number of rows or spans


class Stopping(_Message, tag="stopping"):
    """The launcher is about to end the job, because it was told to: ranks that end from now on are
    not lost. Comes on a viewer's connection; one frame of JSON (null) says that the hub knows.
    """

    secret: str
    signal: str  # name of the signal


class RecordHeader(_Message, tag="header"):
    """Begins a record."""

    version: int
    package: str
    began_at_s: float  # when the hub began, in seconds since the epoch


class HubReport(_Message, tag="presence"):
    """What the hub itself has seen."""

    rank: int  # -1 means the whole job
    status: str  # a rank's: "lost" (its connection ended without a `Bye`); the job's: "stopping"
    text: str  # how the connection ended; the signal that stops the job


class PostMortemLines(_Message, tag="post-mortem", kw_only=True):
    """The post-mortem of a job that failed, in lines (`job.postmortem`). The hub's last message."""

    heading: list[str]  # who stopped first, and who waited for whom
    advice: list[str]  # what to do next
    whole: list[str]  # all of it, as far as it has room


# A message that a JobModel takes.
Item: TypeAlias = FromRank | HubReport | PostMortemLines


class Recorded(_Message):
    """One entry of a record."""

    at_s: float  # when the hub had the message
    rank: int  # that the message came from, -1 for the hub itself
    message: Item
