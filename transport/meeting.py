"""How the ranks of a `torch.distributed` group find each other: through the group's store.

Every rank writes where it listens, and reads where the others do. That is all that the store is
used for. A store is what torch calls so (`torch.distributed.Store`): keys with values, on one of
the ranks or on torchrun's agent. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol

import psutil

from burst_rt.errors import BurstError, ConfigError, PeerLost, Stalled
from burst_rt.job.clock import RunningClock
from burst_rt.transport.links import SECRET_BYTES, Door, Links, Place, this_host
from burst_rt.transport.sockets import SocketControl, SocketTransport

__all__ = ["INTERFACE_VARIABLE", "Store", "meet"]

# Name of the variable for the network interface on which other hosts' ranks reach this one, as in
# gloo.
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_USES = 3  # data, collectives, notices
# Seconds between two questions to the store whether all have come.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
# Number of descriptors per rank (one to it and one from it for each use), and number of files that
# the program may still open.
_DESCRIPTORS_A_RANK, _DESCRIPTORS_LEFT = 2 * _USES, 64
# The same for all groups of a process. A forked process has another number.
_process = secrets.token_hex(8)


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str, /) -> None:
        """Writes a value."""

    def get(self, key: str, /) -> bytes:
        """Reads a value. Blocks until there is one."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Reads several values."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these have values."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a number, which begins as 0, and returns the sum."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Writes a value in place of the expected one ("": of none), and returns what is there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Blocks until all these have values."""


def meet(
    store: Store, rank: int, size: int, within_s: float
) -> tuple[SocketTransport, SocketControl]:
    """This rank's ends of a transport and a control group. Collective over the group.

    Each call makes new ends; every rank's nth call belongs together. So after a meeting that
    failed, the ranks of the group may not find each other again. Blocks until all ranks have come,
    at most `within_s`, then raises Stalled. Raises PeerLost where the store is gone or a rank
    refuses connections, and on every rank ConfigError where a host has no address for the others,
    or too few descriptors.
    """
    meeting = _Meeting(store, rank, size, within_s)
    doors: list[list[Door]] = [[] for _ in range(_USES)]
    try:
        return _meet(meeting, doors)
    except BaseException:
        for door in (door for use in doors for door in use):
            door.socket.close()
        raise


class _Meeting:
    """The exchange of the ranks' values through the store."""

    def __init__(self, store: Store, rank: int, size: int, within_s: float) -> None:
        self.rank, self.size, self.within_s = rank, size, within_s
        self._store = store
        self._clock = RunningClock()
        with self._asking():
            self._key = f"burst_rt/{store.add(f'burst_rt/{rank}', 1)}"
            if store.add(f"{self._key}/first", 1) == 1:
                store.set(f"{self._key}/secret", secrets.token_hex(SECRET_BYTES))

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self.within_s - self._clock.read())

    def exchange(self, step: str, mine: object) -> list[Any]:
        """The values that all ranks give in this step, by rank. Blocks until all have come."""
        key = f"{self._key}/{step}"
        keys = [f"{key}/{peer}" for peer in range(self.size)]
        with self._asking():
            self._store.set(keys[self.rank], json.dumps(mine))
            if self._store.add(f"{key}/count", 1) == self.size:
                self._store.set(f"{key}/all", "")
        pause_s = _FIRST_PAUSE_S
        while True:
            with self._asking():
                if self._store.check([f"{key}/all"]):
                    return [json.loads(said) for said in self._store.multi_get(keys)]
                if not self.left_s:
                    raise self._stalled([p for p in range(self.size) if not self._has(keys[p])])
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def secret(self) -> bytes:
        """The bytes with which connections of this meeting begin. To be asked for after a step."""
        with self._asking():
            return bytes.fromhex(self._store.get(f"{self._key}/secret").decode())

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _stalled(self, missing: list[int]) -> Stalled:
        return Stalled(
            f"rank {self.rank} of {self.size} waited {self.within_s:g} s in burst_rt.init for the "
            f"other ranks of the group (join_s): ranks {missing} have not come. Every rank of the "
            "group must call burst_rt.init, as often as the others",
            rank=self.rank,
            peer=missing[0] if len(missing) == 1 else None,
            elapsed_s=self.within_s,
        )

    def unreached(self, peer: int, places: Sequence[Place], *, refused: bool) -> BurstError:
        """The error for a rank that cannot be connected to."""
        kind = PeerLost if refused else Stalled
        how = "refuses connections: it has ended, or" if refused else "does not answer: maybe"
        tcp = places[peer].tcp
        return kind(
            f"rank {self.rank} of {self.size}: rank {peer}{f' at {tcp[2]}' if tcp else ''} {how} "
            f"the hosts do not reach each other there (a firewall?); {INTERFACE_VARIABLE} names "
            "the interface to use",
            rank=self.rank,
            peer=peer,
            elapsed_s=None if refused else self.within_s,
        )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Inside, an error is the store's: torch raises RuntimeErrors."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise PeerLost(
                f"rank {self.rank} of {self.size}: the store of the torch.distributed group cannot "
                f"be reached ({error}): the process that keeps it has ended",
                rank=self.rank,
            ) from error


