"""The last words of `burst-rt run` on a job: who failed first, how, doing what; the exit code.

The sources are the ranks' reports, the order in which the ranks' processes ended (`ranks.py`),
their flight records, and mpirun's exit code. mpirun's exit code 0 is believed only where every rank
that can report has reported a good end: MPICH's mpirun returns 0 for a rank that ended by
`os._exit(0)`, though it killed the other ranks then.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from burst_rt import errors
from burst_rt.errors import PeerLost
from burst_rt.job.flights import read_flight
from burst_rt.job.reports import RankReport, RankWait, crash_path, primary_failure, read_reports
from burst_rt.launch.ranks import Ranks
from burst_rt.telemetry.model.views import Lost

__all__ = ["JobEnd", "last_words"]

# Maximum width of the headline, and width of its end. The whole error is right above the headline.
# A longer one is cut in its middle, because what to do comes last.
_HEADLINE_WIDTH, _END_WIDTH = 600, 250
# MPICH's mpirun returns a signal's own number, which may be an exit code, too. A rank that ends by
# any other deadly signal than these leaves its Python stack, which says the signal.
_BARE_SIGNALS = (signal.SIGKILL, signal.SIGTERM)
# A library whose connection to a dead rank breaks (gloo, NCCL) may raise before the launcher has
# been woken by the end of that rank. Where the launcher sees both ends, it sees them in order.
_WOKEN_S = 0.02


@dataclass(kw_only=True)
class JobEnd:
    """A job that has ended, and what its traces say.

    mpirun_code: negative where a signal ended mpirun. owed: the ranks that report however their
    programs end, unless they are lost. stuck_by: a rank's wait and the ended rank it waited for,
    where the launcher ended the job for that reason. lost: what telemetry knows of the rank that
    was lost first. started_by: the command that started the ranks; torchrun where there is no MPI.
    """

    job_dir: Path
    num_ranks: int
    started_at_s: float
    mpirun_code: int
    owed: Collection[int]
    ranks: Ranks
    stuck_by: tuple[RankWait, int] | None
    lost: Lost | None = None
    started_by: str = "mpirun"

    @cached_property
    def reports(self) -> list[RankReport]:
        """What ranks have said about their ends."""
        return read_reports(self.job_dir)

    @cached_property
    def failure(self) -> RankReport | None:
        """The failure that counts; a secondary one only where all are.

        Where ranks gave up on each other in a row, it is the last one, which waited for the head.
        """
        failure, told = primary_failure(self.reports), {x.rank: x for x in self.reports}
        passed: set[int] = set()
        while failure is not None and failure.secondary and failure.rank not in passed:
            behind = None if failure.peer is None else told.get(failure.peer)
            if behind is None or not (behind.failed and behind.secondary):
                break
            passed.add(failure.rank)
            failure = behind
        return failure

    @cached_property
    def silent(self) -> list[int]:
        """The ranks without a report."""
        return sorted(set(range(self.num_ranks)) - {report.rank for report in self.reports})

    @cached_property
    def crashed(self) -> int | None:
        """The first rank that left its stack. It may also crash on its way out, after its program
        has ended well.
        """
        ranks = self.silent if self.failure is not None else range(self.num_ranks)
        crashed = [rank for rank in ranks if self.crash_text(rank)]
        ended_at_s = self.ranks.ended_at_s
        return min(crashed, key=lambda rank: ended_at_s.get(rank, math.inf), default=None)

    def crash_text(self, rank: int) -> str:
        """The stack that a crashed rank has left, or ""."""
        path = crash_path(self.job_dir, rank)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @cached_property
    def told(self) -> int:
        """mpirun's exit code, as a shell counts it."""
        return self.mpirun_code if self.mpirun_code >= 0 else 128 - self.mpirun_code

    @cached_property
    def code(self) -> int:
        """The exit code where no rank's failure says it."""
        # A rank that has reported a good end may have lost its connection to telemetry alone.
        gone = self.lost is not None and self.lost.rank in self.silent
        gone = gone or not set(self.silent).isdisjoint(self.owed)
        return self.told or (PeerLost.exit_code if gone else 0)

    @cached_property
    def stuck(self) -> tuple[RankWait, int] | None:
        """As `stuck_by`. mpirun may have noticed by itself that a rank ended before it joined."""
        noticed = self.ranks.stuck() if self.code and self.failure is None else None
        return noticed if noticed is not None and noticed[1] not in self.silent else self.stuck_by

    @cached_property
    def gone(self) -> tuple[list[int], float]:
        """The rank whose process was gone before the others', without a report, and when; several
        ranks where they went at once, none where all have reported.
        """
        first = self.ranks.first_silent({report.rank for report in self.reports})
        lost = self.lost
        without_word = lost is not None and lost.exit_code is None and lost.rank in self.silent
        if lost is not None and without_word and len(first) != 1:
            # The first rank ended on another host, or too close to another rank's end to tell.
            return [lost.rank], lost.at_s
        return first, self.ranks.ended_at_s[first[0]] if first else 0.0

    @cached_property
    def went_before_failure(self) -> bool:
        """Whether a rank had gone when another one failed with an error that knows no ranks: that
        of a library that lost its connection, say.
        """
        failure, (first, went_at_s) = self.failure, self.gone
        if failure is None or not first or hasattr(errors, failure.kind):
            return False
        flight = read_flight(self.job_dir, first[0])
        done = flight is not None and flight.closed
        # mpirun ends other ranks only when the process of the rank that failed has ended; MPICH's
        # within milliseconds of that. But a rank that has heard of the failure may end the job
        # while the failed one waits to be heard by all.
        until_s = self.ranks.ended_at_s.get(failure.rank, failure.ended_at_s + _WOKEN_S)
        lost = [(x.ended_at_s, x.peer) for x in self.reports if x.secondary]
        if first[0] not in (peer for _, peer in lost):
            heard = [at_s + _WOKEN_S for at_s, peer in lost if peer == failure.rank]
            until_s = min(until_s, *heard, math.inf)
        return not done and went_at_s < until_s

    @cached_property
    def leaver(self) -> RankReport | None:
        """A rank that left in the middle of a call. The other ranks were ended because of it,
        perhaps before they could say why.
        """
        ended = (report for report in self.reports if not report.failed)
        return next((report for report in ended if self.doing(report.rank)), None)

    def after(self, at_s: float) -> str:
        """A time, in words."""
        return f"after {at_s - self.started_at_s:.1f} s"

    def doing(self, rank: int) -> str:
        """The last place of a rank in its program, as the end of a sentence; "" without one."""
        flight = read_flight(self.job_dir, rank)
        return f", {flight.place}" if flight is not None and flight.call is not None else ""


