"""The last words of a job (launch/verdict.py): each row of the table of causes, and their order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from burst_rt.errors import PeerLost
from burst_rt.job.flight import FlightRecord
from burst_rt.job.reports import RankReport, RankWait, crash_path, write_report
from burst_rt.launch import verdict
from burst_rt.launch.ranks import Ranks
from burst_rt.launch.verdict import JobEnd, last_words
from burst_rt.telemetry.model.views import Lost

_BEGAN_S = 1000.0
_LOST = PeerLost.exit_code
_SEGFAULT = "Fatal Python error: Segmentation fault\n\nCurrent thread ...\n"


def _report(rank: int, after_s: float, exit_code: int = 0, **about: Any) -> RankReport:  # fields
    return RankReport(rank, _BEGAN_S + after_s, exit_code, **about)


def _lost(rank: int, after_s: float, activity: str = "") -> Lost:
    return Lost(
        rank=rank, at_s=_BEGAN_S + after_s, call=-1, task="", hop=-1, age_s=0.0, last_call=-1,
        activity=activity,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The traces of a job of three ranks."""

    reports: tuple[RankReport, ...] = ()
    crashed: tuple[int, ...] = ()
    in_call: tuple[int, ...] = ()
    gone_s: Mapping[int, float] = field(default_factory=dict)  # when processes ended, by rank
    mpirun_code: int = 1
    owed: tuple[int, ...] = ()
    stuck_by: tuple[RankWait, int] | None = None
    lost: Lost | None = None

    def end(self, folder: Path, ranks: Ranks) -> JobEnd:
        """Leaves these traces in the job's folder."""
        for report in self.reports:
            write_report(folder, report)
        for rank in self.crashed:
            crash_path(folder, rank).write_text(_SEGFAULT, encoding="utf-8")
        for rank in self.in_call:
            FlightRecord(folder, rank, 3).enter(7, "forward", time.perf_counter())
        ranks.ended_at_s = {rank: _BEGAN_S + at_s for rank, at_s in self.gone_s.items()}
        return JobEnd(
            job_dir=folder, num_ranks=3, started_at_s=_BEGAN_S, mpirun_code=self.mpirun_code,
            owed=self.owed, ranks=ranks, stuck_by=self.stuck_by, lost=self.lost,
        )  # fmt: skip


_BAD = _report(1, 2.0, 64, kind="InputError", traceback="InputError: wrong\n")
_PEER_LOST = _report(0, 3.0, _LOST, kind="PeerLost", peer=2, traceback="PeerLost: gone\n")
_GLOO = _report(0, 3.0, 1, kind="RuntimeError", traceback="RuntimeError: reset by peer\n")


def _lost_at(rank: int, after_s: float, peer: int) -> RankReport:
    text = "PeerLost: gone\n"
    return _report(rank, after_s, _LOST, kind="PeerLost", peer=peer, traceback=text)


def _stalled(rank: int, after_s: float) -> RankReport:
    """Of a rank that waited for the next one."""
    text = "Stalled: nothing moved\n"
    return _report(rank, after_s, 75, kind="Stalled", peer=(rank + 1) % 3, traceback=text)


