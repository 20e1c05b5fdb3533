"""The last words of `burst-rt run` on a job: who failed first, how, doing what; the exit code.

The sources are the ranks' reports, the order in which the ranks' processes ended (`ranks.py`),
their flight records, and mpirun's exit code. mpirun's exit code 0 is believed only where every rank
that can report has reported a good end: MPICH's mpirun returns 0 for a rank that ended by
`os._exit(0)`, though it killed the other ranks then.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from burst_rt.errors import PeerLost
from burst_rt.job.flight import read_flight
from burst_rt.job.reports import RankReport, Waiting, crash_path, primary_failure, read_reports
from burst_rt.launch.ranks import Ranks
from burst_rt.telemetry.model.views import Lost

__all__ = ["verdict"]

# Maximum width of the headline, and width of its end. The whole error is right above the headline.
# A longer one is cut in its middle, because what to do comes last.
_HEADLINE_WIDTH, _END_WIDTH = 600, 250
# MPICH's mpirun returns a signal's own number, which may be an exit code, too. A rank that ends by
# any other deadly signal than these leaves its Python stack, which says the signal.
_BARE_SIGNALS = (signal.SIGKILL, signal.SIGTERM)


def verdict(
    job_dir: Path,
    num_ranks: int,
    started_at_s: float,
    mpirun_code: int,
    owed: Collection[int],
    ranks: Ranks,
    stuck: tuple[Waiting, int] | None,
    lost: Lost | None = None,
) -> tuple[str, int]:
    """The text to print ("" where all is well), whose last line names the cause, and the exit code.

    mpirun_code: negative where a signal ended mpirun. owed: the ranks that report however their
    programs end, unless they are lost. stuck: a rank's wait and the ended rank it waited for, where
    the launcher ended the job for that reason. lost: what telemetry knows of the rank that was lost
    first. Does not block.
    """
    reports = read_reports(job_dir)
    failure = primary_failure(reports)
    told = mpirun_code if mpirun_code >= 0 else 128 - mpirun_code
    silent = sorted(set(range(num_ranks)) - {report.rank for report in reports})
    # A rank may also crash on its way out, after its program has ended well.
    crashed = [
        rank
        for rank in range(num_ranks)
        if (rank in silent or failure is None) and _crash_text(job_dir, rank)
    ]
    if failure is not None and not failure.secondary:
        return _failed(job_dir, failure, started_at_s), failure.exit_code
    if crashed:
        rank = min(crashed, key=lambda rank: ranks.ended_at_s.get(rank, math.inf))
        text = _crash_text(job_dir, rank)
        number = _crash_signal(text)
        how = f"signal {number}, {number.name}" if number else f"exit code {told}"
        return (
            f"{text}burst-rt: rank {rank} crashed in native code ({how}){_doing(job_dir, rank)}\n",
            128 + number if number else told or PeerLost.exit_code,
        )
    gone = lost is not None or not set(silent).isdisjoint(owed)
    code = told or (PeerLost.exit_code if gone else 0)
    # mpirun may have noticed by itself that a rank ended before it had joined.
    noticed = ranks.stuck() if code and failure is None else None
    if noticed is not None and noticed[1] not in silent:
        stuck = noticed
    if stuck is not None:
        return _stuck(stuck, reports, started_at_s), PeerLost.exit_code
    if mpirun_code < 0 and failure is None:
        return (
            f"burst-rt: mpirun itself was killed by {_in_words(told)}, and its ranks with it\n",
            code,
        )
    first = ranks.first_silent({report.rank for report in reports})
    went_at_s = ranks.ended_at_s[first[0]] if first else 0.0
    if len(first) != 1 and lost is not None and lost.exit_code is None and lost.rank in silent:
        # The first rank ended on another host, or too close to another rank's end to tell here.
        first, went_at_s = [lost.rank], lost.at_s
    known = {} if lost is None else {lost.rank: lost.known}
    # A rank that left in the middle of a call. The other ranks were ended because of it, perhaps
    # before they could say why.
    leaver = next(
        (report for report in reports if not report.failed and read_flight(job_dir, report.rank)),
        None,
    )
    if (
        code
        and leaver is not None
        and failure is None
        and (not first or leaver.ended_at_s < went_at_s)
    ):
        return _left(job_dir, leaver, started_at_s), code
    if code and first and (failure is None or went_at_s < failure.ended_at_s):
        return _went(
            job_dir, first, went_at_s - started_at_s, told, failure, known
        ), failure.exit_code if failure else code
    if failure is not None:
        return _secondary(job_dir, failure, reports, silent, started_at_s), failure.exit_code
    if code == 0:
        return "", 0
    left = "".join(
        f"burst-rt: rank {r.rank} had left with exit code 0 after "
        f"{r.ended_at_s - started_at_s:.1f} s\n"
        for r in reports
        if silent
    )
    return left + _unknown(silent, num_ranks, told), code


def _failed(job_dir: Path, report: RankReport, started_at_s: float) -> str:
    error = f" with {_headline(report)}" if report.traceback else ""
    after_s = report.ended_at_s - started_at_s
    doing = _doing(job_dir, report.rank)
    return (
        f"{report.traceback}burst-rt: rank {report.rank} failed after {after_s:.1f} s{error} "
        f"(exit code {report.exit_code}){doing}\n"
    )


def _headline(report: RankReport) -> str:
    text = " ".join(report.headline.split())
    if len(text) <= _HEADLINE_WIDTH:
        return text
    return f"{text[: _HEADLINE_WIDTH - _END_WIDTH]} ... {text[-_END_WIDTH:]}"


def _stuck(stuck: tuple[Waiting, int], reports: Sequence[RankReport], started_at_s: float) -> str:
    waiting, rank = stuck
    report = next((report for report in reports if report.rank == rank), None)
    how = (
        f"left with exit code {report.exit_code} after {report.ended_at_s - started_at_s:.1f} s"
        if report
        else "ended without a report"
    )
    where = "before it had started MPI" if waiting.what == "MPI_Init" else f"before {waiting.what}"
    return (
        f"burst-rt: rank {rank} {how}, {where}; rank {waiting.rank} waited there for rank {rank}, "
        "so the job was ended\n"
    )


def _went(
    job_dir: Path,
    first: Sequence[int],
    after_s: float,
    code: int,
    failure: RankReport | None,
    known: Mapping[int, str],
) -> str:
    """The words for ranks whose processes were gone before the others', without a report."""
    # Where another rank reported that it lost this one, mpirun's exit code is that other rank's.
    name = "" if failure else _in_words(code)
    how = (
        f"was killed by {name}"
        if name
        else f"ended without a report (mpirun's exit code is {code}{_bare_signal(code)})"
    )
    who = f"rank {first[0]}" if len(first) == 1 else f"one of ranks {', '.join(map(str, first))}"
    doing = ""
    if len(first) == 1:
        doing = _doing(job_dir, first[0]) or (
            f"; {words}" if (words := known.get(first[0], "")) else ""
        )
    return (
        f"{failure.traceback if failure else ''}burst-rt: {who} {how} after {after_s:.1f} "
        f"s{doing}\n"
    )