class _Cause(NamedTuple):
    """A row of the table: whether a job ended for this cause, the words, and the exit code."""

    name: str
    applies: Callable[[JobEnd], bool]
    words: Callable[[JobEnd], str]
    exit_code: Callable[[JobEnd], int] = lambda end: end.code


def last_words(end: JobEnd) -> tuple[str, int]:
    """The text to print ("" where all is well), whose last line names the cause, and the exit code.

    Does not block.
    """
    cause = next(cause for cause in _CAUSES if cause.applies(end))
    return cause.words(end), cause.exit_code(end)


def _has_failed(end: JobEnd) -> bool:
    failure = end.failure
    return failure is not None and not failure.secondary and not end.went_before_failure


def _has_left(end: JobEnd) -> bool:
    if not end.code or end.leaver is None or end.failure is not None:
        return False
    first, went_at_s = end.gone
    return not first or end.leaver.ended_at_s < went_at_s


def _has_gone(end: JobEnd) -> bool:
    first, went_at_s = end.gone
    sooner = end.failure is None or went_at_s < end.failure.ended_at_s
    return bool(end.code and first and (sooner or end.went_before_failure))


def _failure_code(end: JobEnd) -> int:
    return end.failure.exit_code if end.failure is not None else end.code


def _failed(end: JobEnd) -> str:
    """The words for a rank that has reported its failure."""
    report = end.failure
    assert report is not None
    error = f" with {_headline(report)}" if report.traceback else ""
    # The error of a library may be all that is left of a connection to a rank that went home.
    sooner = [x for x in end.reports if x.ended_at_s < report.ended_at_s]
    left = "" if hasattr(errors, report.kind) else _had_left(end, sooner)
    return (
        f"{report.traceback}{left}burst-rt: rank {report.rank} failed "
        f"{end.after(report.ended_at_s)}{error} (exit code {report.exit_code})"
        f"{end.doing(report.rank)}\n"
    )


def _had_left(end: JobEnd, reports: Iterable[RankReport]) -> str:
    """A line for each rank whose program ended well, as these reports say."""
    return "".join(
        f"burst-rt: rank {r.rank} had left with exit code 0 {end.after(r.ended_at_s)}\n"
        for r in reports
        if not r.failed
    )


def _headline(report: RankReport) -> str:
    text = " ".join(report.headline.split())
    if len(text) <= _HEADLINE_WIDTH:
        return text
    return f"{text[: _HEADLINE_WIDTH - _END_WIDTH]} ... {text[-_END_WIDTH:]}"


def _crashed(end: JobEnd) -> str:
    rank = end.crashed
    assert rank is not None
    text = end.crash_text(rank)
    number = _crash_signal(text)
    how = f"signal {number}, {number.name}" if number else f"exit code {end.told}"
    return f"{text}burst-rt: rank {rank} crashed in native code ({how}){end.doing(rank)}\n"


def _crash_code(end: JobEnd) -> int:
    number = _crash_signal(end.crash_text(end.crashed)) if end.crashed is not None else None
    return 128 + number if number else end.told or PeerLost.exit_code


def _crash_signal(text: str) -> signal.Signals | None:
    """The signal that a crashed rank's text names ("Fatal Python error: Segmentation fault").

    mpirun's exit code says less: Intel's is 255, and MPICH's joins the codes of several ranks.
    """
    named = (number for number in signal.Signals if f": {signal.strsignal(number)}\n" in text)
    return next(named, None)