_WELL = tuple(_report(rank, 5.0) for rank in range(3))
_WAITING = (RankWait(0, "burst_rt.init", [0, 1, 2]), 1)
# By cause: the traces, what the last line says, and the exit code.
_CASES: tuple[tuple[str, _Job, str, int], ...] = (
    (
        "a rank failed",
        _Job(reports=(_BAD, _PEER_LOST), gone_s={2: 1.0}),
        "rank 1 failed after 2.0 s with InputError: wrong (exit code 64)",
        64,
    ),
    (
        "a rank failed",
        _Job(reports=(_BAD,), crashed=(1,), in_call=(1,)),  # it crashed on its way out
        "(exit code 64), in call 7 (forward)",
        64,
    ),
    (
        "a rank crashed",
        _Job(reports=(_PEER_LOST,), crashed=(2,), in_call=(2,)),
        "rank 2 crashed in native code (signal 11, SIGSEGV), in call 7 (forward)",
        139,
    ),
    ("a rank crashed", _Job(crashed=(1, 2), gone_s={1: 3.0, 2: 2.0}), "rank 2 crashed", 139),
    ("a rank crashed", _Job(reports=_WELL, crashed=(1,)), "rank 1 crashed", 139),
    (
        "a rank waited to join one that had ended",
        _Job(reports=(_report(1, 1.0),), stuck_by=_WAITING, mpirun_code=137),
        "rank 1 left with exit code 0 after 1.0 s, before burst_rt.init; rank 0 waited there for "
        "rank 1, so the job was ended",
        _LOST,
    ),
    (
        "a rank waited to join one that had ended",
        _Job(stuck_by=(RankWait(0, "MPI_Init", [0, 1, 2]), 1)),
        "rank 1 ended without a report, before it had started MPI",
        _LOST,
    ),
    (
        "mpirun was killed",
        _Job(mpirun_code=-9),
        "mpirun itself was killed by signal 9, SIGKILL, and its ranks with it",
        137,
    ),
    (
        "a rank left in a call",
        _Job(reports=(_report(2, 4.0),), in_call=(2,), gone_s={0: 5.0, 2: 4.0}),
        "rank 2 left with exit code 0 after 4.0 s while other ranks were in a call, in call 7",
        1,
    ),
    (
        "a rank was gone first",
        _Job(reports=(_PEER_LOST,), gone_s={2: 1.5, 0: 3.0}, in_call=(2,)),
        "rank 2 ended without a report (mpirun's exit code is 1) after 1.5 s, in call 7 (forward)",
        _LOST,
    ),
    (
        "a rank was gone first",
        _Job(gone_s={1: 1.5, 2: 1.5, 0: 2.0}, mpirun_code=137),
        "one of ranks 1, 2 was killed by signal 9, SIGKILL after 1.5 s",
        137,
    ),
    (
        "a rank was gone first",
        _Job(gone_s={1: 1.5, 2: 1.5}, lost=_lost(2, 1.4, "last heard 0.1 s before"), mpirun_code=9),
        "rank 2 ended without a report (mpirun's exit code is 9, as of SIGKILL, by which mpirun "
        "may itself have ended this rank or another) after 1.4 s; last heard 0.1 s before",
        9,
    ),
    # A library's error after a rank has gone is that rank's doing, even if the launcher was woken a
    # moment later than the library.
    *(
        (
            "a rank was gone first",
            _Job(reports=(_GLOO,), gone_s={2: gone_s, 0: 3.1}, mpirun_code=137),
            f"rank 2 was killed by signal 9, SIGKILL after {gone_s:.1f} s",
            1,
        )
        for gone_s in (1.5, 3.01, 3.09)
    ),
    (
        # MPICH: rank 1 heard of the error, and ended the job before rank 0 did.
        "a rank failed",
        _Job(reports=(_GLOO, _lost_at(1, 3.02, 0)), gone_s={2: 3.1, 0: 3.15, 1: 3.2}),
        "rank 0 failed after 3.0 s with RuntimeError: reset by peer (exit code 1)",
        1,
    ),
    (
        "a rank was gone first",
        _Job(reports=(_GLOO, _lost_at(1, 3.02, 2)), gone_s={2: 3.1, 0: 3.15, 1: 3.2}),
        "rank 2 ended without a report",
        1,
    ),
    (
        "a rank crashed",
        _Job(reports=(_GLOO,), crashed=(2,), gone_s={2: 2.9, 0: 3.1}),
        "rank 2 crashed in native code (signal 11, SIGSEGV)",
        139,
    ),
    (
        "a rank failed",
        _Job(reports=(_GLOO,), gone_s={0: 3.05, 2: 3.1}, mpirun_code=1),
        "rank 0 failed after 3.0 s with RuntimeError: reset by peer (exit code 1)",
        1,
    ),
    (
        # MPICH's mpirun kills the others within milliseconds.
        "a rank failed",
        _Job(reports=(_GLOO,), gone_s={0: 3.006, 2: 3.009, 1: 3.012}, mpirun_code=9),
        "rank 0 failed after 3.0 s with RuntimeError: reset by peer (exit code 1)",
        1,
    ),
    (
        "ranks lost one that nothing else is known of",
        _Job(reports=(_PEER_LOST, _report(2, 2.0)), in_call=()),
        "rank 2 left with exit code 0 after 2.0 s while other ranks were in a call",
        _LOST,
    ),
    (
        "ranks lost one that nothing else is known of",
        _Job(reports=(_PEER_LOST,), in_call=(2,)),
        "rank 2 gave no report: it was killed, or it was stuck, in call 7 (forward)",
        _LOST,
    ),
    # Rank 0 waited for rank 1, which waited for rank 2, and gave up first.
    (
        "ranks lost one that nothing else is known of",
        _Job(reports=tuple(_stalled(rank, 3.0 + rank / 100) for rank in (0, 1)), in_call=(2,)),
        "rank 2 gave no report: it was killed, or it was stuck, in call 7 (forward)",
        75,
    ),
    (
        "ranks lost one that nothing else is known of",
        _Job(reports=tuple(_stalled(rank, 3.0 + rank / 100) for rank in (0, 1, 2))),  # a circle
        "failed after 3.0 s with Stalled: nothing moved (exit code 75)",
        75,
    ),
    ("none: all is well", _Job(reports=_WELL, mpirun_code=0), "", 0),
    ("none: all is well", _Job(reports=_WELL[:2], mpirun_code=0, owed=(0, 1)), "", 0),
    # Its connection to telemetry was cut, and nothing else.
    ("none: all is well", _Job(reports=_WELL, mpirun_code=0, lost=_lost(1, 2.0)), "", 0),
    (
        "unknown",
        _Job(reports=_WELL, mpirun_code=3),
        "every rank's program ended well, but mpirun's exit code is 3: a rank left a part of MPI "
        "open (a session, say), or failed after its program; mpirun's own message, if any, is "
        "above",
        3,
    ),
    (
        "unknown",
        _Job(mpirun_code=3),
        "no rank said why it ended; mpirun's exit code is 3 and its own message, if any, is above",
        3,
    ),
    # mpirun's 0 is not believed where a rank that is sure to report has not.
    (
        "unknown",
        _Job(reports=_WELL[:2], mpirun_code=0, owed=(2,)),
        "no report from rank 2: killed by a signal, or by mpirun after another rank had failed, or "
        "left by os._exit; mpirun's exit code is 0",
        _LOST,
    ),
)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(tmp_path, 3) as ranks:
        yield ranks


