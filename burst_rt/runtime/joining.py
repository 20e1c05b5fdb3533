"""Joining a group of ranks: the device and the transport that `init` decides on.

Every rank brings its facts (`facts.py`), and decides by the facts of all ranks (`choosing.py`), so
all ranks decide the same.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from burst_rt.arguments import is_real
from burst_rt.drivers import Watch
from burst_rt.errors import BurstError, ConfigError, ContractMismatch, DeviceError, InputError
from burst_rt.job import launched
from burst_rt.job.flight import FlightRecord
from burst_rt.job.folders import new_job_name, open_flight
from burst_rt.job.reports import job_folder
from burst_rt.planning.machines import parse_hardware, to_toml
from burst_rt.runtime.calibrated import find_hardware, fit_to_job
from burst_rt.runtime.choosing import choose_transport
from burst_rt.runtime.connections import Comm, Connections, Group, connect
from burst_rt.runtime.facts import Facts, cupy_nccl, facts_of, resolve_device
from burst_rt.runtime.machine import Cluster, Machine
from burst_rt.transport import TRANSPORTS, ControlGroup, OrderedTransport, Transport, Wire
from burst_rt.transport.nccl import (
    Communicator,
    CupyCommunicator,
    NcclTransport,
    first_pairs,
    unique_id_bytes,
)

if TYPE_CHECKING:
    from burst_rt.transport.meeting import Store

__all__ = ["GroupMember", "Presence", "check_seconds", "join", "ranks_per_node"]

# Device memory that NCCL is left for the connections of a call, which take some MiB for each rank.
_ROOM_BYTES = 1 << 30

_JOIN_S = 60.0
# The errors that a rank brings to the others.
_TOLD: dict[str, type[BurstError]] = {
    kind.__name__: kind for kind in (ConfigError, DeviceError, InputError)
}


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
    whole: Store | None  # see `Connections`


class GroupMember(NamedTuple):
    """The state of a rank that has joined a group."""

    machine: Machine
    control: ControlGroup
    presence: Presence
    within_s: float  # seconds that each further step of `init` may take
    flight: FlightRecord | None  # this process's flight record


def join(
    comm: Comm | None,
    group: Group | None,
    device: str,
    transport: str,
    join_s: float | None = None,
    wrong: BurstError | None = None,
) -> GroupMember:
    """Joins the group of ranks. Collective over it; blocks at most `join_s` for each step.

    comm, group, device, transport, join_s: as `init` takes them. wrong: an error that this rank has
    found already; every rank raises it. Raises InputError, ConfigError and ContractMismatch (on
    every rank alike), Stalled, DeviceError.
    """
    try:
        within_s = _join_seconds(join_s)
    except (InputError, ConfigError) as error:
        wrong, within_s = error, _JOIN_S
    if transport == "auto":
        transport = os.environ.get(launched.TRANSPORT_VARIABLE, "auto")
    if device == "auto":
        device = os.environ.get(launched.DEVICE_VARIABLE, "auto")
    connections = connect(comm, group, within_s)
    try:
        return _decide(connections, device, transport, within_s, wrong)
    except BurstError:
        connections.transport.close()
        connections.control.close()
        raise


def check_seconds(name: str, value: object) -> None:
    """Raises InputError unless `value`, the argument `name` of `init`, is a positive number that
    threads can wait for.
    """
    if not is_real(value) or not 0 < value <= threading.TIMEOUT_MAX:  # type: ignore[operator]
        raise InputError(
            f"init: {name} must be a positive, finite number of seconds, got {value!r}"
        )


def _join_seconds(asked: float | None) -> float:
    if asked is None:
        text = os.environ.get("BURST_RT_JOIN_S", str(_JOIN_S))
        try:
            check_seconds("BURST_RT_JOIN_S", asked := float(text))
        except ValueError:  # an InputError is one, too
            raise ConfigError(
                f"init: BURST_RT_JOIN_S must be a positive, finite number of seconds, got {text!r}"
            ) from None
    check_seconds("join_s", asked)
    return asked


def _decide(
    connections: Connections,
    device: str,
    transport: str,
    within_s: float,
    wrong: BurstError | None,
) -> GroupMember:
    """Does the part of `join` after the ranks can talk to each other; blocks and raises as `join`
    does.
    """
    control = connections.control
    computes_on, word = _word(connections, device, transport, wrong)
    pending = control.allgather(json.dumps(word).encode())
    Watch(control).wait_for(pending, within_s, "burst_rt.init")
    words = [json.loads(raw) for raw in pending.result()]
    _raise_told(words, control.rank)
    names = [word.pop("asked") for word in words]
    text, *_ = [word.pop("hardware") for word in words]
    job_name, *_ = [word.pop("job") for word in words]
    if len(set(names)) > 1:
        raise ContractMismatch(
            f"init: transport must be the same on every rank, got {names} in the order of ranks; "
            "give every rank the same transport"
        )
    facts = [Facts(**word) for word in words]
    hosts = [rank.host for rank in facts]
    choice = choose_transport(transport, facts)
    # What the host carries goes by the network between hosts.
    domains = [rank.domain if choice.wire != "host" else "" for rank in facts]
    per_node = ranks_per_node(hosts, domains)
    this_rank = facts[control.rank]
    ranks_here = hosts.count(this_rank.host)
    hardware = parse_hardware(text, "of rank 0") if text else None
    if hardware is not None:
        # No machine file says what staging costs. If messages are staged, the planner decides by
        # bytes.
        hosts_per_node = per_node // ranks_here
        fitted = fit_to_job(hardware, per_node, control.size, hosts_per_node)
        hardware = None if choice.staged else fitted
    presence = Presence(
        thread=connections.thread,
        job_rank=connections.job_rank,
        job_size=connections.job_size,
        host=this_rank.host,
        device=str(computes_on),
        gpu=this_rank.gpu,
        pci=_pci_address(computes_on),
        whole=connections.whole,
    )
    cluster = Cluster(per_node, ranks_here, hardware)
    carrier = _carrier(choice.wire, connections, computes_on, within_s)
    machine = Machine(computes_on, choice, carrier, cluster)
    flight = None
    # Threads are no ranks that could be lost, and a process of its own needs no post-mortem.
    if connections.thread is None and (connections.job_size > 1 or launched.by_launcher()):
        flight = open_flight(job_name, connections.job_rank, connections.job_size)
    return GroupMember(machine, control, presence, within_s, flight)


def _carrier(
    wire: Wire, connections: Connections, device: torch.device, within_s: float
) -> Transport | OrderedTransport:
    """What carries messages. With NCCL the transport of host memory is closed. Collective."""
    if wire == "host":
        return connections.transport
    control = connections.control
    carrier = NcclTransport(
        _communicator(wire, connections, device, within_s),
        control.rank,
        control.size,
        within_s,
        partial(torch.cuda.set_device, device),
        partial(_connect, device),
    )
    carrier.make_room = partial(_make_room, device)
    connections.transport.close()
    return carrier


def _job_name(whole: Store | None) -> str:
    """A name for the job's folder; one name for all groups of its processes."""
    name = new_job_name()
    if whole is not None:
        # torch's stores raise these. Each group then has a folder of its own.
        with suppress(RuntimeError):
            name = whole.compare_set("burst_rt/job", "", name).decode()
    return name