def _secondary(
    job_dir: Path,
    failure: RankReport,
    reports: Sequence[RankReport],
    silent: Sequence[int],
    started_at_s: float,
) -> str:
    """The words where every reported failure is another rank's fault: they name that other rank."""
    ended = [report for report in reports if not report.failed]
    left = next(
        (report for report in ended if report.rank == failure.peer), ended[0] if ended else None
    )
    if left is not None and failure.kind == "PeerLost":
        return failure.traceback + _left(job_dir, left, started_at_s)
    if failure.peer is not None and failure.peer in silent:
        stuck = (
            f"rank {failure.peer} gave no report: it was killed, or it was "
            f"stuck{_doing(job_dir, failure.peer)}"
        )
        return f"{_failed(job_dir, failure, started_at_s)}burst-rt: {stuck}\n"
    return _failed(job_dir, failure, started_at_s)


def _left(job_dir: Path, report: RankReport, started_at_s: float) -> str:
    how = (
        f"left with exit code 0 after {report.ended_at_s - started_at_s:.1f} s while other ranks "
        "were in a call"
    )
    return f"burst-rt: rank {report.rank} {how}{_doing(job_dir, report.rank)}\n"


def _unknown(silent: Sequence[int], num_ranks: int, code: int) -> str:
    if not silent:
        return (
            f"burst-rt: every rank's program ended well, but mpirun's exit code is {code}: a rank "
            "left a part of MPI open (a session, say), or failed after its program; mpirun's own "
            "message, if any, is above\n"
        )
    how = f"{code} ({name})" if (name := _in_words(code)) else f"{code}{_bare_signal(code)}"
    if len(silent) == num_ranks:
        return (
            f"burst-rt: no rank said why it ended; mpirun's exit code is {how} and its own "
            "message, if any, is above\n"
        )
    names = ", ".join(map(str, silent))
    return (
        f"burst-rt: no report from rank {names}: killed by a signal, or by mpirun after another "
        f"rank had failed, or left by os._exit; mpirun's exit code is {how}\n"
    )


def _in_words(code: int) -> str:
    """The signal that an exit code means, as a shell counts (128 + signal); "" without one."""
    try:
        return f"signal {code - 128}, {signal.Signals(code - 128).name}"
    except ValueError:
        return ""


def _bare_signal(code: int) -> str:
    """The words for an exit code that may be a signal's own number; "" for other codes."""
    if code not in _BARE_SIGNALS:
        return ""
    name = signal.Signals(code).name
    return f", as of {name}, by which mpirun may itself have ended this rank or another"


def _doing(job_dir: Path, rank: int) -> str:
    flight = read_flight(job_dir, rank)
    return f", {flight}" if flight else ""


def _crash_signal(text: str) -> signal.Signals | None:
    """The signal that a crashed rank's text names ("Fatal Python error: Segmentation fault").

    mpirun's exit code says less: Intel's is 255, and MPICH's joins the codes of several ranks.
    """
    named = (number for number in signal.Signals if f": {signal.strsignal(number)}\n" in text)
    return next(named, None)


def _crash_text(job_dir: Path, rank: int) -> str:
    path = crash_path(job_dir, rank)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
