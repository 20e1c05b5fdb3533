"""Slurm on the hosts of `hosts.py`: its controller on the login node, its daemons on the others."""

from __future__ import annotations

import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from dashboards import installed
from hosts import Hosts, Running

__all__ = ["Slurm", "slurm"]

_READY_S = 30.0
_PMIX = "/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so"  # where Debian's Slurm looks for it
# The hosts have one /tmp, in which Slurm's PMIx would have the same folders on each.
_MPI_CONF = "PMIxCliTmpDirBase=/var/tmp\n"
_SLURM_CONF = """
ClusterName=tests
SlurmctldHost=login
SlurmUser=root
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}
SlurmctldPidFile=/var/tmp/slurmctld.pid
SlurmdSpoolDir=/var/tmp/slurmd
SlurmdPidFile=/var/tmp/slurmd.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
KillWait=5
NodeName=node[1-{num}] CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


@dataclass
class Slurm:
    """A Slurm that runs."""

    here: Hosts
    settings: dict[str, str]

    def start(self, *command: str) -> Running:
        """Starts a command of Slurm's on the login node."""
        return self.here.start("login", command, self.settings)

    def ask(self, *command: str, within_s: float = _READY_S) -> str:
        """What a command prints; blocks until it has ended, at most `within_s`."""
        job = self.start(*command)
        assert job.wait(within_s) == 0, job.text
        return job.out.strip()


def slurm(here: Hosts) -> Slurm:
    """Starts Slurm on the hosts; blocks until it takes jobs. It ends with the hosts.

    Where it is not installed the test is skipped, or fails if all tests must run.
    """
    package = "slurmd slurmctld slurm-client munge libpmix-dev"
    munged, controller, daemon = (
        installed(shutil.which(name, path="/usr/sbin:/sbin") or name, package=package)
        for name in ("munged", "slurmctld", "slurmd")
    )
    installed("srun", package=package)
    if not Path(_PMIX).exists():
        installed("the library of PMIx", package=package)
    folder = here.folder / "slurm"
    folder.mkdir()
    (folder / "key").touch(0o600)
    (folder / "key").write_bytes(secrets.token_bytes(64))
    conf = _SLURM_CONF.format(folder=folder, num=here.num)
    (folder / "slurm.conf").write_text(conf, encoding="utf-8")
    (folder / "mpi.conf").write_text(_MPI_CONF, encoding="utf-8")
    made = Slurm(here, {"SLURM_CONF": str(folder / "slurm.conf"), "PMIX_MCA_psec": "native"})
    places = {
        "key-file": "key", "socket": "munge", "pid-file": "pid", "log-file": "log",
        "seed-file": "seed",
    }  # fmt: skip
    options = [f"--{option}={folder / name}" for option, name in places.items()]
    made.start(munged, "--foreground", "--force", *options)
    deadline_s = time.monotonic() + _READY_S
    while not (folder / "munge").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    made.start(controller, "-D")
    for i in range(here.num):
        name = f"node{i + 1}"
        here.start(name, [daemon, "-D", "-N", name], made.settings)
    while made.ask("sinfo", "--noheader", "--format=%t %D") != f"idle {here.num}":
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    return made