def _word(
    connections: Connections, device: str, transport: str, wrong: BurstError | None
) -> tuple[torch.device, dict[str, Any]]:
    """This rank's device, and what it tells the others: its facts, or an error.

    The error is raised later: the other ranks are waiting, and must raise the same error.
    """
    computes_on = torch.device("cpu")
    try:
        if wrong is not None:
            raise wrong
        if transport not in TRANSPORTS:
            raise ConfigError(
                f"init: transport must be one of {list(TRANSPORTS)}, got {transport!r}"
            )
        computes_on = resolve_device(device)
        facts = asdict(facts_of(computes_on, connections.meeting))
        # All ranks plan with the same machine file, or they would plan differently.
        first = connections.control.rank == 0 and connections.control.size > 1
        gpu = torch.cuda.get_device_name(computes_on) if computes_on.type == "cuda" else ""
        planned = find_hardware(computes_on.type, gpu) if first else None
        hardware = to_toml(planned) if planned else ""
        folder = job_folder()
        job = _job_name(connections.whole) if folder is None else folder.name
        return computes_on, {**facts, "asked": transport, "hardware": hardware, "job": job}
    except (ConfigError, InputError) as error:
        return computes_on, {"error": error.message, "class": type(error).__name__}
    except RuntimeError as error:  # torch's: the facts are the first to touch the device
        why = f"init: {computes_on} failed: {error}; look at the device (nvidia-smi)"
        return computes_on, {"error": why, "class": DeviceError.__name__}


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
    wire: Wire, connections: Connections, device: torch.device, within_s: float
) -> Callable[[], Communicator]:
    """The function that makes the communicator; the ranks agree here on its name. Collective."""
    control = connections.control
    nccl: Any = cupy_nccl() if wire == "nccl" else None

    def known_to_all(mine: Callable[[], bytes]) -> bytes:
        """The object that the first rank has made."""
        pending = control.allgather(mine() if control.rank == 0 else b"")
        Watch(control).wait_for(pending, within_s, "burst_rt.init")
        return pending.result()[0]

    if wire == "nccl":
        unique_id = known_to_all(lambda: unique_id_bytes(nccl))
        return lambda: CupyCommunicator(nccl, unique_id, control.rank, control.size)
    from burst_rt.transport.torch_nccl import TorchCommunicator, make_group

    key = known_to_all(lambda: secrets.token_hex(8).encode()).decode()
    return lambda: TorchCommunicator(
        make_group(connections.store, key, control.rank, control.size, device), device
    )


