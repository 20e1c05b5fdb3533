"""How the doctor asks the machine: child processes under deadlines, whose output is the answer."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from burst_rt.launch.mpirun import MpiLauncher
from burst_rt.launch.run import kill_job

__all__ = [
    "ALONE", "PROBE_DEADLINE_S", "ProbeAnswer", "ask_command", "ask_job", "ask_python",
]  # fmt: skip

PROBE_DEADLINE_S = 20.0
# The beginning of a program whose print() is its whole output: what libraries write to standard
# output, where UCX has its log, goes to standard error.
ALONE = "import os, sys; sys.stdout = os.fdopen(os.dup(1), 'w', 1); os.dup2(2, 1)\n"


@dataclass(frozen=True)
class ProbeAnswer:
    """The output of a probe; if the probe failed, `error` says why and is not empty."""

    text: str = ""
    error: str = ""


def ask_command(
    command: Sequence[str], *, deadline_s: float, environment: dict[str, str] | None = None
) -> ProbeAnswer:
    """What a command prints. Blocks until it has ended, at most `deadline_s`; then it is killed."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    except OSError as error:
        return ProbeAnswer(error=str(error))
    try:
        out, err = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        kill_job(process)
        # A process that the probe has started may hold the probe's output open for ever.
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        return ProbeAnswer(error=f"no answer within {deadline_s:.0f} s")
    if process.returncode != 0:
        lines = [line for line in err.splitlines() if line.strip(" -") and " UCX " not in line]
        # The launcher's words about a failed rank come last, but the rank's own error says more.
        telling = (
            [line for line in lines if "Error" in line and "ChildFailedError" not in line]
            or lines
            or [f"exit code {process.returncode}"]
        )
        return ProbeAnswer(error=telling[-1].strip())
    return ProbeAnswer(text=out.strip())


def ask_python(source: str, *, deadline_s: float = PROBE_DEADLINE_S) -> ProbeAnswer:
    """What a program in Python prints; blocks as `ask_command` does."""
    return ask_command([sys.executable, "-P", "-c", ALONE + source], deadline_s=deadline_s)


def ask_job(launcher: MpiLauncher, program: Sequence[str], *, deadline_s: float) -> ProbeAnswer:
    """The output of two ranks of `program`. Blocks until they have ended, at most `deadline_s`."""
    with tempfile.TemporaryDirectory(prefix="burst-rt-", ignore_cleanup_errors=True) as job_dir:
        return ask_command(
            launcher.command(program, 2),
            deadline_s=deadline_s,
            environment=launcher.environment(2, None, job_dir),
        )
