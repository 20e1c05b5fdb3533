"""Starts a job's hub: a fresh interpreter in a session of its own, apart from the ranks.

It has none of MPI's variables, and holds none of a rank's descriptors.

mpirun waits for every process that holds a rank's standard output. An MPI program that was started
with a rank's variables would join the job.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from burst_rt.errors import ConfigError, Stalled
from burst_rt.job.launched import (
    DASHBOARD_VARIABLE,
    METRICS_VARIABLE,
    RECORD_VARIABLE,
    SECRET_VARIABLE,
    TELEMETRY_VARIABLE,
)

if TYPE_CHECKING:
    from burst_rt.telemetry.model.views import Lost, Verdict
    from burst_rt.telemetry.read.viewer import HubViewer

__all__ = ["HUB_MODULE", "RunningHub", "hub_environment", "is_port", "start_hub"]

# The program of the hub's process. It is above telemetry, where the dashboard is known, and is
# started by its name.
HUB_MODULE = "burst_rt.dashboard.hub_process"
_SETTINGS = (
    TELEMETRY_VARIABLE,
    RECORD_VARIABLE,
    SECRET_VARIABLE,
    DASHBOARD_VARIABLE,
    METRICS_VARIABLE,
)
_READY_DEADLINE_S = 15.0
_END_DEADLINE_S = 12.0
# Seconds that the launcher waits to connect, and again for the answer: it asks while a person waits
# for the job to end.
_ASK_DEADLINE_S = 0.4
_POLL_S = 0.05
# Prefixes of variables of Open MPI, PMIx, MPICH and Intel MPI, and of variables of batch systems
# that make a process look like a rank.
_MPI_PREFIXES = (
    "OMPI_",
    "OPAL_",
    "PMIX_",
    "PMI_",
    "PRTE_",
    "MPI_",
    "MPIR_",
    "MPICH_",
    "HYDRA_",
    "HYDI_",
    "I_MPI_",
    "PALS_",
    "SLURM_",
)


@dataclass
class RunningHub:
    """A hub that listens."""

    address: str
    secret: str
    lines: list[str]  # for the person who started the job: a dashboard's link, what failed
    _process: subprocess.Popen[bytes]

    def environment(self) -> dict[str, str]:
        """The variables by which ranks find the hub."""
        return {TELEMETRY_VARIABLE: self.address, SECRET_VARIABLE: self.secret}

    def stopping(self, signal_name: str) -> None:
        """Tells the hub that the job is about to be ended by this signal ("SIGINT"): ranks that end
        from now on are shown as stopped, and none as lost. Call it before the ranks are signalled.
        Waits at most 0.8 s until the hub knows. A hub that is gone is not a failure.
        """
        with suppress(ConfigError, Stalled), self._viewer() as viewer:
            viewer.stopping(signal_name)

    def first_lost(self, settling_s: float = 0.0) -> Lost | None:
        """The rank that was lost, or failed, before all others, and what it was doing, as far as
        that is known. None where none was lost, or the hub is gone.

        settling_s: how long ranks whose processes have ended may take to be heard of; a rank that
        is not heard to leave within that time counts as lost. Waits that long, and at most 0.8 s
        more, or twice that long where the hub does not answer. Ask before `release`, which ends
        the hub.
        """
        with suppress(ConfigError, Stalled), self._viewer(settling_s) as viewer:
            deadline_s = time.monotonic() + settling_s
            while settling_s and (staying := _staying(viewer)):
                if time.monotonic() > deadline_s:
                    return viewer.first_lost() or staying[0]
                time.sleep(_POLL_S)
            return viewer.first_lost()
        return None

    def verdict(self) -> Verdict | None:
        """What limited the job. None where that is not known, or the hub is gone. Waits at most
        0.8 s. Ask before `release`.
        """
        with suppress(ConfigError, Stalled), self._viewer() as viewer:
            return viewer.snapshot().job.verdict
        return None

    def _viewer(self, patience_s: float = 0.0) -> HubViewer:
        from burst_rt.telemetry.read.viewer import HubViewer

        return HubViewer(self.address, self.secret, _ASK_DEADLINE_S + patience_s)

    def release(self) -> None:
        """Lets a held hub end with its last rank. Waits at most 12 s for that, so that the record
        is complete; a hub that has not ended by then is killed.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        kind, _, path = self.address.partition(":")
        if kind == "unix":
            # A hub that was killed has left its folder.
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)

    def forget(self) -> None:
        """The hub outlives this process, which is not to wait for it."""
        self._process.returncode = 0


