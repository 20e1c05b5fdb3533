"""What viewers get: the dashboard, `burst-rt top`, `/metrics` and replays all read these, and
nothing else. Plain data, ready for JSON.

All times are seconds since the hub began (`Job.began_at_s` says when that was). Names of metrics
and their units: `metrics.METRICS`.
"""

from __future__ import annotations

import msgspec

from burst_rt.telemetry.messages import Candidate, LaneCounters, Severity

__all__ = [
    "EventView", "FlowView", "JobView", "Lost", "PlanView", "ProgressView", "RankView",
    "SeriesView", "Snapshot", "SourceView", "SpanView",
    "TimelineView", "WaitView",
]  # fmt: skip


class JobView(msgspec.Struct):
    """now_s: when the snapshot was made. world_size: 0 before a rank has come. record: the file it
    is recorded to, "" for none.

    dropped: messages that ranks had no room for; replayed: this is a record, not a running job.
    first_lost: the rank that was lost, or failed, before all others, -1 for none.
    """

    began_at_s: float
    now_s: float
    world_size: int
    command: str
    package: str
    record: str
    dropped: int
    replayed: bool
    first_lost: int = -1


class RankView(msgspec.Struct):
    """A rank. status: "live", "silent" (no heartbeat for 2 s), "lost" (its connection ended without
    a word), "left" (it ended by itself); "ended" (lost or failed after another one had been),
    "stopped" (lost or failed after the job was told to stop).

    call: number of the call under way, -1 outside any; doing: its task or what it waits for, since
    doing_since_s: as it was when the rank last told. last_call: that it is known to have ended, -1:
    none. calls and other counters are those of `messages.Counters`; the number of a call counts
    agreements and reductions too. source: of its process; gpu: of its GPU, "" without. exit_code:
    of one that left. ending: how it ended, in words, "" while it has not.
    """

    rank: int
    host: str
    pid: int
    device: str
    source: str
    gpu: str
    status: str
    status_since_s: float
    exit_code: int | None
    group: str
    call: int
    hop: int
    doing: str
    doing_since_s: float
    heard_s: float
    offset_s: float
    rtt_s: float
    calls: int
    compute_s: float
    wait_s: float
    total_s: float
    overlap: float | None
    dropped: int
    lanes: dict[str, LaneCounters]
    last_call: int = -1
    ending: str = ""


class Lost(msgspec.Struct):
    """The rank that was lost, or failed, before all others. at_s: when, in seconds since the epoch.

    call, task, hop: what it was doing when that was last known, age_s before; -1, "" and -1 where
    it was in no call, or that is not known. last_call: the last call that it is known to have
    ended, -1: none. exit_code, said: of one that said why, else None and "". known: what it was
    doing, and how long before, in words ("" where nothing is known).
    """

    rank: int
    at_s: float
    call: int
    task: str
    hop: int
    age_s: float
    last_call: int
    known: str
    exit_code: int | None = None
    said: str = ""


class SourceView(msgspec.Struct):
    """Something sampled, and its last values. kind: "gpu", "host", "process" or "job"; ranks: those
    that use it. at_s: of the last sample.

    metrics: all that have a history (`State.series`). details: vectors ("core_percent": one number
    a core).
    """

    name: str
    kind: str
    host: str
    ranks: list[int]
    about: dict[str, str]
    at_s: float
    metrics: list[str]
    values: dict[str, float]
    details: dict[str, list[float]]


class ProgressView(msgspec.Struct):
    """The last report of the job: its step and values (loss, tokens_per_s ...), by name. at_s:
    when; None before the first.
    """

    at_s: float | None
    step: int
    values: dict[str, float]


class PlanView(msgspec.Struct):
    """A plan of a rank: see `messages.Plan`. num_tasks: of its graph."""

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


class EventView(msgspec.Struct):
    """Something that happened. number: counts up from 1. rank: -1 for the whole job. kind:
    "joined", "lost", "silent", "back", "left", "ended", "stopped", "stopping", "plan", "not
    finite", "xid", "ecc", "throttle", "nvml". text: without the rank's number; `line` has all of
    it.
    """

    number: int
    at_s: float
    rank: int
    severity: Severity
    kind: str
    text: str

    @property
    def line(self) -> str:
        """One line for a log: time and rank first."""
        return (
            f"{self.at_s:.3f} s {f'rank {self.rank}' if self.rank >= 0 else 'job'} {self.kind}: "
            f"{self.text}"
        )


class Snapshot(msgspec.Struct):
    """The present: everything but histories and spans. events: the last ones, oldest first."""

    revision: int
    job: JobView
    progress: ProgressView
    ranks: list[RankView]
    sources: list[SourceView]
    plans: list[PlanView]
    events: list[EventView]


class SeriesView(msgspec.Struct):
    """A window of one source: times, and a list as long for each metric (None where a row lacks
    it).
    """

    source: str
    times: list[float]
    values: dict[str, list[float | None]]


class SpanView(msgspec.Struct, array_like=True):
    """A task as it ran. In JSON an array in this order. call: number in its group; hop: -1 where it
    has none; plan: of the rank.

    sends, receives: messages of the task.
    """

    rank: int
    group: str
    call: int
    kind: str
    task: int
    name: str
    lane: str
    op: str
    hop: int
    issued_s: float
    started_s: float
    ended_s: float
    size_bytes: int
    flops: int
    plan: int
    sends: int
    receives: int


class WaitView(msgspec.Struct, array_like=True):
    """A rank's compute lane stood still. In JSON an array in this order. cause: "exposed" (a
    transfer it needs was on the wire) or "skew" (a peer had not come to it yet); peer: the rank
    whose message that was; task: the transfer.
    """

    rank: int
    call: int
    cause: str
    started_s: float
    ended_s: float
    peer: int
    task: str
    group: str


class FlowView(msgspec.Struct, array_like=True):
    """A message: which task sent it, which received it. In JSON an array in this order. number:
    among those its receiver's task gets.
    """

    call: int
    sender: int
    send_task: int
    sent_s: float
    receiver: int
    receive_task: int
    received_s: float
    size_bytes: int
    group: str
    number: int


class TimelineView(msgspec.Struct):
    """Tasks of a window. complete: calls of which all ranks' spans are here; only for them is it
    known where a rank waited and who sent what. left_out: spans beyond the limit (the oldest are
    left out).
    """

    since_s: float
    until_s: float
    spans: list[SpanView]
    waits: list[WaitView]
    flows: list[FlowView]
    complete: int
    left_out: int