@pytest.mark.parametrize(("cause", "job", "words", "exit_code"), _CASES)
def test_each_cause_has_its_words_and_exit_code(
    cause: str, job: _Job, words: str, exit_code: int, tmp_path: Path, ranks: Ranks
) -> None:
    end = job.end(tmp_path, ranks)
    assert next(row.name for row in verdict._CAUSES if row.applies(end)) == cause
    text, code = last_words(end)
    assert code == exit_code
    if words:
        last = text.splitlines()[-1]
        assert last.startswith("burst-rt: ")
        assert words in last
    else:
        assert text == ""


def test_every_cause_is_tested() -> None:
    assert {cause for cause, *_ in _CASES} == {row.name for row in verdict._CAUSES}


def test_ranks_that_left_are_told_before_one_of_which_nothing_is_known(
    tmp_path: Path, ranks: Ranks
) -> None:
    end = _Job(reports=_WELL[:2], mpirun_code=137).end(tmp_path, ranks)
    text, _ = last_words(end)
    assert text.splitlines()[:2] == [
        f"burst-rt: rank {rank} had left with exit code 0 after 5.0 s" for rank in (0, 1)
    ]
    assert text.endswith("mpirun's exit code is 137 (signal 9, SIGKILL)\n")


def test_a_librarys_error_is_told_behind_the_rank_that_had_left(
    tmp_path: Path, ranks: Ranks
) -> None:
    text, _ = last_words(
        _Job(reports=(_report(1, 2.5), _report(2, 3.5), _GLOO)).end(tmp_path, ranks)
    )
    assert text.splitlines()[1:] == [
        "burst-rt: rank 1 had left with exit code 0 after 2.5 s",
        "burst-rt: rank 0 failed after 3.0 s with RuntimeError: reset by peer (exit code 1)",
    ]


def test_mpirun_may_notice_by_itself_that_a_rank_was_waited_for(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "stuck", lambda: _WAITING)
    text, code = last_words(_Job(reports=(_report(1, 1.0),)).end(tmp_path, ranks))
    assert ("rank 0 waited there for rank 1" in text, code) == (True, _LOST)


def test_that_a_silent_rank_was_waited_for_is_no_cause(
    tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed: that says more."""
    monkeypatch.setattr(ranks, "stuck", lambda: _WAITING)
    text, code = last_words(_Job(gone_s={1: 1.0}, mpirun_code=137).end(tmp_path, ranks))
    assert text == "burst-rt: rank 1 was killed by signal 9, SIGKILL after 1.0 s\n"
    assert code == 137
