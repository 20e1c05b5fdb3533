"""What viewers get: types of plain data, ready for JSON. The model holds them, too.

The dashboard, `burst-rt top`, `/metrics` and replays all read these types, and nothing else.

All times are seconds since the hub began; `JobView.began_at_s` says when that was. Metrics and
their units are in `metrics.METRICS`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from burst_rt.telemetry.messages import Candidate, Counts, Severity

__all__ = [
    "CallView", "EventView", "FlowView", "JobView", "Lost", "MarkView", "PhaseView", "PlanView",
    "PostMortemView", "ProgressView", "RankView", "SeriesView", "Snapshot", "SourceView",
    "SpanView", "TimelineView",
    "Verdict", "WaitView", "shared_fields", "update",
]  # fmt: skip


@cache
def _shared_names(view: type[msgspec.Struct], message: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in view.__struct_fields__ if name in message.__struct_fields__)


def shared_fields(message: msgspec.Struct, view: type[msgspec.Struct]) -> dict[str, Any]:
    """The fields that a message and a type of view share by name: a field that a message brings to
    viewers has one name, and is written down nowhere else.
    """
    return {name: getattr(message, name) for name in _shared_names(view, type(message))}


def update(view: msgspec.Struct, message: msgspec.Struct) -> None:
    """Brings the fields of a message into a view that has them, too."""
    for name in _shared_names(type(view), type(message)):
        setattr(view, name, getattr(message, name))


class Verdict(msgspec.Struct, kw_only=True):
    """What limits the job; see `limits`."""

    # "late rank", "full host", "transfers", "uneven ranks", "throttled GPU" or "overhead"; where
    # ranks wait for nothing, "outside" or "nothing".
    kind: str
    rank: int  # that it is about, -1: none alone
    share: float  # what it costs: the part of the ranks' time, 0 to 1
    text: str
    advice: str  # what to do; "" for nothing
    since_s: float = 0.0  # since when it has been so


class PostMortemView(msgspec.Struct, kw_only=True):
    """See `messages.PostMortemLines`."""

    heading: list[str]
    advice: list[str]
    whole: list[str]


class JobView(msgspec.Struct, kw_only=True):
    """The job as a whole."""

    began_at_s: float  # when the hub began, in seconds since the epoch
    now_s: float  # when the snapshot was made
    world_size: int  # 0 before the first rank joins
    command: str
    package: str  # version of burst_rt
    record: str  # the file that the job is recorded to, "" for none
    dropped: int  # messages that ranks had no room for
    replayed: bool  # this is a record, not a running job
    first_lost: int = -1  # the rank that was lost, or failed, before all others; -1: none was
    verdict: Verdict | None = None  # what limits the job; None before the first calls
    ended: bool = False  # the job has ended, and its hub goes once its viewers know
    post_mortem: PostMortemView | None = None  # None unless the job has failed and ended
    # Attention's part of the ranks' time in steps, 0 to 1; None before the first step has ended.
    step_share: float | None = None
    length_s: float | None = None  # that of the record; None for a running job


class RankView(Counts, kw_only=True):
    """A rank, and what it has counted. `calls` counts only calls that run a graph; the number of a
    call counts agreements and reductions too. Fields of `Hello`, `Heartbeat` and `Counters` have
    the names that they have there.
    """

    rank: int
    host: str
    pid: int
    device: str
    source: str  # source of the rank's process
    gpu: str = ""  # source of the rank's GPU, "" without one
    # "live"; "silent": no heartbeat for 2 s; "lost": the connection closed unexpectedly; "left":
    # the rank ended by itself; "ended": lost, or failed, after another rank had been; "stopped":
    # lost, or failed, after the job was told to stop.
    status: str = "live"
    status_since_s: float
    exit_code: int | None = None  # exit code of a rank that left
    # As it was when the rank last told.
    group: str = ""
    call: int = -1  # number of the call in progress, -1 outside any
    hop: int = -1
    doing: str = ""  # the call's task, or what the call waits for
    doing_since_s: float = 0.0
    heard_s: float  # when the rank was last heard
    offset_s: float = 0.0  # see `messages.Heartbeat`
    rtt_s: float = -1.0
    overlap: float | None = None  # part of the time of transfers that compute hid
    last_call: int = -1  # the last call that the rank is known to have ended, -1: none
    ending: str = ""  # the rank's end in words; "" while it runs

    @property
    def alive(self) -> bool:
        """Whether the rank has not ended, as far as is known."""
        return self.status in ("live", "silent")


class Lost(msgspec.Struct, kw_only=True):
    """The rank that was lost, or failed, before all others."""

    rank: int
    at_s: float  # when it was lost, in seconds since the epoch
    # Last known activity of the rank, age_s before it was lost: -1, "" and -1 if it was in no call,
    # or if nothing is known.
    call: int
    task: str
    hop: int
    age_s: float
    last_call: int  # the last call that the rank is known to have ended, -1: none
    activity: str  # last known activity of the rank, and how long before, in words; "" if unknown
    exit_code: int | None = None  # exit code of a rank that said how it ended
    reason: str = ""  # why it ended, as the rank said


class SourceView(msgspec.Struct, kw_only=True):
    """Something sampled, and its last values."""

    name: str
    kind: str  # "gpu", "host", "process" or "job"
    host: str
    ranks: list[int] = []  # ranks that use it
    about: dict[str, str]
    at_s: float = 0.0  # time of the last sample
    metrics: list[str]  # all metrics that have a history (`JobModel.series`)
    values: dict[str, float] = {}
    details: dict[str, list[float]] = {}  # vectors; "core_percent" has one number a core


class ProgressView(msgspec.Struct):
    """The last report of the job."""

    at_s: float | None  # None before the first report
    step: int
    values: dict[str, float]  # loss, tokens_per_s ... by name


class PlanView(msgspec.Struct, kw_only=True):
    """A plan of a rank: see `messages.PlanSummary`."""

    rank: int
    number: int
    group: str
    kind: str
    num_tasks: int
    explain: str
    predicted_s: float | None
    problem: str
    strategy: str
    candidates: list[Candidate]


class EventView(msgspec.Struct, kw_only=True):
    """Something that happened."""

    number: int  # counts up from 1
    at_s: float
    rank: int  # -1 means the whole job
    severity: Severity
    # "joined", "lost", "silent", "back", "left", "ended", "stopped", "stopping", "plan", "not
    # finite", "loss spike", "xid", "ecc", "throttle" or "nvml".
    kind: str
    text: str  # without time and rank, which `line` has too

    @property
    def line(self) -> str:
        """The event as a line of a log: time and rank first."""
        who = f"rank {self.rank}" if self.rank >= 0 else "job"
        return f"{self.at_s:.3f} s {who} {self.kind}: {self.text}"


class Snapshot(msgspec.Struct, kw_only=True):
    """The present: everything but histories and spans."""

    revision: int
    job: JobView
    progress: ProgressView
    ranks: list[RankView]
    sources: list[SourceView]
    plans: list[PlanView]
    events: list[EventView]  # the last ones, oldest first


class MarkView(msgspec.Struct, kw_only=True):
    """Something that happened to the job, to be marked on curves."""

    at_s: float
    step: int  # the step that it came after, -1 before the first
    kind: str  # "checkpoint", "evaluation", "restart" or "loss spike"
    text: str


class SeriesView(msgspec.Struct):
    """A window of one source: times, and for each metric a list as long as the times (None where a
    row lacks the metric). marks: of the source "job".
    """

    source: str
    times: list[float]
    values: dict[str, list[float | None]]
    marks: list[MarkView] = []


class SpanView(msgspec.Struct, array_like=True):
    """A task as it ran: a `scheduler.Span`, and what the plan says of the task. In JSON an array in
    this order.
    """

    task: int
    name: str
    lane: str
    issued_s: float
    started_s: float
    ended_s: float
    size_bytes: int
    flops: int
    hop: int  # -1 where the task belongs to none
    sends: int  # messages that the task sends
    receives: int


class CallView(msgspec.Struct, kw_only=True):
    """The spans of a call on one rank."""

    rank: int
    group: str
    call: int  # number of the call in its group
    kind: str
    plan: int  # number of the rank's plan
    spans: list[SpanView]


class WaitView(msgspec.Struct, array_like=True, kw_only=True):
    """An interval in which a rank's compute lane was idle. In JSON an array in this order."""

    rank: int
    call: int
    # "exposed": a transfer that the rank needs was on the wire; "skew": a peer had not come to that
    # transfer yet; "late entry": the last rank had not entered the call.
    cause: str
    started_s: float
    ended_s: float
    peer: int  # rank of the job that the transfer is with
    task: str  # name of the transfer
    group: str


