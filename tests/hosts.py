"""Several hosts on one machine, for tests: see hosts.sh, which makes them out of namespaces.

Jobs are started there as users start jobs on several hosts: `mpirun` from a login node, `torchrun`
on each host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from burst_rt.launch.mpirun import find_launcher
from burst_rt.launch.run import kill_job

__all__ = ["Hosts", "Running", "hosts"]

_MEETING = ("--master-addr=node1", "--master-port=29400")
# What ranks on other hosts need of the tests' environment.
_SHARED = ("OMP_NUM_THREADS", "PYTHONPATH", "BURST_RT_POISON", "BURST_RT_HARDWARE")
_SCRIPT = Path(__file__).with_name("hosts.sh")
_NAMESPACES = ["--mount", "--uts", "--net", "--ipc"]
_UNSHARE = ["unshare", *_NAMESPACES, "--pid", "--fork", "--kill-child", "--mount-proc"]
_READY_S = 20.0


@dataclass
class Running:
    """A command that runs on a host."""

    process: subprocess.Popen[str]
    out: str = ""
    err: str = ""

    def wait(self, timeout_s: float) -> int:
        """Its exit code. Blocks until it has ended; kills it after `timeout_s` (TimeoutError)."""
        try:
            self.out, self.err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill_job(self.process)
            self.out, self.err = self.process.communicate()
            raise TimeoutError(f"it did not end within {timeout_s:g} s: {self.text}") from None
        return self.process.returncode

    @property
    def text(self) -> str:
        """All that is known of it, for the message of an assertion."""
        return (
            f"{self.process.args!r}\nexit code {self.process.returncode}\n"
            f"--- stdout\n{self.out}\n--- stderr\n{self.err}"
        )


@dataclass
class Hosts:
    """Hosts "node1" to "nodeN" at 10.77.0.1 and on, and the host "login". Made by `hosts`."""

    num: int
    folder: Path  # which all hosts see
    _login: subprocess.Popen[str]
    started: list[Running] = field(default_factory=list)

    def do(self, line: str) -> None:
        """Does one of: "cut N" or "join N" (the link of a host), "kill_host N" (by SIGKILL)."""
        assert self._login.stdin is not None
        assert self._login.stdout is not None
        self._login.stdin.write(line + "\n")
        self._login.stdin.flush()
        assert self._login.stdout.readline() == "done\n"

    def start(
        self, host: str, command: Sequence[str], settings: Mapping[str, str] | None = None
    ) -> Running:
        """Starts a command on a host, with this process's environment and `settings`."""
        environment = os.environ | {
            "PATH": f"/var/tmp/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": "/var/tmp",
            "PYTHONPATH": str(_SCRIPT.parent),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        pid = self._login.pid
        enter = ["nsenter", f"--target={pid}", *_NAMESPACES]
        enter += [f"--pid=/proc/{pid}/ns/pid_for_children", "env", "-C", str(self.folder)]
        # Where ranks go is said by the host file.
        enter += ["--unset=PRTE_MCA_rmaps_default_mapping_policy"]
        place = [] if host == "login" else [str(_SCRIPT), "at", host]
        process = subprocess.Popen(
            [*enter, *place, *command],
            env=environment | dict(settings or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(Running(process))
        return self.started[-1]

    def mpirun(
        self, program: Sequence[str], settings: Mapping[str, str] | None = None, slots: int = 2
    ) -> Running:
        """Starts a program by mpirun, from the login node, on so many ranks of each host.

        settings: of the environment, also of the ranks.
        """
        exports = [part for name in (*_SHARED, *(settings or {})) for part in ("-x", name)]
        # With its whole path mpirun finds its own programs on the other hosts.
        mpirun = str(find_launcher().path)
        command = [mpirun, "--hostfile", str(self.hostfile(slots)), "--bind-to", "none"]
        return self.start("login", [*command, *exports, *program], settings)

    def hostfile(self, slots: int = 2) -> Path:
        """A file that names the hosts, with so many ranks each, for mpirun."""
        path = self.folder / "hosts.txt"
        names = [f"node{i + 1} slots={slots}\n" for i in range(self.num)]
        path.write_text("".join(names), encoding="utf-8")
        return path

    def torchrun(
        self,
        program: Sequence[str],
        settings: Mapping[str, str] | None = None,
        meeting: Sequence[str] = (),
    ) -> list[Running]:
        """Starts a program by torchrun, one on each host, on two ranks of each host.

        meeting: the options by which they meet, if others than the first host's name and a port.
        """
        command = [sys.executable, "-P", "-m", "torch.distributed.run", f"--nnodes={self.num}"]
        command += ["--nproc-per-node=2", *(meeting or _MEETING)]
        return [
            self.start(f"node{i + 1}", [*command, f"--node-rank={i}", *program], settings)
            for i in range(self.num)
        ]

    def processes(self) -> list[str]:
        """The command lines of what runs on the hosts now, without what makes the hosts."""
        listed = self.start("login", ["ps", "-e", "-o", "args="])
        assert listed.wait(_READY_S) == 0, listed.text
        own = (str(_SCRIPT), "unshare ", "sleep infinity", "ps -e", "nsenter ")
        return [line for line in listed.out.splitlines() if not any(part in line for part in own)]

    def wait_until_empty(self, within_s: float, but: Sequence[str] = ()) -> None:
        """Blocks until nothing runs on the hosts any more, but programs whose names hold one of
        `but`; raises TimeoutError after `within_s`.
        """
        deadline_s = time.monotonic() + within_s
        while left := [
            line
            for line in self.processes()
            if not any(name in word for name in but for word in line.split()[:2])
        ]:
            if time.monotonic() > deadline_s:
                raise TimeoutError("\n".join(["still running:", *left]))
            time.sleep(0.1)


@contextmanager
def hosts(num: int, folder: Path, rate: str = "") -> Iterator[Hosts]:
    """Makes hosts; all that runs on them is killed at the end of the block.

    folder: of the test, for its files. rate: what their links carry, as `tc` reads it. Where
    namespaces are not allowed the test is skipped, or fails if all tests must run.
    """
    login = subprocess.Popen(
        [*_UNSHARE, str(_SCRIPT), "world", str(num), *([rate] if rate else [])],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert login.stdin is not None
    assert login.stdout is not None
    assert login.stderr is not None
    made = Hosts(num, folder, login)
    try:
        if login.stdout.readline() != "ready\n":
            say = pytest.fail if "BURST_RT_ALL_TESTS" in os.environ else pytest.skip
            say(f"needs network namespaces (root, iproute2): {login.stderr.read().strip()}")
        yield made
    finally:
        for job in made.started:
            kill_job(job.process)
            if job.process.stdout is not None and not job.process.stdout.closed:
                job.process.communicate()
        login.kill()
        login.communicate()
