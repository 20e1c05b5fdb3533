"""Joining a group of ranks: the device and the transport that `init` decides on.

Every rank brings its facts (host, GPU, NCCL, MPI).
Every rank decides by the facts of all ranks, so all ranks decide the same.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch

from burst_rt.drivers import Watch
from burst_rt.errors import BurstError, ConfigError, ContractMismatch, DeviceError, InputError
from burst_rt.job import launched
from burst_rt.planning.machines import parse_hardware, to_toml
from burst_rt.runtime.calibrated import find_hardware, fitted
from burst_rt.runtime.ends import Comm, Ends, Group, RankKind, find_ends
from burst_rt.runtime.machine import Machine
from burst_rt.transport import TRANSPORTS, ControlGroup, OrderedTransport
from burst_rt.transport.nccl import (
    Communicator,
    CupyCommunicator,
    NcclTransport,
    first_pairs,
    unique_id_bytes,
)
from burst_rt.transport.probe import last_answer

__all__ = [
    "Facts", "Joined", "Presence", "Taken", "check_seconds", "choose_transport", "describe_choice",
    "join", "ranks_per_node", "resolve_device",
]  # fmt: skip

_JOIN_S = 60.0
# Name of the transport of host memory for ranks of each kind, and words for such ranks.
_HOST_TRANSPORT: dict[RankKind, str] = {"threads": "local", "mpi": "mpi", "group": "torch"}
_IN_WORDS: dict[RankKind, str] = {
    "threads": "threads of one process",
    "mpi": "processes of an MPI job",
    "group": "processes of a torch.distributed group",
}
# The errors that a rank brings to the others.
_TOLD: dict[str, type[BurstError]] = {
    kind.__name__: kind for kind in (ConfigError, DeviceError, InputError)
}
# Number of the first NCCL version that takes several ranks on one GPU, in an experimental mode.
_NCCL_MULTI_RANK = 23000


@dataclass(frozen=True)
class Facts:
    """The facts that one rank brings to the choice of a transport."""

    host: str
    gpu: str  # the GPU's UUID; "" on a CPU
    nccl: int  # NCCL's version (22907 for 2.29.7); 0 without CuPy's NCCL
    multi_rank: bool  # whether NCCL is told to take several ranks on one GPU
    ranks: RankKind  # the kind of the ranks
    torch_nccl: int = 0  # the version of torch's own NCCL
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
    """The state of a rank that has joined a group."""

    machine: Machine
    control: ControlGroup
    presence: Presence
    within_s: float  # seconds that each further step of `init` may take


def join(
    comm: Comm | None,
    group: Group | None,
    device: str,
    transport: str,
    join_s: float | None = None,
    wrong: BurstError | None = None,
) -> Joined:
    """Joins the group of ranks. Collective over it; blocks at most `join_s` for each step.

    comm, group, device, transport, join_s: as `init` takes them. wrong: an error that this rank has
    found already; every rank raises it. Raises InputError, ConfigError and ContractMismatch (on
    every rank alike), Stalled, DeviceError.
    """
    try:
        within_s = _join_seconds(join_s)
    except InputError as error:
        wrong, within_s = error, _JOIN_S
    if transport == "auto":
        transport = os.environ.get(launched.TRANSPORT_VARIABLE, "auto")
    if device == "auto":
        device = os.environ.get(launched.DEVICE_VARIABLE, "auto")
    ends = find_ends(comm, group, within_s)
    try:
        return _decide(ends, device, transport, within_s, wrong)
    except BurstError:
        ends.transport.close()
        ends.control.close()
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
    ends: Ends, device: str, transport: str, within_s: float, wrong: BurstError | None
) -> Joined:
    """Does the part of `join` after the ranks can talk to each other; blocks and raises as `join`
    does.
    """
    control = ends.control
    where, mine = _own_word(ends, device, transport, wrong)
    pending = control.allgather(json.dumps(mine).encode())
    Watch(control).wait_for(pending, within_s, "burst_rt.init")
    said = [json.loads(raw) for raw in pending.result()]
    _raise_told(said, control.rank)
    asked = [word.pop("asked") for word in said]
    text, *_ = [word.pop("hardware") for word in said]
    hardware = parse_hardware(text, "of rank 0") if text else None
    if len(set(asked)) > 1:
        raise ContractMismatch(
            f"init: transport must be the same on every rank, got {asked} in the order of ranks; "
            "give every rank the same transport"
        )
    ranks = [Facts(**word) for word in said]
    hosts = [rank.host for rank in ranks]
    taken, per_node = choose_transport(transport, ranks), ranks_per_node(hosts)
    # No machine file says what staging costs. If messages are staged, the planner decides by bytes.
    if hardware is not None:
        staged = taken.name == "staged"
        hardware = None if staged else fitted(hardware, per_node, control.size)
    own = ranks[control.rank]
    presence = Presence(
        thread=ends.thread,
        job_rank=ends.job_rank,
        job_size=ends.job_size,
        host=own.host,
        device=str(where),
        gpu=own.gpu,
        pci=_pci_address(where),
    )
    wire = None
    if taken.name in ("nccl", "torch") and where.type != "cpu":
        wire = NcclTransport(
            _communicator(taken.name, ends, where, within_s),
            control.rank,
            control.size,
            within_s,
            partial(torch.cuda.set_device, where),
            partial(_connect, where),
        )
        ends.transport.close()
    machine = Machine(
        where, taken, ends.transport if wire is None else None, wire,
        ranks_per_node=per_node, ranks_here=hosts.count(own.host), hardware=hardware,
    )  # fmt: skip
    return Joined(machine, control, presence, within_s)


def _own_word(
    ends: Ends, device: str, transport: str, wrong: BurstError | None
) -> tuple[torch.device, dict[str, Any]]:
    """This rank's device, and what it tells the others: its facts, or an error.

    The error is raised later: the other ranks are waiting, and must raise the same error.
    """
    where = torch.device("cpu")
    try:
        if wrong is not None:
            raise wrong
        if transport not in TRANSPORTS:
            raise ConfigError(
                f"init: transport must be one of {list(TRANSPORTS)}, got {transport!r}"
            )
        where = resolve_device(device)
        facts = asdict(_facts(where, ends.kind))
        # All ranks plan with the same machine file, or they would plan differently.
        first = ends.control.rank == 0 and ends.control.size > 1
        planned = find_hardware(where.type) if first else None
        hardware = to_toml(planned) if planned else ""
        return where, {**facts, "asked": transport, "hardware": hardware}
    except (ConfigError, InputError) as error:
        return where, {"error": error.message, "class": type(error).__name__}
    except RuntimeError as error:  # torch's: the facts are the first to touch the device
        why = f"init: {where} failed: {error}; look at the device (nvidia-smi)"
        return where, {"error": why, "class": DeviceError.__name__}


def _raise_told(said: list[dict[str, Any]], rank: int) -> None:
    """Raises the error that a rank has told, if one has."""
    for peer, word in enumerate(said):
        if "error" in word:
            kind = _TOLD[word["class"]]
            raise kind(
                word["error"] if len(said) == 1 else f"rank {peer}: {word['error']}",
                rank=rank,
                peer=peer,
            )


def _communicator(
    name: str, ends: Ends, device: torch.device, within_s: float
) -> Callable[[], Communicator]:
    """The function that makes the communicator; the ranks agree here on its name. Collective."""
    control = ends.control
    nccl: Any = _cupy_nccl() if name == "nccl" else None

    def known_to_all(mine: Callable[[], bytes]) -> bytes:
        """The object that the first rank has made."""
        pending = control.allgather(mine() if control.rank == 0 else b"")
        Watch(control).wait_for(pending, within_s, "burst_rt.init")
        return pending.result()[0]

    if name == "nccl":
        unique_id = known_to_all(lambda: unique_id_bytes(nccl))
        return lambda: CupyCommunicator(nccl, unique_id, control.rank, control.size)
    from burst_rt.transport.torch_nccl import TorchCommunicator, make_group

    key = known_to_all(lambda: secrets.token_hex(8).encode()).decode()
    return lambda: TorchCommunicator(
        make_group(ends.store, key, control.rank, control.size, device), device
    )


def _connect(device: torch.device, wire: OrderedTransport) -> None:
    """Exchanges a byte with every rank that `first_pairs` names. Blocks until all have arrived."""
    byte = torch.zeros(2, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)
    for to, source in first_pairs(wire.rank, wire.size):
        wire.exchange([(byte[:1], to)], [(byte[1:], source)], stream.cuda_stream)
    stream.synchronize()


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
    """The device that a name denotes on this rank. Raises ConfigError for a missing device."""
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
    threads = ranks[0].ranks == "threads" or len(ranks) == 1
    host = "local" if threads else _HOST_TRANSPORT[ranks[0].ranks]
    why = "asked for"
    if asked == "auto":
        if not all(gpus) or threads:
            kind = "one rank" if len(ranks) == 1 else "ranks are threads of this process"
            return Taken(host, kind if threads else "host memory")
        mine = "torch" if host == "torch" else "nccl"  # where torch has met, so has its NCCL
        refusal = _no_nccl(ranks, mine)
        if refusal is None:
            return Taken(mine, "a GPU each")
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
    if asked == "nccl" or (asked == host == "torch" and all(gpus)):
        refusal = _no_nccl(ranks, asked)
        if refusal:
            raise ConfigError(
                f"init: transport {asked!r} was asked for, but {refusal}; use transport='staged' "
                "or 'auto'"
            )
    elif asked in _HOST_TRANSPORT.values() and asked != host and len(ranks) > 1:
        raise ConfigError(
            f"init: transport {asked!r} was asked for, but these ranks are "
            f"{_IN_WORDS[ranks[0].ranks]}; use {host!r} or 'auto'"
        )
    return Taken(asked, why)


def ranks_per_node(hosts: Sequence[str]) -> int:
    """Number of ranks on each host; 1 if counts differ or a host's ranks are not consecutive."""
    sizes = {len(list(ranks)) for _, ranks in groupby(hosts)}
    return sizes.pop() if len(sizes) == 1 and len(list(groupby(hosts))) == len(set(hosts)) else 1


