"""What the launcher says about this process's job: this rank's number, and the number of ranks.

Launchers set environment variables: Open MPI, MPICH, Intel MPI, MVAPICH, Slurm's srun, PALS, Flux
and torchrun. Standard library only, except `ranks_here`, which looks at processes with psutil.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = [
    "DASHBOARD_VARIABLE", "DEVICE_VARIABLE", "METRICS_VARIABLE", "RECORD_VARIABLE",
    "RESTARTS_VARIABLE", "SECRET_VARIABLE", "TELEMETRY_VARIABLE", "TRANSPORT_VARIABLE",
    "by_hydra", "by_launcher", "local_rank", "mpi_ranks", "num_local_ranks", "process_rank", "rank",
    "ranks_here", "restarts", "torchrun_ranks", "torchrun_wrong",
]  # fmt: skip

# The environment variables that say what "auto" means in `burst_rt.init`.
# `burst-rt run --device ... --transport ...` sets them.
DEVICE_VARIABLE, TRANSPORT_VARIABLE = "BURST_RT_DEVICE", "BURST_RT_TRANSPORT"

# The variables that ask for telemetry. They are here because every command has options that set
# them, and telemetry takes 10 ms to import.
# "1" asks for it, an address asks for it with a hub that runs already. "0", "off", "no" or "false"
# turns it off, whatever the other variables say; without a value, they decide.
TELEMETRY_VARIABLE = "BURST_RT_TELEMETRY"
SECRET_VARIABLE = "BURST_RT_TELEMETRY_SECRET"
# A file to record to. Asks for telemetry too.
RECORD_VARIABLE = "BURST_RT_RECORD"
# "1" asks for a dashboard, [HOST:]PORT for a dashboard there; "0" is any free port. Both variables
# ask for telemetry too; the dashboard's with "off", "no" or "false" asks for nothing.
DASHBOARD_VARIABLE = "BURST_RT_DASHBOARD"
METRICS_VARIABLE = "BURST_RT_METRICS_PORT"  # a port for `/metrics` alone

# Tells ranks how often `burst-rt run --restarts` has started their job again.
RESTARTS_VARIABLE = "BURST_RT_RESTARTS"

# The numbers of restarts of other launchers; torchrun may run in a job of Slurm's.
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

# The innermost launcher first: an mpirun inside a step of srun leaves srun's variables as they are.
_RANK = (
    "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "FLUX_TASK_RANK",
    "SLURM_PROCID",
)  # fmt: skip
_SIZE = (
    "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE",
    "SLURM_STEP_NUM_TASKS",
)  # fmt: skip
_LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
    "PALS_LOCAL_RANKID",
    "PMI_LOCAL_RANK",
    "LOCAL_RANK",  # set by programs that set torchrun's variables themselves
)
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Names of variables that are the same for all ranks of one job, and differ between the jobs of a
# host.
_JOB = ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_JOB_ID")


def _under_torchrun() -> bool:
    """Whether torchrun started this process. Whatever started torchrun (srun, mpirun) has left its
    variables in the environment, and they tell of torchrun's own process.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int | None:
    """This process's number in its MPI job; None where no launcher started it."""
    return None if _under_torchrun() else _number(_RANK)


def process_rank() -> int | None:
    """This process's number in its job, whatever launcher started it; None without one."""
    return _number(("RANK",)) if _under_torchrun() else rank()


def by_launcher() -> bool:
    """Whether a launcher has started this process."""
    return _under_torchrun() or rank() is not None


def mpi_ranks() -> int:
    """Number of ranks that the MPI launcher started; 1 without a launcher."""
    return 1 if _under_torchrun() else _number(_SIZE) or 1


def by_hydra() -> bool:
    """Whether the mpirun of MPICH or Intel MPI started this process."""
    told = [name for name in _RANK if name in os.environ]
    # A batch job's own variables stay; what Slurm's own PMI sets has no number on the host.
    return not _under_torchrun() and (
        told == ["PMI_RANK"] or (told[:1] == ["PMI_RANK"] and "MPI_LOCALRANKID" in os.environ)
    )


def local_rank() -> int | None:
    """This rank's number among the ranks of its host; None where the launcher does not say."""
    return _number(("LOCAL_RANK",) if _under_torchrun() else _LOCAL_RANK)


def num_local_ranks() -> int | None:
    """Number of the job's ranks that are on this host; None where the launcher does not say."""
    return _number(("LOCAL_WORLD_SIZE",) if _under_torchrun() else _LOCAL_SIZE)


def restarts() -> int:
    """How often this rank's job has been started again, as its launchers count.

    `burst-rt run` counts Slurm's requeues too. Each agent of torchrun's counts for itself, and not
    the starts for which another agent was the reason.
    """
    told = _number((RESTARTS_VARIABLE,))
    if told is not None:
        return told
    return sum(_number((name,)) or 0 for name in _RESTARTS)


def torchrun_ranks() -> int:
    """Number of processes according to RANK and WORLD_SIZE (torchrun's variables); 1 without
    them.
    """
    return _number(("WORLD_SIZE",)) or 1 if os.environ.get("RANK", "").isdigit() else 1


def torchrun_wrong() -> str | None:
    """The fault of RANK and WORLD_SIZE where both are set, in words; None: nothing."""
    rank, size = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    if rank is None or size is None:
        return None
    if rank.isdigit() and size.isdigit() and int(rank) < int(size):
        return None
    return (
        f"expected RANK and WORLD_SIZE to be whole numbers, and RANK the smaller one; got {rank!r} "
        f"and {size!r}"
    )


def ranks_here() -> dict[int, int]:
    """Process ids by rank: the ranks of this job that are alive on this host and can be seen.

    Empty where no launcher started this process, or where the other processes may not be looked
    at.
    """
    import psutil

    job = {name: os.environ[name] for name in _JOB if name in os.environ}
    if rank() is None:
        return {}
    process_ids: dict[int, int] = {}
    # The first ancestor that is not of this job ends the search: no process above it is of the job.
    top = psutil.Process()
    while (parent := top.parent()) is not None and _rank_of(parent, job) is not None:
        top = parent
    for process in (top.parent() or top).children(recursive=True):
        number = _rank_of(process, job)
        # A rank may have several processes, a wrapper's shell for one. The outermost process comes
        # first in the list, and ends last.
        if number is not None and process.status() != psutil.STATUS_ZOMBIE:
            process_ids.setdefault(number, process.pid)
    return process_ids


def _rank_of(process: object, job: dict[str, str]) -> int | None:
    """The rank that a process belongs to; None for a process of another job or out of sight."""
    import psutil

    assert isinstance(process, psutil.Process)
    try:
        environment = process.environ()
    except (psutil.Error, OSError):
        return None
    if any(environment.get(name) != value for name, value in job.items()):
        return None
    return next((int(v) for name in _RANK if (v := environment.get(name, "")).isdigit()), None)


def _number(names: Sequence[str]) -> int | None:
    return next((int(text) for name in names if (text := os.environ.get(name, "")).isdigit()), None)
