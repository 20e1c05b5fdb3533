"""A rank that leaves ends the job: however it leaves, whatever the others are doing, however the
job was started, in under 5 s.
"""

from __future__ import annotations

import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from jobs import Job, Launcher, run_job
from launchers import Mpirun, mpirun

from burst_rt.errors import PeerLost, Stalled
from burst_rt.launch.mpirun import kill_job

_PROGRAMS = Path(__file__).parent / "programs"
# From the moment the rank leaves to the end of the job; starting the job takes as long as the
# machine is busy.
_DEADLINE_S = 5.0

# (ranks, who leaves, how, when); see programs/attention_leave.py.
_UNDER_RUN = [
    (2, 0, "exception", "before"),
    (4, 2, "exception", "wait"),
    (4, 3, "exception", "inside"),
    (2, 1, "exit-0", "before"),
    (4, 0, "exit-0", "wait"),
    (2, 1, "exit-0", "inside"),
    (4, 2, "exit-0", "inside"),
    (4, 1, "exit-3", "wait"),
    (2, 0, "exit-3", "inside"),
    (2, 1, "os-exit-0", "wait"),
    (2, 0, "os-exit-3", "before"),
    (4, 2, "sigkill", "inside"),
]
_UNDER_MPIRUN = [
    (4, 0, "exception", "before"),
    (2, 1, "exception", "wait"),
    (2, 0, "exception", "inside"),
    (4, 3, "exit-0", "before"),
    (2, 1, "exit-0", "inside"),
    (4, 1, "exit-3", "wait"),
    (2, 0, "os-exit-3", "wait"),
    (2, 1, "sigkill", "wait"),
]
_UNDER_TORCHRUN = [
    (2, 1, "exception", "wait"),
    (4, 2, "exception", "inside"),
    (4, 3, "exit-0", "before"),
    (2, 1, "exit-0", "inside"),
    (2, 0, "exit-3", "wait"),
    (2, 1, "os-exit-0", "wait"),
    (4, 1, "sigkill", "inside"),
]

# A rank that ends as Python ends it may be a warm Python: all but its imports is its own. One that
# ends without a word is a process as a user would start it.
_WORDLESS = ("os-exit-0", "os-exit-3", "sigkill")


def _last_line(how: str, rank: int, mpirun: Mpirun) -> str:
    """What the launcher's last line must say of the rank that left."""
    ended = {
        # A process that ends without a report: the signal, or the exit code, is known from mpirun.
        "os-exit-0": mpirun.how_exited_0,
        "os-exit-3": mpirun.how_exited_3,
        "sigkill": mpirun.how_killed,
    }
    if how in ended:
        name = f"rank {rank}" if mpirun.names_the_first else r"(rank|one of ranks) \d(, \d)*"
        return rf"burst-rt: {name} {ended[how]} after \d+\.\d s"
    return {
        "exception": (
            rf"burst-rt: rank {rank} failed after \d+\.\d s with RuntimeError: the leaver's "
            r"own error \(exit code 1\)"
        ),
        "exit-0": (
            rf"burst-rt: rank {rank} left with exit code 0 after \d+\.\d s while other ranks were "
            "in a call"
        ),
        "exit-3": rf"burst-rt: rank {rank} failed after \d+\.\d s \(exit code 3\)",
    }[how]


# Where in the program, known however the process ended.
_DOING = {
    "before": "",
    "wait": "",
    "inside": r", in call \d+ \(burst_attention\), task '.*hop 0.*' \(hop 0\)",
}


# A wrong argument on every rank. The context is closed before the interpreter ends, or open.
_WRONG = {
    "closed": """
        with burst_rt.init() as ctx:
            ctx.layout(8, "spiral")
    """,
    "open": """
        ctx = burst_rt.init()
        ctx.layout(8, "spiral")
    """,
}