def describe_choice(kind: RankKind = "mpi") -> str:
    """The choice of "auto" on this host with a rank for each GPU, or two ranks on CPUs, in words.

    kind: "mpi" or "group", as in `Facts.ranks`.
    """
    with suppress(ImportError, RuntimeError):
        import mpi4py.MPI  # noqa: F401  (its library's name is a fact)
    device = resolve_device("auto")
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    here = [torch.device("cuda", i) for i in range(count)] or [device]
    ranks = [_facts(here[i % len(here)], kind) for i in range(max(2, count))]
    taken = choose_transport("auto", ranks)
    return f"{len(ranks)} ranks would use {device.type} and {taken.name} ({taken.reason})"


def _no_nccl(ranks: Sequence[Facts], whose: str) -> str | None:
    """Why these ranks cannot use NCCL, or None. whose: "nccl" for CuPy's, "torch" for torch's."""
    versions = [rank.nccl if whose == "nccl" else rank.torch_nccl for rank in ranks]
    if not ranks[0].gpu:
        return "NCCL needs GPUs, and these ranks are on CPUs"
    if ranks[0].ranks == "threads" and len(ranks) > 1:
        return "NCCL needs a process for each rank, and these ranks are threads"
    without = [i for i, version in enumerate(versions) if not version]
    if without and whose == "torch":
        return f"ranks {without} have a torch without NCCL"
    if without:
        return f"ranks {without} have no CuPy with NCCL (in the clone: pip install '.[cuda13]')"
    gpu, most = Counter((rank.host, rank.gpu) for rank in ranks).most_common(1)[0]
    new = min(versions) >= _NCCL_MULTI_RANK and all(rank.multi_rank for rank in ranks)
    if most > 1 and not new:
        return (
            f"{most} ranks share GPU {gpu[1]} of {gpu[0]} (NCCL takes one rank a GPU; NCCL 2.30 "
            "or newer takes more with NCCL_MULTI_RANK_GPU_ENABLE=1)"
        )
    return None


def _facts(device: torch.device, ranks: RankKind) -> Facts:
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    nccl = _cupy_nccl() if gpu else None
    version = int(nccl.get_version()) if nccl else 0
    multi_rank = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return Facts(
        socket.gethostname(),
        gpu,
        version,
        multi_rank,
        ranks,
        torch_nccl=_torch_nccl() if gpu else 0,
        device_mpi=_device_mpi(device) if gpu else None,
    )


def _device_mpi(device: torch.device) -> bool | None:
    mpi = sys.modules.get("mpi4py.MPI")
    return (
        None
        if mpi is None
        else last_answer(mpi.Get_library_version().strip(), torch.cuda.get_device_name(device))
    )


def _torch_nccl() -> int:
    from burst_rt.transport.torch_nccl import version

    return version()


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
