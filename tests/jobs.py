"""Jobs for tests: a program started on several ranks, with a deadline, and its outcome.

Jobs whose ranks' starts and ends are not what a test is about take warm Pythons (`warm`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from warm import Preloaded, warm_python

from burst_rt.job.reports import JOB_DIR_VARIABLE
from burst_rt.launch.mpirun import find_launcher
from burst_rt.launch.run import kill_job

__all__ = ["Job", "Launcher", "python_and_environment", "run_command", "run_job"]

Launcher: TypeAlias = Literal["burst-rt run", "mpirun", "torchrun"]

_TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    exit_code: int
    out: str
    err: str
    ended_at_s: float

    @property
    def text(self) -> str:
        """Exit code and output, for the message of an assertion."""
        return f"exit code {self.exit_code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


def run_job(
    program: Path,
    num_ranks: int,
    args: Sequence[str] = (),
    *,
    timeout_s: float = 120.0,
    by: Launcher = "burst-rt run",
    cwd: Path | None = None,
    max_restarts: int = 0,
    warm: Preloaded | None = None,
) -> Job:
    """Runs `program` on `num_ranks` ranks; blocks until the job has ended, at most `timeout_s`.

    max_restarts: how often torchrun may start the ranks again. warm: what ranks, and the launcher
    where it is a Python, have imported before they start; None for Pythons as a user starts them.
    Programs may import the modules beside this one. A job that outlives `timeout_s` is killed, and
    TimeoutError is raised with its output.
    """
    with tempfile.TemporaryDirectory(prefix="burst-rt-", ignore_cleanup_errors=True) as job_dir:
        python, environment = python_and_environment(warm)
        if by == "torchrun":
            torchrun = [python, "-P", "-m", "torch.distributed.run", "--standalone"]
            torchrun += [f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
            command = [*torchrun, str(program), *args]
            environment["PYTHON_EXEC"] = python  # the Python of torchrun's ranks
        elif by == "mpirun":
            launcher = find_launcher()
            environment = launcher.environment(num_ranks, 1, job_dir) | environment
            # Only `burst-rt run` has a folder for what its ranks report.
            del environment[JOB_DIR_VARIABLE]
            command = launcher.command([python, str(program), *args], num_ranks)
        else:
            command = [python, "-P", "-m", "burst_rt.launch.main", "run", "-n", str(num_ranks)]
            command += [str(program), *args]
        return _run(command, environment, cwd, timeout_s, f"{program.name} on {num_ranks} ranks")


def run_command(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    timeout_s: float = 120.0,
    warm: Preloaded | None = None,
) -> Job:
    """Runs `burst-rt` with these arguments; blocks and raises as `run_job` does.

    Without `warm` the command has the environment that a user would have.
    """
    python, environment = python_and_environment(warm)
    command = [python, "-P", "-m", "burst_rt.launch.main", *arguments]
    if warm is None:
        environment = dict(os.environ)
    return _run(command, environment, cwd, timeout_s, f"burst-rt {arguments[0]}")


def python_and_environment(warm: Preloaded | None) -> tuple[str, dict[str, str]]:
    """The Python of a job, and its environment: one thread, and the modules beside this one."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(_TESTS), environment.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    environment["OMP_NUM_THREADS"] = "1"
    return sys.executable if warm is None else str(warm_python(warm, environment)), environment


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    cwd: Path | None,
    timeout_s: float,
    what: str,
) -> Job:
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_job(process)
        out, err = process.communicate()
        raise TimeoutError(f"{what} did not end within {timeout_s:g} s\n{out}\n{err}") from None
    # Open MPI's abort leaves a NUL byte in the output, now and then at the beginning of a line.
    return Job(process.returncode, out, err.replace("\0", ""), time.time())