def _meet(meeting: _Meeting, doors: list[list[Door]]) -> tuple[SocketTransport, SocketControl]:
    rank, size = meeting.rank, meeting.size
    host, master = this_host(), os.environ.get("MASTER_ADDR", "")
    hosts = meeting.exchange("host", [host, _resolved(master)])
    tcp: list[tuple[str, int]] = []
    wrong = ""
    try:
        _have_descriptors(_DESCRIPTORS_A_RANK * size)
        tcp = _open(doors, host, master, hosts)
    except (ConfigError, OSError) as error:
        wrong = str(error)  # the others are waiting, and must raise the same
    names = [use[0].name for use in doors] if not wrong else []
    words = meeting.exchange("doors", [host, names, tcp, f"{_process}-{os.getpid()}", wrong])
    for peer, (*_, error_text) in enumerate(words):
        if error_text:
            raise ConfigError(f"init: rank {peer}: {error_text}", rank=rank, peer=peer)
    places = [Place(host, unix, [(a, p) for a, p in tcp]) for host, unix, tcp, *_ in words]
    transport = SocketTransport(rank, size)
    control = SocketControl(rank, size, [process for *_, process, _ in words])
    secret = meeting.secret()

    def links(use: int, receiver: Any) -> Links:
        return Links(rank, doors[use], places, use, secret, receiver)

    transport.open(links(0, transport))
    notices = links(2, control.notices_in)
    control.open(links(1, control.collectives), notices)
    notices.flush(meeting.left_s)
    unreached = [*notices.ended, *notices.unsent]
    if unreached:
        transport.close()
        control.close()
        raise meeting.unreached(unreached[0], places, refused=bool(notices.ended))
    return transport, control


def _open(
    doors: list[list[Door]], host: str, master: str, hosts: Sequence[Sequence[str]]
) -> list[tuple[str, int]]:
    """Opens this rank's doors, and returns the addresses and ports of those for other hosts.

    doors: one list a use, which gets its doors. master: MASTER_ADDR. hosts: of each rank, its host
    and what MASTER_ADDR means there. Raises ConfigError, OSError.
    """
    for use in doors:
        use.append(Door())
    if len({name for name, _ in hosts}) == 1:
        return []
    address = _own_address(master, [seen for name, seen in hosts if name != host])
    for use in doors:
        use.append(Door(address))
    return [(address, use[1].port) for use in doors]


def _have_descriptors(more: int) -> None:
    """Raises this process's limit of open files, if need be. Raises ConfigError."""
    least = more + len(os.listdir("/proc/self/fd")) + _DESCRIPTORS_LEFT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (resource.RLIM_INFINITY, max(soft, least)):
        return
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ConfigError(
            f"connections to all ranks need up to {least:,} open files, and this process may have "
            f"{hard:,}; raise the limit (ulimit -n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))


def _resolved(name: str) -> str:
    """The address of a host by its name; "" where there is none."""
    try:
        return socket.gethostbyname(name) if name else ""
    except OSError:
        return ""


def _own_address(master: str, seen: Sequence[str]) -> str:
    """The address at which ranks of other hosts reach this one. Raises ConfigError.

    It is the address of the interface that `INTERFACE_VARIABLE` names, else of the interface that
    leads to the master. On the master's own host it is the address that the others know the master
    by. master: MASTER_ADDR. seen: what it means on the other hosts.
    """
    interfaces = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    interface = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    if interface:
        if interfaces.get(interface):
            return interfaces[interface][0]
        raise ConfigError(
            f"{INTERFACE_VARIABLE} names the interface {interface!r}, which has no IPv4 address "
            f"here; this host has {sorted(interfaces)}"
        )
    mine = set(chain.from_iterable(interfaces.values()))
    for address in seen:
        if address in mine and not _is_loopback(address):
            return address
    for target in (_resolved(master), *seen):
        if target and not _is_loopback(target):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))  # sends nothing; asks for the route
                address = str(probe.getsockname()[0])
            if not _is_loopback(address):
                return address
    raise ConfigError(
        f"the group has several hosts, and MASTER_ADDR ({master or 'not set'}) does not tell by "
        f"which address they reach this one; set {INTERFACE_VARIABLE} to the network interface "
        "between the hosts"
    )


def _is_loopback(address: str) -> bool:
    return address.startswith("127.")