@pytest.mark.parametrize("how", _WRONG)
@pytest.mark.parametrize("by", ["burst-rt run", "mpirun", "torchrun"])
def test_an_uncaught_error_has_its_exit_code(by: Launcher, how: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import burst_rt\n" + dedent(_WRONG[how]))
    job = run_job(program, 2, by=by)
    if by != "torchrun":
        assert job.exit_code == 64, job.text
        return
    # torchrun's own is 1; it names the ranks' codes, and ends the rank that was later by SIGTERM.
    assert job.exit_code == 1, job.text
    codes = re.findall(r"exitcode +: (-?\d+)", job.err)
    assert codes, job.text
    assert "64" in codes, job.text
    assert set(codes) <= {"64", "-15"}, job.text


_WRONG_ON_ONE = """
import os, pathlib, time
import burst_rt.context  # takes seconds on a busy machine, and starts no MPI
names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
rank = next(int(os.environ[x]) for x in names if x in os.environ)
wrong = {{"{name}": 3}} if rank == 1 else {{}}
if rank == 1:
    pathlib.Path("left_at").write_text(str(time.time()))
burst_rt.init(**wrong)
"""


@pytest.mark.parametrize("by", ["burst-rt run", "mpirun", "torchrun"])
@pytest.mark.parametrize(("name", "code"), [("group", 64), ("comm", 78)])
def test_an_init_in_no_group_on_one_rank_ends_the_job(
    by: Launcher, name: str, code: int, tmp_path: Path
) -> None:
    """The others wait in `init`, and there is no group in which to tell them."""
    (tmp_path / "program.py").write_text(_WRONG_ON_ONE.format(name=name), encoding="utf-8")
    job = run_job(tmp_path / "program.py", 3, by=by, cwd=tmp_path, timeout_s=60, warm="torch")
    _ended_in_time(job, tmp_path)
    assert f"init: {name} must be" in job.err, job.text
    if by == "torchrun":
        assert re.search(rf"rank +: 1 .*\n +exitcode +: {code} ", job.err), job.text
    else:
        assert job.exit_code == code, job.text


def _ended_in_time(job: Job, folder: Path, ended_at_s: float | None = None) -> None:
    """Whether the job, or what ended at `ended_at_s` instead, ended in time."""
    assert (folder / "left_at").exists(), f"the job ended before the rank left: {job.text}"
    left_at_s = float((folder / "left_at").read_text(encoding="utf-8"))
    assert (ended_at_s or job.ended_at_s) - left_at_s < _DEADLINE_S, job.text


@contextmanager
def _when_ranks_end(folder: Path) -> Iterator[list[float]]:
    """Makes the pipe `alive`, which ranks hold open. The list has the time at which the last of
    them ended, once the job has ended.
    """
    os.mkfifo(folder / "alive")
    reader = os.open(folder / "alive", os.O_RDONLY | os.O_NONBLOCK)
    times: list[float] = []

    def wait() -> None:
        poll = select.poll()
        poll.register(reader, 0)  # wakes by POLLHUP: all who had opened it are gone
        if poll.poll(90_000):
            times.append(time.time())

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield times
        thread.join()
    finally:
        # Also where no rank ever came: a writer that goes wakes the thread.
        os.close(os.open(folder / "alive", os.O_WRONLY))
        thread.join()
        os.close(reader)


def _leave(folder: Path, num_ranks: int, leaver: int, how: str, when: str, by: Launcher) -> Job:
    with _when_ranks_end(folder) as ended_at_s:
        job = run_job(
            _PROGRAMS / "attention_leave.py",
            num_ranks,
            [how, when, str(leaver)],
            by=by,
            cwd=folder,
            timeout_s=60,
            warm=None if how in _WORDLESS else "torch",
        )
    assert ended_at_s, job.text
    # torchrun takes seconds on a busy machine to end after its ranks, and to say what it saw.
    _ended_in_time(job, folder, ended_at_s[0] if by == "torchrun" else None)
    assert job.exit_code != 0, job.text
    assert "the call went through" not in job.out, job.text
    return job


@pytest.mark.parametrize(("num_ranks", "leaver", "how", "when"), _UNDER_RUN)
def test_under_burst_rt_run(
    tmp_path: Path, num_ranks: int, leaver: int, how: str, when: str
) -> None:
    job = _leave(tmp_path, num_ranks, leaver, how, when, "burst-rt run")
    lines = job.err.rstrip("\n").split("\n")
    assert re.fullmatch(_last_line(how, leaver, mpirun()) + _DOING[when], lines[-1]), job.text
    if how == "exception":
        # That rank's traceback, whole, and no other.
        assert lines[-2] == "RuntimeError: the leaver's own error", job.text
        assert job.err.count("Traceback (most recent call last)") == 1, job.text
        assert job.exit_code == 1, job.text
    if how.endswith("3"):
        expected = mpirun().exited_3 if how == "os-exit-3" else 3
        assert job.exit_code == expected, job.text


@pytest.mark.parametrize(("num_ranks", "leaver", "how", "when"), _UNDER_MPIRUN)
def test_under_mpirun(tmp_path: Path, num_ranks: int, leaver: int, how: str, when: str) -> None:
    job = _leave(tmp_path, num_ranks, leaver, how, when, "mpirun")
    if how == "exception":
        assert "RuntimeError: the leaver's own error" in job.err, job.text
    elif how.startswith("exit") and when != "inside":
        assert (
            f"rank {leaver} closed its context or ended normally, and cannot take part in this call"
            in job.err
        ), job.text


@pytest.mark.parametrize(("num_ranks", "leaver", "how", "when"), _UNDER_TORCHRUN)
def test_under_torchrun(tmp_path: Path, num_ranks: int, leaver: int, how: str, when: str) -> None:
    job = _leave(tmp_path, num_ranks, leaver, how, when, "torchrun")
    if how == "exception":
        assert "RuntimeError: the leaver's own error" in job.err, job.text
    elif how == "exit-0" and when != "inside":
        assert f"rank {leaver} closed its context or ended normally" in job.err, job.text
    elif how == "os-exit-0":
        # torchrun takes this for success, and waits for the others, who notice.
        assert re.search(rf"rank {leaver} failed .* its connection ended", job.err), job.text


def test_torchrun_starts_again_what_a_lost_rank_has_ended(tmp_path: Path) -> None:
    source = """
import os, pathlib, signal
import torch
import burst_rt
ctx = burst_rt.init()
x = torch.ones(1, 4, 1, 16, device=ctx.device)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(3):
    if (attempt, step, ctx.rank) == (0, 1, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    burst_rt.burst_attention(x, x, x, layout=ctx.layout(4 * ctx.world_size), causal=True)
pathlib.Path(f"done-{ctx.rank}-{attempt}").touch()
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(
        tmp_path / "program.py", 2, by="torchrun", cwd=tmp_path, timeout_s=60, max_restarts=1
    )
    assert job.exit_code == 0, job.text
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-0-1", "done-1-1"]


_JOINING = """
import os, pathlib, sys, time
from contextlib import suppress
import burst_rt.context  # takes seconds on a busy machine, and starts no MPI
when, starter, how = sys.argv[1:]
def leave():
    pathlib.Path("left_at").write_text(str(time.time()))
    {"exit-0": lambda: sys.exit(0), "exit-3": lambda: sys.exit(3),
    "os-exit-0": lambda: os._exit(0)}[how]()
def told(name):
    return int(os.environ.get(f"OMPI_COMM_WORLD_{name}", os.environ.get(f"PMI_{name}")))
rank, size = told("RANK"), told("SIZE")
leaver = rank == 1
# All ranks go on together, however long each took to import.
if leaver:
    pathlib.Path("leaver").write_text(str(os.getpid()))
pathlib.Path(f"imported-{rank}").touch()
while not all(pathlib.Path(f"imported-{other}").exists() for other in range(size)):
    time.sleep(0.02)
if when == "before MPI":
    if leaver:
        leave()
    # A rank that leaves while others start MPI is Open MPI's own case. The launcher has seen it
    # leave once its process is gone.
    state = pathlib.Path("/proc", pathlib.Path("leaver").read_text(), "stat")
    with suppress(OSError):  # its process is gone
        # Intel MPI's mpirun leaves it a zombie.
        while state.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)