def _stuck(end: JobEnd) -> str:
    assert end.stuck is not None
    waiting, rank = end.stuck
    report = next((report for report in end.reports if report.rank == rank), None)
    how = (
        f"left with exit code {report.exit_code} {end.after(report.ended_at_s)}"
        if report
        else "ended without a report"
    )
    where = "before it had started MPI" if waiting.what == "MPI_Init" else f"before {waiting.what}"
    return (
        f"burst-rt: rank {rank} {how}, {where}; rank {waiting.rank} waited there for rank {rank}, "
        "so the job was ended\n"
    )


def _mpirun_killed(end: JobEnd) -> str:
    killed = f"{end.started_by} itself was killed by {_in_words(end.told)}"
    return f"burst-rt: {killed}, and its ranks with it\n"


def _leaver_left(end: JobEnd) -> str:
    assert end.leaver is not None
    return _left(end, end.leaver)


def _left(end: JobEnd, report: RankReport) -> str:
    return (
        f"burst-rt: rank {report.rank} left with exit code 0 {end.after(report.ended_at_s)} while "
        f"other ranks were in a call{end.doing(report.rank)}\n"
    )


def _went(end: JobEnd) -> str:
    """The words for ranks whose processes were gone before the others', without a report."""
    first, went_at_s = end.gone
    code, failure, lost = end.told, end.failure, end.lost
    # mpirun's exit code may be that of another rank, which reported that it lost this one.
    name = "" if failure and failure.exit_code == code else _in_words(code)
    how = (
        f"was killed by {name}"
        if name
        else f"ended without a report ({end.started_by}'s exit code is {code}{_bare_signal(end)})"
    )
    who, doing = f"one of ranks {', '.join(map(str, first))}", ""
    if len(first) == 1:
        known = lost is not None and lost.rank == first[0] and bool(lost.activity)
        activity = f"; {lost.activity}" if lost is not None and known else ""
        who, doing = f"rank {first[0]}", end.doing(first[0]) or activity
    traceback = failure.traceback if failure else ""
    return f"{traceback}burst-rt: {who} {how} {end.after(went_at_s)}{doing}\n"


def _secondary(end: JobEnd) -> str:
    """The words where every reported failure is another rank's fault: they name that other rank."""
    failure = end.failure
    assert failure is not None
    ended = [report for report in end.reports if not report.failed]
    left = next(
        (report for report in ended if report.rank == failure.peer), ended[0] if ended else None
    )
    if left is not None and failure.kind == "PeerLost":
        return failure.traceback + _left(end, left)
    if failure.peer is None or failure.peer not in end.silent:
        return _failed(end)
    return (
        f"{_failed(end)}burst-rt: rank {failure.peer} gave no report: it was killed, or it was "
        f"stuck{end.doing(failure.peer)}\n"
    )


def _unknown(end: JobEnd) -> str:
    silent, code = end.silent, end.told
    if not silent:
        return (
            f"burst-rt: every rank's program ended well, but {end.started_by}'s exit code is "
            f"{code}: a rank left a part of MPI open (a session, say), or failed after its "
            f"program; {end.started_by}'s own message, if any, is above\n"
        )
    how = f"{code} ({name})" if (name := _in_words(code)) else f"{code}{_bare_signal(end)}"
    if len(silent) == end.num_ranks:
        return (
            f"burst-rt: no rank said why it ended; {end.started_by}'s exit code is {how} and "
            "its own message, if any, is above\n"
        )
    names = ", ".join(map(str, silent))
    return (
        f"{_had_left(end, end.reports)}burst-rt: no report from rank {names}: killed by a signal, "
        f"or by {end.started_by} after another rank had failed, or left by os._exit; "
        f"{end.started_by}'s exit code is {how}\n"
    )


def _in_words(code: int) -> str:
    """The signal that an exit code means, as a shell counts (128 + signal); "" without one."""
    try:
        return f"signal {code - 128}, {signal.Signals(code - 128).name}"
    except ValueError:
        return ""


def _bare_signal(end: JobEnd) -> str:
    """The words for an exit code that may be a signal's own number; "" for other codes."""
    if end.told not in _BARE_SIGNALS:
        return ""
    name = signal.Signals(end.told).name
    return f", as of {name}, by which {end.started_by} may itself have ended this rank or another"


# The causes, the surest first: the first that applies is told.
_CAUSES = (
    _Cause("a rank failed", _has_failed, _failed, _failure_code),
    _Cause("a rank crashed", lambda end: end.crashed is not None, _crashed, _crash_code),
    _Cause(
        "a rank waited to join one that had ended",
        lambda end: end.stuck is not None,
        _stuck,
        lambda end: PeerLost.exit_code,
    ),
    _Cause(
        "mpirun was killed", lambda end: end.mpirun_code < 0 and end.failure is None, _mpirun_killed
    ),
    _Cause("a rank left in a call", _has_left, _leaver_left),
    _Cause("a rank was gone first", _has_gone, _went, _failure_code),
    _Cause(
        "ranks lost one that nothing else is known of",
        lambda end: end.failure is not None,
        _secondary,
        _failure_code,
    ),
    _Cause("none: all is well", lambda end: end.code == 0, lambda end: ""),
    _Cause("unknown", lambda end: True, _unknown),
)