class FlowView(msgspec.Struct, array_like=True, kw_only=True):
    """A message between two tasks. In JSON an array in this order."""

    call: int
    sender: int
    send_task: int
    sent_s: float
    receiver: int
    receive_task: int
    received_s: float
    size_bytes: int
    group: str
    number: int  # among the messages that the receiver's task gets


class PhaseView(msgspec.Struct, array_like=True, kw_only=True):
    """A step or a span of the job: see `messages.PhaseEnded`. In JSON an array in this order."""

    rank: int
    name: str  # "" for a step
    step: int
    depth: int
    started_s: float
    ended_s: float
    aside: bool


class TimelineView(msgspec.Struct, kw_only=True):
    """Tasks of a window. Only of complete calls is it known who waited and who sent what."""

    since_s: float
    until_s: float
    calls: list[CallView] = []  # the oldest first
    waits: list[WaitView] = []
    flows: list[FlowView] = []
    complete: int = 0  # calls of which the spans of all ranks are here
    left_out: int = 0  # spans beyond the limit: the oldest
    phases: list[PhaseView] = []  # steps and spans of the job, in the order of their ends
    phases_left_out: int = 0  # those beyond the limit: the oldest

    @property
    def num_spans(self) -> int:
        """Number of spans of all calls."""
        return sum(len(call.spans) for call in self.calls)