if starter == "mpi4py":
    from mpi4py import MPI
if leaver and when == "before init":
    time.sleep(0.5)
    leave()
burst_rt.init()
print("joined")
"""


@pytest.mark.parametrize(
    ("when", "starter", "how"),
    [
        ("before MPI", "mpi4py", "exit-0"),
        ("before MPI", "burst_rt", "exit-0"),
        ("before MPI", "burst_rt", "os-exit-0"),
        ("before MPI", "burst_rt", "exit-3"),
        ("before init", "mpi4py", "exit-0"),
        ("before init", "mpi4py", "exit-3"),
    ],
)
def test_a_rank_that_leaves_before_it_has_joined(
    tmp_path: Path, when: str, starter: str, how: str
) -> None:
    (tmp_path / "program.py").write_text(_JOINING, encoding="utf-8")
    job = run_job(
        tmp_path / "program.py",
        3,
        [when, starter, how],
        cwd=tmp_path,
        timeout_s=60,
        warm=None if how in _WORDLESS else "torch",
    )
    _ended_in_time(job, tmp_path)
    last = job.err.rstrip("\n").split("\n")[-1]
    if how == "exit-3":
        assert re.fullmatch(_last_line(how, 1, mpirun()), last), job.text
        assert job.exit_code == 3, job.text
        return
    how_told = "left with exit code 0 after .* s" if how == "exit-0" else "ended without a report"
    where = "before it had started MPI" if when == "before MPI" else r"before burst_rt\.init"
    assert re.fullmatch(
        rf"burst-rt: rank 1 {how_told}, {where}; rank [02] waited there for rank 1, so the job was "
        r"ended",
        last,
    ), job.text
    assert job.exit_code == PeerLost.exit_code, job.text
    assert "joined" not in job.out, job.text


@pytest.mark.parametrize(
    ("when", "starter"), [("before MPI", "burst_rt"), ("before init", "mpi4py")]
)
def test_under_mpirun_a_rank_that_never_joins_ends_the_job_after_join_s(
    tmp_path: Path, when: str, starter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_RT_JOIN_S", "2")
    (tmp_path / "program.py").write_text(_JOINING, encoding="utf-8")
    job = run_job(
        tmp_path / "program.py",
        2,
        [when, starter, "exit-0"],
        by="mpirun",
        cwd=tmp_path,
        timeout_s=60,
    )
    assert job.exit_code == Stalled.exit_code, job.text
    assert "Stalled: rank 0 of 2 waited 2 s in " in job.err, job.text
    if when == "before MPI":
        # A process that has started MPI waits for the others on its way out.
        assert "1 of this host's 2 ranks have ended; still running: ranks [0]" in job.err, job.text


def test_ranks_that_end_at_different_times_are_no_failure(tmp_path: Path) -> None:
    source = """