def _connect(device: torch.device, wire: OrderedTransport) -> None:
    """Exchanges a byte with every rank that `first_pairs` names. Blocks until all have arrived."""
    byte = torch.zeros(2, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)
    for to, source in first_pairs(wire.rank, wire.size):
        wire.exchange([(byte[:1], to)], [(byte[1:], source)], stream.cuda_stream)
    stream.synchronize()


def _make_room(device: torch.device) -> None:
    """Gives back what torch keeps for later, where the device has little left for NCCL."""
    if torch.cuda.mem_get_info(device)[0] < _ROOM_BYTES:
        torch.cuda.empty_cache()


def _pci_address(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    known = torch.cuda.get_device_properties(device)
    # Older versions of torch do not tell the address.
    domain, bus, slot = (
        int(getattr(known, name, -1)) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    )
    return "" if min(domain, bus, slot) < 0 else f"{domain:08x}:{bus:02x}:{slot:02x}.0"


def ranks_per_node(hosts: Sequence[str], domains: Sequence[str]) -> int:
    """Number of ranks on each node: an NVLink domain, or a host where there is none ("").

    hosts, domains: of each rank. Where domains have unequal numbers of ranks, or ranks that are not
    consecutive, hosts count; 1 where hosts do, too.
    """
    nodes = [domain or host for host, domain in zip(hosts, domains, strict=True)]
    return _alike(nodes) or _alike(hosts) or 1


def _alike(nodes: Sequence[str]) -> int:
    """How often each node comes; 0 if numbers differ or a node's ranks are not consecutive."""
    sizes = {len(list(ranks)) for _, ranks in groupby(nodes)}
    return sizes.pop() if len(sizes) == 1 and len(list(groupby(nodes))) == len(set(nodes)) else 0
