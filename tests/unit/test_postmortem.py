"""The post-mortem of a job (job/postmortem.py): made-up ranks, and each way to end."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from burst_rt.errors import InputError, PeerLost, Stalled
from burst_rt.job import folders
from burst_rt.job.flight import CLOSED_AT, MESSAGE_ENTRY, TASK_ENTRY, FlightRecord
from burst_rt.job.flights import read_flights
from burst_rt.job.postmortem import LauncherNote, PostMortem, leave_note
from burst_rt.job.reports import RankReport, crash_path, stderr_path, write_report
from burst_rt.launch.postmortem import command, first_lines
from burst_rt.scheduler import Graph, GraphBuilder

_CALL = "burst_attention"


def _ring(rank: int, size: int = 3) -> Graph:
    """A tile, and an exchange with the next rank and the one before."""
    g = GraphBuilder(rank, size)
    mine, theirs = (g.buffer(name, size_bytes=64, initialised=True) for name in ("mine", "theirs"))
    g.compute("tile 0", "work", accumulates=[mine], hop=0)
    sends, recvs = [(mine, (rank + 1) % size)], [(theirs, (rank - 1) % size)]
    g.exchange("hop 1", sends=sends, recvs=recvs, tag=0, hop=1)
    return g.build()


class _Ranks:
    """Records of ranks whose processes are gone, in one folder."""

    def __init__(self, folder: Path, size: int = 3) -> None:
        self.folder = folder
        self.size = size
        self.began_s = time.perf_counter() - 10.0
        gone = subprocess.Popen(["true"])
        gone.wait(10)
        self._gone_pid = gone.pid

    def record(self, rank: int, *, alive: bool = False) -> FlightRecord:
        record = FlightRecord(self.folder, rank, self.size)
        if not alive:
            path = self.folder / f"rank-{rank}.flight"
            with path.open("r+b") as file:
                about = json.loads(file.read(CLOSED_AT).rstrip(b"\0"))
                file.seek(0)
                file.write(
                    json.dumps(about | {"pid": self._gone_pid}).encode().ljust(CLOSED_AT, b"\0")
                )
        return record

    def computes(self, rank: int, at_s: float, *, alive: bool = False) -> None:
        """The rank is in its tile."""
        record = self.record(rank, alive=alive)
        record.enter(7, _CALL, self.began_s, _ring(rank, self.size))
        record.add(TASK_ENTRY, self.began_s, self.began_s + at_s)

    def waits(self, rank: int, at_s: float) -> None:
        """The rank waits for the message from the rank before; the other has been sent."""
        record = self.record(rank)
        record.enter(7, _CALL, self.began_s, _ring(rank, self.size))
        record.times[record.add(TASK_ENTRY, self.began_s, self.began_s)] = self.began_s + 0.1
        record.add(8 + TASK_ENTRY, self.began_s, self.began_s + 0.2)
        record.add(8 + MESSAGE_ENTRY, 0, self.began_s + at_s)

    def enters(self, rank: int, number: int = 7) -> None:
        """The rank waits for the others to enter the call."""
        record = self.record(rank)
        record.enter(number, _CALL, self.began_s, _ring(rank, self.size))
        record.note_call()

    def outside(self, rank: int, *, closed: bool = False) -> None:
        """The rank has left call 6, and has entered no other."""
        record = self.record(rank)
        record.enter(6, _CALL, self.began_s - 1, _ring(rank, self.size))
        record.leave()
        record.close(closed=closed)

    def reports(self, rank: int, exit_code: int, kind: str, peer: int | None = None) -> None:
        text = f"Traceback (most recent call last):\n{kind}: what went wrong\n"
        write_report(
            self.folder, RankReport(rank, time.time(), exit_code, kind, peer, traceback=text)
        )

    def launched(self, line: str) -> None:
        leave_note(self.folder, LauncherNote(["train.py"], self.size, f"burst-rt: {line}"))


def _killed(ranks: _Ranks) -> None:
    ranks.waits(0, 1.0)
    ranks.computes(1, 0.5)
    ranks.waits(2, 1.0)
    ranks.launched("rank 1 was killed by signal 9, SIGKILL after 1.5 s, in call 7 (x), task 'y'")


def _killed_under_mpirun(ranks: _Ranks) -> None:
    ranks.waits(0, 1.0)
    ranks.computes(1, 0.5)
    ranks.waits(2, 1.0)


def _raised(ranks: _Ranks) -> None:
    _killed_under_mpirun(ranks)
    ranks.reports(1, 1, "ValueError")
    ranks.reports(0, PeerLost.exit_code, "PeerLost", 1)


def _crashed(ranks: _Ranks) -> None:
    _killed_under_mpirun(ranks)
    crash_path(ranks.folder, 1).write_text("Fatal Python error: Segmentation fault\n\n")


def _left(ranks: _Ranks) -> None:
    ranks.enters(0)
    ranks.outside(1, closed=True)
    ranks.enters(2)


def _stuck(ranks: _Ranks) -> None:
    ranks.enters(0)
    ranks.outside(1)
    ranks.enters(2)
    ranks.reports(0, Stalled.exit_code, "Stalled", 1)


def _alive(ranks: _Ranks) -> None:
    ranks.waits(0, 1.0)
    ranks.computes(1, 0.5, alive=True)
    ranks.waits(2, 1.0)


def _lost_outside(ranks: _Ranks) -> None:
    """Rank 0 has heard of the failure before it entered the call in which rank 2 waits for it."""
    ranks.outside(0)
    ranks.reports(0, PeerLost.exit_code, "PeerLost", 1)
    ranks.computes(1, 0.5)
    ranks.enters(2)


_IN_THE_TILE = f"in call 7 ({_CALL}), task 'tile 0' (hop 0); last sign at "
_MESSAGE = "a message of 64 bytes from rank {} in task 'hop 1' (hop 1)"
_THROUGH_2 = [
    f"rank 0 waited for rank 2: {_MESSAGE.format(2)}",
    f"rank 2 waited for rank 1: {_MESSAGE.format(1)}",
]
_ENTER = f"rank {{}} waited for rank 1 to enter call 7 ({_CALL})"
# What is left behind; how rank 1 ended, where it was; the chain; what to do next.
_CASES: list[tuple[Callable[[_Ranks], None], str, str, list[str], str]] = [
    (_killed, "was killed by signal 9, SIGKILL", _IN_THE_TILE, _THROUGH_2, "lack of memory"),
    (_killed_under_mpirun, "gave no word of its end", _IN_THE_TILE, _THROUGH_2, "dmesg"),
    (
        _raised, "failed with ValueError: what went wrong (exit code 1)", _IN_THE_TILE, _THROUGH_2,
        "mend this error",
    ),
    (
        _crashed, "crashed in native code (signal 11, SIGSEGV)", _IN_THE_TILE, _THROUGH_2,
        "rank-1.crash",
    ),
    (
        _left, "left with exit code 0 while other ranks went on", "in no call; last sign at ",
        [_ENTER.format(0)], "make the same calls",
    ),
    (
        _stuck, "gave no sign, and no word of its end", "in no call; last sign at ",
        [_ENTER.format(0)], "py-spy dump",
    ),
    (_alive, f"still there: process {os.getpid()} is ", _IN_THE_TILE, _THROUGH_2, "py-spy dump"),
    (
        _lost_outside, "gave no word of its end", _IN_THE_TILE,
        [f"rank 2 waited for rank 0 to enter call 7 ({_CALL})", "rank 0 had lost rank 1"], "dmesg",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("leave", "how", "place", "chain", "what_next"),
    _CASES,
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_rank_that_stopped_first_is_named(
    leave: Callable[[_Ranks], None],
    how: str,
    place: str,
    chain: list[str],
    what_next: str,
    tmp_path: Path,
) -> None:
    leave(_Ranks(tmp_path))
    post_mortem = PostMortem(tmp_path)
    first, *waits = post_mortem.heading()
    assert post_mortem.first == 1
    assert first.startswith(f"first to stop: rank 1, {how}")
    assert place in first
    assert waits == chain
    lines = list(post_mortem.lines())
    (advice,) = [line for line in lines if line.startswith("what to do next: ")]
    assert what_next in advice
    assert not re.search(r"\b137\b", "\n".join(lines))


def test_ranks_that_wait_in_a_circle_have_no_head(tmp_path: Path) -> None:
    ranks = _Ranks(tmp_path)
    for rank in range(3):
        ranks.waits(rank, 1.0)
    post_mortem = PostMortem(tmp_path)
    first, *waits, last = post_mortem.heading()
    assert first == "nothing here says which rank stopped first"
    assert len(waits) == 3
    assert last == "so they waited in a circle"
    # The report of one says more.
    ranks.reports(1, 1, "ValueError")
    assert PostMortem(tmp_path).first == 1


def test_what_a_rank_wrote_last_is_shown_where_it_was_kept(tmp_path: Path) -> None:
    _killed(_Ranks(tmp_path))
    assert "the stderr of rank 1 was not kept: its launcher has printed it" in (
        PostMortem(tmp_path).lines()
    )
    stderr_path(tmp_path, 1).write_text("".join(f"line {n}\n" for n in range(30)))
    lines = list(PostMortem(tmp_path).lines())
    at = lines.index("the last lines that rank 1 wrote to stderr:")
    assert lines[at + 1 : at + 16] == [f"  | line {n}" for n in range(15, 30)]


def test_the_launcher_prints_what_its_last_line_does_not_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_lines(tmp_path) == ""  # a program without burst_rt
    monkeypatch.delenv("TMPDIR", raising=False)
    ranks = _Ranks(tmp_path)
    _killed(ranks)
    more = f"burst-rt: more: burst-rt postmortem {tmp_path.name}"
    chain = [f"burst-rt: {line}" for line in _THROUGH_2]
    assert first_lines(tmp_path).splitlines() == [*chain, more]
    with monkeypatch.context() as job:
        # A login on this host may have another temporary folder than the job.
        job.setenv("TMPDIR", "/job's")
        assert first_lines(tmp_path).splitlines()[-1] == more.replace(tmp_path.name, str(tmp_path))
    ranks.launched("no rank said why it ended; mpirun's exit code is 3")
    first, *rest = first_lines(tmp_path).splitlines()
    assert first.startswith("burst-rt: first to stop: rank 1, ")
    assert rest == [*chain, more]


def test_the_newest_ten_of_the_jobs_that_have_ended_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names = [f"20260101-0000{number:02}-aaaa" for number in range(15)]
    for name in names:
        (folders.jobs_folder() / name).mkdir()
    held = os.open(folders.jobs_folder() / names[0], os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_SH)
        folders.prune_jobs()
        kept = sorted(path.name for path in folders.jobs_folder().iterdir())
        assert kept == [names[0], *names[5:]]
        assert [path.name for path in folders.ended_jobs()] == names[:4:-1]
    finally:
        os.close(held)
    folders.prune_jobs()
    assert len(folders.ended_jobs()) == folders.NUM_KEPT


def test_a_folder_that_another_rank_deletes_has_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that end at once may each see that all have ended."""
    folder, scan = tmp_path / "job", os.scandir
    folder.mkdir()

    def gone(path: Any) -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return scan(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", gone)
        assert read_flights(folder) == {}


def test_a_folder_of_somebody_else_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"burst-rt-jobs-{os.geteuid()}-{socket.gethostname()}").symlink_to(
        tmp_path / "elsewhere"
    )
    with pytest.raises(PermissionError, match="not a folder of this user"):
        folders.hold_folder("job")
    assert folders.ended_jobs() == []
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_command_takes_the_newest_job_a_name_or_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(command, arguments, catch_exceptions=False)
        return done.output.partition("\n")[0]

    with pytest.raises(InputError, match="no job that failed is kept"):
        run()
    for name in ("20260101-000000-aaaa", "20260102-000000-aaaa"):
        folder = folders.jobs_folder() / name
        folder.mkdir()
        _killed(_Ranks(folder))
    assert run() == "job 20260102-000000-aaaa: train.py on 3 ranks"
    assert run("20260101-000000-aaaa") == "job 20260101-000000-aaaa: train.py on 3 ranks"
    assert run(str(folders.jobs_folder() / "20260101-000000-aaaa")).startswith("job 20260101")
    with pytest.raises(InputError, match="kept are: 20260102-000000-aaaa, 20260101-000000-aaaa"):
        run("mine")


def test_a_librarys_error_after_a_rank_was_killed_is_not_the_first(tmp_path: Path) -> None:
    """The launcher knows which process ended first."""
    ranks = _Ranks(tmp_path)
    _killed(ranks)
    ranks.reports(0, 1, "RuntimeError")
    assert PostMortem(tmp_path).first == 1