import os, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
time.sleep(3 * rank)
print("done")
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, cwd=tmp_path, timeout_s=60)
    assert (job.exit_code, job.out) == (0, "done\ndone\n"), job.text


_SLEEP = """
import os, pathlib, time
import burst_rt
ctx = burst_rt.init()
pathlib.Path(f"pid-{ctx.rank}").write_text(str(os.getpid()))
ctx.runtime.agree({"call": "ready"})
time.sleep(600)
"""


_BURST_RT = ["burst_rt.launch.main", "run", "-n", "2", "--telemetry"]
_TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def _sleeping(
    folder: Path, by: list[str] = _BURST_RT
) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A job whose ranks sleep: the launcher, and all processes below it."""
    (folder / "program.py").write_text(_SLEEP, encoding="utf-8")
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", *by, "program.py"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline_s = time.monotonic() + 60
    # A file is there before its content is.
    while len(pids := {path.read_text() for path in folder.glob("pid-*")} - {""}) < 2:
        assert launcher.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    below = psutil.Process(launcher.pid).children(recursive=True)
    assert set(map(int, pids)) <= {process.pid for process in below}
    return launcher, below


def _still_there(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=_DEADLINE_S)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher, below = _sleeping(tmp_path)
    launcher.kill()
    launcher.communicate()
    assert _still_there(below) == []


def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    launcher, below = _sleeping(tmp_path, _TORCHRUN)
    launcher.kill()
    assert _still_there(below) == []
    _, err = launcher.communicate()
    assert "torchrun, which started this process, is gone, so the process ends" in err


def test_a_rank_that_is_stopped_after_its_last_call_ends_the_job(tmp_path: Path) -> None:
    source = """
