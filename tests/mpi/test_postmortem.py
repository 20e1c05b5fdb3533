"""Real jobs whose ranks stop: the post-mortem names the rank, its task, and who waited for it."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Job, Launcher, run_command, run_job

from burst_rt.job.launched import RECORD_VARIABLE
from burst_rt.job.postmortem import PostMortem
from burst_rt.telemetry.read.record import Record
from burst_rt.telemetry.read.tape import replay

_PROGRAM = Path(__file__).parent / "programs" / "stopping_first.py"
_CASES: list[tuple[Launcher, str, str]] = [
    ("burst-rt run", "kill", r"was killed by signal 9, SIGKILL|gave no word of its end"),
    ("burst-rt run", "stop", "gave no sign, and no word of its end"),
    ("burst-rt run", "raise", r"failed with ValueError: a mistake of the program \(exit code 1\)"),
    ("mpirun", "kill", "gave no word of its end"),
    ("mpirun", "stop", "gave no sign, and no word of its end|still there"),
    ("mpirun", "raise", r"failed with ValueError: a mistake of the program \(exit code 1\)"),
    ("torchrun", "kill", "gave no word of its end"),
    ("torchrun", "raise", r"failed with ValueError: a mistake of the program \(exit code 1\)"),
]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, for the folders of its jobs."""
    # Short: Open MPI puts sockets into a job's folder.
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp", ignore_cleanup_errors=True) as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def _folders(kept: Path) -> list[Path]:
    return sorted(kept.glob("burst-rt-jobs-*/*"))


def _post_mortem(*job: str) -> Job:
    told = run_command(["postmortem", *job], timeout_s=60)
    assert told.exit_code == 0, told.text
    return told


@pytest.mark.parametrize(("by", "how", "ended"), _CASES)
def test_the_rank_that_stopped_is_named_with_its_task(
    by: Launcher, how: str, ended: str, kept: Path
) -> None:
    job = run_job(_PROGRAM, 3, [how, "1"], by=by)
    assert job.exit_code != 0, job.text
    told = _post_mortem()
    first = re.search("^first to stop: .*$", told.out, re.MULTILINE)
    assert first, told.text + job.text
    place = r"in call \d+ \(burst_attention\), task '.*' \(hop \d\)"
    if (by, how) == ("mpirun", "stop"):
        # Open MPI lets a stopped rank go on before it kills it.
        place = r"in call \d+ \(burst_attention\), (task '.*' \(hop \d\)|waiting for .*)"
    assert re.match(rf"first to stop: rank 1, ({ended}).*; {place}", first[0]), told.text
    assert re.search(r"^rank \d (waited for|had lost) rank 1\b.*$", told.out, re.MULTILINE), (
        told.text
    )
    if by == "burst-rt run":
        assert "the last lines that rank 1 wrote to stderr:\n  | rank 1 stops\n" in told.out
        (folder,) = _folders(kept)
        assert f"burst-rt: more: burst-rt postmortem {folder}\n" in job.err
        assert job.err.splitlines()[-1].startswith("burst-rt: rank ")
    else:
        assert "the stderr of rank 1 was not kept" in told.out


@pytest.mark.parametrize("by", ["burst-rt run", "mpirun", "torchrun"])
def test_nothing_is_kept_of_a_job_that_ended_well(by: Launcher, kept: Path) -> None:
    job = run_job(_PROGRAM, 2, ["end", "0"], by=by)
    assert job.exit_code == 0, job.text
    assert _folders(kept) == []


@pytest.mark.parametrize("by", ["burst-rt run", "mpirun", "torchrun"])
def test_viewers_get_the_post_mortem_too(
    by: Launcher, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kept / "job.record"
    monkeypatch.setenv(RECORD_VARIABLE, str(path))
    job = run_job(_PROGRAM, 3, ["kill", "1"], by=by)
    assert job.exit_code != 0, job.text
    (folder,) = _folders(kept)
    deadline_s = time.monotonic() + 20  # a hub that a rank has started outlives the ranks
    while (told := replay(Record(path)).snapshot().job.post_mortem) is None:
        assert time.monotonic() < deadline_s, job.text
        time.sleep(0.2)
    post_mortem = PostMortem(folder)
    assert told.heading[0].startswith("first to stop: rank 1, ")
    assert told.heading == list(post_mortem.heading())
    assert told.advice == list(post_mortem.advice())
    assert told.whole == list(post_mortem.lines())


def test_at_most_ten_jobs_are_kept(kept: Path, tmp_path: Path) -> None:
    run_job(_PROGRAM, 2, ["raise", "1"])
    (first,) = _folders(kept)
    for number in range(10):
        (first.parent / f"21000101-0000{number:02}-aaaa").mkdir()
    program = tmp_path / "fails.py"
    program.write_text("raise SystemExit(3)\n")
    assert run_job(program, 1).exit_code == 3
    names = {folder.name[:8] for folder in _folders(kept)}
    assert (len(_folders(kept)), names) == (10, {"21000101"})


def test_a_rank_alone_has_a_record_too(kept: Path) -> None:
    job = run_job(_PROGRAM, 1, ["kill", "0"])
    assert job.exit_code != 0
    told = _post_mortem(_folders(kept)[0].name)
    assert "first to stop: rank 0, " in told.out
    assert re.search(r"in call \d+ \(burst_attention\), task ", told.out), told.text