def _staying(viewer: HubViewer) -> list[Lost]:
    """The ranks of which the hub does not know yet how they ended, as if they were lost now."""
    from burst_rt.telemetry.model.views import Lost

    return [
        Lost(
            rank=rank.rank, at_s=time.time(), call=rank.call, task=rank.doing, hop=rank.hop,
            age_s=-1.0, last_call=rank.last_call, activity="",
        )
        for rank in viewer.snapshot().ranks
        if rank.alive
    ]  # fmt: skip


def hub_environment(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The environment without what makes a process a rank, and without settings of telemetry."""
    return {
        name: value
        for name, value in environment
        if not name.startswith(_MPI_PREFIXES) and name not in _SETTINGS
    }


def start_hub(
    *,
    one_host: bool,
    record: str = "",
    held: bool = False,
    dashboard: str = "",
    metrics_port: str = "",
    job_folder: Path | None = None,
) -> RunningHub:
    """Starts a hub and waits until it listens, at most 15 s. Raises ConfigError if it does not, and
    at once if `metrics_port` is not a port.

    one_host: all ranks are on this host, and the hub listens on a Unix socket; else it listens with
    TCP on all interfaces, behind the job's secret. record: a file to record to, "" for none. held:
    the hub lives until `release`, or as long as this process, and logs to this process's standard
    error; a hub that is not held ends with its last rank. dashboard: "1" or [HOST:]PORT, "" for
    none. metrics_port: a port for `/metrics`, "" for none. job_folder: the folder of the job's
    traces, from which the hub makes the post-mortem of a job that fails; None for no post-mortem.
    """
    if metrics_port and not is_port(metrics_port):
        raise ConfigError(
            f"{METRICS_VARIABLE}: expected a port from 0 to 65535, 0 for any, got "
            f"{metrics_port[:80]!r}; set another, or none"
        )
    secret = secrets.token_urlsafe(24)
    command = [sys.executable, "-P", "-m", HUB_MODULE]
    command += ["--listen", "unix" if one_host else "0.0.0.0"]
    command += ["--record", os.path.abspath(record)] if record else []
    command += ["--held", "--log"] if held else []
    command += ["--dashboard", dashboard] if dashboard else []
    command += ["--metrics-port", metrics_port] if metrics_port else []
    command += ["--job-folder", str(job_folder)] if job_folder is not None else []
    process = subprocess.Popen(
        command,
        env=hub_environment(os.environ.items()) | {SECRET_VARIABLE: secret, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE if held else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=None if held else subprocess.DEVNULL,
        start_new_session=True,
    )
    # `stopping` is called by a signal's handler, which must not import. So the import is done here,
    # while the hub starts.
    import burst_rt.telemetry.read.viewer  # noqa: F401

    address, *lines = _read_line(process).split("\t")
    if not address:
        process.kill()
        process.wait()
        raise ConfigError(
            f"the telemetry hub did not start within {_READY_DEADLINE_S:g} s; to see why, run "
            f"{' '.join(command)}"
        )
    return RunningHub(address, secret, lines, process)


def is_port(text: str) -> bool:
    """Whether a text is a port's number; 0 means any port."""
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= 65535


def _read_line(process: subprocess.Popen[bytes]) -> str:
    """The first line that a process prints; "" where it ends, or prints nothing in time."""
    assert process.stdout is not None
    line = b""
    deadline_s = time.monotonic() + _READY_DEADLINE_S
    with selectors.DefaultSelector() as selector, process.stdout as out:
        selector.register(out, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline_s - time.monotonic())):
            piece = os.read(out.fileno(), 4096)
            if not piece:
                return ""
            line += piece
    return line.decode(errors="replace").strip() if line.endswith(b"\n") else ""