import os, signal
import burst_rt
# So that the rank ends well when the end of its mpirun lets it go on (SIGHUP and SIGCONT).
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with burst_rt.init() as ctx:
    rank = ctx.rank
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    launch = """
import sys, time
import psutil
from burst_rt.launch import ranks, run
ranks._STOPPED_S = 1.0
kill = psutil.Process.kill
psutil.Process.kill = lambda process: (time.sleep(0.5), kill(process))
sys.exit(run.launch(["program.py"], num_ranks=2))
"""
    job = subprocess.run(
        [sys.executable, "-P", "-c", launch],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert job.returncode == Stalled.exit_code, job.stderr
    assert re.search(
        r"burst-rt: rank 1 failed after .*Stalled: .*process \d+ has been stopped by a signal "
        r"\(SIGSTOP, say\) for 1 s, and the other ranks have come to their ends",
        job.stderr,
    ), job.stderr


_STOPPED = """
import os, pathlib, signal
import burst_rt
from burst_rt.job import stopped
stopped._MARGIN_S = 1.0
with burst_rt.init(timeout_s=2.0, stall_s=1.0, survey=False) as ctx:
    rank = ctx.rank
# The longest time holds.
with burst_rt.init(timeout_s=1.0, stall_s=1.0, survey=False):
    pass
pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
print("well")
"""


@pytest.mark.parametrize("by", ["mpirun", "torchrun"])
def test_a_rank_that_stays_stopped_after_its_last_call_is_killed(
    by: Launcher, tmp_path: Path
) -> None:
    """Nothing else ends such a job: `mpirun` and torchrun wait."""
    (tmp_path / "program.py").write_text(_STOPPED, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, by=by, cwd=tmp_path, timeout_s=60)
    pid = (tmp_path / "pid-1").read_text(encoding="utf-8")
    assert job.exit_code not in (None, 0), job.text
    assert (
        f"burst-rt: rank 1: process {pid} had been stopped by a signal (SIGSTOP, say) for 4 s"
        in job.text
    ), job.text
    assert job.out.count("well") == 1
    assert not psutil.pid_exists(int(pid))


_CALLING = """
import os, pathlib
import torch
import burst_rt
ctx = burst_rt.init(timeout_s=30)
x = torch.zeros(1, 4, 1, 16, device=ctx.device)
pathlib.Path(f"pid-{ctx.rank}").write_text(str(os.getpid()))
try:
    while True:
        burst_rt.burst_attention(x, x, x, layout=ctx.layout(4 * ctx.world_size))
except burst_rt.errors.PeerLost:
    pathlib.Path(f"told-{ctx.rank}").touch()
    raise
"""


@contextmanager
def _two_agents(folder: Path, source: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two agents of torchrun's with two ranks each, once there are `pid-0` to `pid-3`."""
    (folder / "program.py").write_text(source, encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
        "--master-addr=127.0.0.1", f"--master-port={port}",
    ]  # fmt: skip
    agents = [
        subprocess.Popen(
            [*command, f"--node-rank={number}", "program.py"],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        deadline_s = time.monotonic() + 60
        while len(list(folder.glob("pid-*"))) < 4:
            assert time.monotonic() < deadline_s
            assert [agent.poll() for agent in agents] == [None, None]
            time.sleep(0.05)
        yield agents
    finally:
        for agent in agents:
            kill_job(agent)
            agent.wait()


def _below(agents: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    return [x for agent in agents for x in psutil.Process(agent.pid).children(recursive=True)]


@pytest.mark.parametrize("killed", [0, 1])
def test_one_agent_of_two_that_is_killed_ends_the_job(killed: int, tmp_path: Path) -> None:
    """Also the one that has the store."""
    with _two_agents(tmp_path, _CALLING) as agents:
        below = _below(agents)
        agents[killed].kill()
        assert _still_there(below) == []
        # torchrun's own for a rank that failed.
        assert agents[1 - killed].wait(timeout=60) == 1
    # The first rank that fails may have the other one ended before it has told.
    told = {path.name for path in tmp_path.glob("told-*")}
    assert told
    assert told <= {f"told-{rank}" for rank in range(4) if rank // 2 != killed}


_LATE = """
import os, pathlib, time
import burst_rt
rank = os.environ["RANK"]
pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
while not pathlib.Path("go").exists():
    time.sleep(0.05)
ctx = burst_rt.init(join_s=5)
pathlib.Path(f"joined-{rank}").touch()
while True:
    ctx.all_gather(None)
"""


def test_ranks_whose_agent_was_killed_before_init_end_in_it(tmp_path: Path) -> None:
    with _two_agents(tmp_path, _LATE) as agents:
        below = _below(agents)
        agents[1].kill()
        agents[1].wait()
        (tmp_path / "go").touch()
        _, alive = psutil.wait_procs(below, timeout=60)
        assert alive == []
        assert agents[0].wait(timeout=60) == 1


def test_ranks_end_with_an_mpirun_that_is_killed(tmp_path: Path) -> None:
    launcher, below = _sleeping(tmp_path)
    next(
        process
        for process in below
        if process.ppid() == launcher.pid and process.pid in _parents(below)
    ).kill()
    _, err = launcher.communicate(timeout=_DEADLINE_S)
    assert _still_there(below) == []
    assert (
        err.rstrip("\n").split("\n")[-1]
        == "burst-rt: mpirun itself was killed by signal 9, SIGKILL, and its ranks with it"
    )
    assert launcher.returncode == 128 + 9


def _parents(processes: list[psutil.Process]) -> set[int]:
    return {process.ppid() for process in processes}


def test_the_error_that_ended_a_rank_is_told_to_the_others(tmp_path: Path) -> None:
    """Also one of Python's own, at a call that this rank got wrong."""
    source = """
import pathlib, time
import torch
import burst_rt
ctx = burst_rt.init()
x = torch.zeros(1, 4, 1, 16, device=ctx.device)
if ctx.rank == 1:
    pathlib.Path("left_at").write_text(str(time.time()))
    burst_rt.burst_attention(x, x, x, layout=ctx.layout(8), causl=True)
burst_rt.burst_attention(x, x, x, layout=ctx.layout(8), causal=True)
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, by="mpirun", cwd=tmp_path, timeout_s=60, warm="torch")
    _ended_in_time(job, tmp_path)
    expected = (
        "burst-rt: rank 0: burst_rt.errors.PeerLost: rank 1 failed (exit code 1) with TypeError: "
        "burst_attention() "
        "got an unexpected keyword argument 'causl'"
    )
    assert expected in job.err, job.text


def test_a_rank_that_goes_on_without_the_call_is_named_with_the_call(tmp_path: Path) -> None:
    source = """
import time
import torch
import burst_rt
ctx = burst_rt.init(timeout_s=3.0)
x = torch.zeros(1, 4, 1, 16, device=ctx.device)
layout = ctx.layout(4 * ctx.world_size)
burst_rt.burst_attention(x, x, x, layout=layout)
if ctx.rank == 1:
    time.sleep(20)  # it has caught its error, say
burst_rt.burst_attention(x, x, x, layout=layout)
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 3, cwd=tmp_path, timeout_s=60, warm="torch")
    assert job.exit_code == Stalled.exit_code, job.text
    # Numbers of calls: joining took some.
    assert re.search(
        r"Stalled: rank [02]: waited 3\.\d s .* to enter call \d+: rank 1 has not entered it",
        job.err,
    ), job.text


def test_children_that_were_forked_are_no_ranks(tmp_path: Path) -> None:
    """Their calls are refused, and however they end, the others notice nothing."""
    source = """
import ctypes, os, sys, time
import torch
import burst_rt
ctx = burst_rt.init(timeout_s=20)
layout = ctx.layout(4 * ctx.world_size)
x = torch.zeros(1, 4, 1, 16, device=ctx.device)
def call():
    burst_rt.burst_attention(x, x, x, layout=layout)
call()
def child(end):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for use in (
        call,
        lambda: ctx.all_reduce(torch.zeros(1)),
        lambda: layout.unshard(x),
        lambda: ctx.layout(0),
    ):
        try:
            use()
        except (burst_rt.errors.ConfigError, burst_rt.errors.InputError) as error:
            assert "forked" in str(error) or "seq_len" in str(error), error
        else:
            os._exit(99)
    ctx.close()
    end()
def fail():
    raise ValueError("of the child")
if ctx.rank == 0:
    assert child(lambda: sys.exit(0)) == 0
    assert child(lambda: sys.exit(3)) == 3
    assert child(lambda: os._exit(4)) == 4
    assert child(fail) == 1
    assert child(lambda: ctypes.memset(0, 0, 1)) == -11
    time.sleep(4)  # longer than the launcher lets a job go on in which a rank has failed
call()
print("all is well")
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    by: Launcher
    for by in ("mpirun", "burst-rt run"):
        job = run_job(tmp_path / "program.py", 2, by=by, cwd=tmp_path, timeout_s=60)
        assert job.exit_code == 0, job.text
        assert job.out.count("all is well") == 2, job.text
        assert "ValueError: of the child" in job.err, job.text
        assert "burst-rt: rank" not in job.err, job.text


def test_mpi_is_as_if_mpi4py_had_started_it(tmp_path: Path) -> None:
    """Its errors are exceptions, and what a program has registered before may still use it at
    exit.
    """
    source = """
import atexit
def last():
    MPI.COMM_WORLD.Barrier()
    print("still there")
atexit.register(last)
import burst_rt
burst_rt.init()
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
try:
    MPI.COMM_WORLD.Send(b"x", 99)
except MPI.Exception:
    print("caught")
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, by="mpirun", cwd=tmp_path, timeout_s=60)
    assert job.exit_code == 0, job.text
    # MPICH's mpirun may join what two ranks write to one line.
    assert [job.out.count(words) for words in ("caught", "still there")] == [2, 2], job.text
    assert not re.sub("caught|still there|\n", "", job.out), job.text


def test_a_lost_rank_that_was_caught_is_told_all_the_same(tmp_path: Path) -> None:
    """The rank's context is broken, and so its exit code is that of the error."""
    source = """
import time
import burst_rt
with burst_rt.init() as ctx:
    if ctx.rank == 1:
        time.sleep(1)
        try:
            ctx.all_gather(1)
        except burst_rt.errors.PeerLost:
            print("caught")
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, by="burst-rt run", cwd=tmp_path, timeout_s=60)
    assert (job.exit_code, job.out) == (PeerLost.exit_code, "caught\n"), job.text
    assert "PeerLost: rank 1: rank 0 closed its context or ended normally" in job.err
    assert "rank 0 left with exit code 0" in job.err.splitlines()[-1], job.text


def test_an_exception_outside_any_call_ends_the_job_too(tmp_path: Path) -> None:
    """The others compute, and would find out only in their next call."""
    source = """
import pathlib, time
import burst_rt
with burst_rt.init() as ctx:
    if ctx.rank == 1:
        pathlib.Path("left_at").write_text(str(time.time()))
        raise KeyError("only rank 1")
    time.sleep(40)
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, by="mpirun", cwd=tmp_path, timeout_s=60)
    _ended_in_time(job, tmp_path)
    assert job.exit_code == 1, job.text
    assert "KeyError: 'only rank 1'" in job.err


def test_contexts_that_the_program_has_let_go_of_count(tmp_path: Path) -> None:
    """One dropped unclosed is said farewell for; a broken one ends the job all the same."""
    source = """
import gc, pathlib, time
import torch
import burst_rt
def part():
    ctx = burst_rt.init()
    if ctx.rank == 0:
        try:
            x = torch.zeros(1, 4, 1, 16, device=ctx.device)
            burst_rt.burst_attention(x, x, x, layout=ctx.layout(8))
        except burst_rt.errors.PeerLost:
            pathlib.Path("told").touch()
    else:
        pathlib.Path("left_at").write_text(str(time.time()))
part()
gc.collect()
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, by="mpirun", cwd=tmp_path, timeout_s=60)
    assert (tmp_path / "told").exists(), job.text
    _ended_in_time(job, tmp_path)
    assert job.exit_code == PeerLost.exit_code, job.text


def test_a_rank_that_never_comes_ends_the_job_after_timeout_s(tmp_path: Path) -> None:
    source = """
import time
import torch
import burst_rt
ctx = burst_rt.init(timeout_s=3.0)
x = torch.zeros(1, 4, 1, 16, device=ctx.device)
if ctx.rank == 1:
    time.sleep(40)
burst_rt.burst_attention(x, x, x, layout=ctx.layout(8))
"""
    (tmp_path / "program.py").write_text(source, encoding="utf-8")
    job = run_job(tmp_path / "program.py", 2, cwd=tmp_path, timeout_s=30, warm="torch")
    assert job.exit_code == Stalled.exit_code, job.text
    assert re.search(
        r"Stalled: rank 0: waited 3\.\d s \(timeout_s\) for the other ranks to enter call \d+",
        job.err,
    ), job.text
    *_, failed, last = job.err.rstrip("\n").split("\n")
    assert "burst-rt: rank 0 failed after" in failed, job.text
    assert last == "burst-rt: rank 1 gave no report: it was killed, or it was stuck", job.text
