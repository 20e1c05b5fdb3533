"""A machine as the simulator sees it: rates of its devices, links, and what messages share.

Machine files are read and written elsewhere (`burst_rt.planning.machines`). Every nominal rate has
an `efficiency`, the fraction of it that real work reaches. Measuring a machine changes the
efficiency; the nominal rate stays what the data sheet says.

Resources that a rank's transfers pass; all transfers on a resource share it in equal parts:

    to a rank of its node     its link out, the switch (both, if they differ), the other's link in
    to another node           its way to the host out, its switch, its NIC out;
                              there NIC in, switch, way in
    to or from its own host   its way to the host, its switch
    from host to host         in a node the host's memory; between nodes the two NICs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from burst_rt.scheduler.graph import Cost, Task

__all__ = ["Device", "Duplex", "Hardware", "Link", "Nics", "Node", "Rate", "Switch"]

# full: each direction has its own bytes_per_s; half: both share it.
Duplex: TypeAlias = Literal["full", "half"]


@dataclass(frozen=True)
class Rate:
    """The speed of an operation, which takes launch_s + (flops / flops_per_s + bytes / bytes_per_s)
    / efficiency seconds.

    None: its flops, or its bytes, take no time. masked: operations under a mask go at this fraction
    of the rate of others (None: as fast). edge: each operation along a mask's edge takes as long as
    this many more (None: no more).
    """

    launch_s: float
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    efficiency: float = 1.0
    masked: float | None = None
    edge: float | None = None

    def seconds(self, cost: Cost) -> float:
        """Seconds a task of this cost takes."""
        flops = (
            cost.flops
            + (cost.masked_flops * (1 / self.masked - 1) if self.masked else 0.0)
            + cost.edge_flops * (self.edge or 0.0)
        )
        arithmetic = flops / self.flops_per_s if self.flops_per_s else 0.0
        memory = cost.size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return self.launch_s + (arithmetic + memory) / self.efficiency


@dataclass(frozen=True)
class Device:
    """The processor on which a rank computes.

    rates: by the operation's name ("forward" and "backward" are tiles of attention, "linear" matrix
    products). Other operations with arithmetic also take the rate "linear", if it is given; the
    rest take "default". If a program has its own kernel, "forward-untiled" takes precedence over
    "forward".
    """

    memory_bytes: int
    rates: Mapping[str, Rate]

    def seconds(self, task: Task, kernel: str | None = None) -> float:
        """Seconds the device takes for a task that has it to itself. kernel: the one that belongs
        to the program, if one does.
        """
        name = "" if task.op is None else task.op.name
        names = (f"{name}-{kernel}", name, *(["linear"] if task.cost.flops else []), "default")
        return next(self.rates[name] for name in names if name in self.rates).seconds(task.cost)


@dataclass(frozen=True)
class Link:
    """A way for messages: each takes latency_s, then its bytes at its share of bytes_per_s *
    efficiency (of one direction).

    work_byte_s: seconds of computing that a byte takes from each of its two ranks, where the host's
    cores or the device's own move it; None: none.
    """

    latency_s: float
    bytes_per_s: float
    efficiency: float
    duplex: Duplex
    work_byte_s: float | None = None


@dataclass(frozen=True)
class Switch:
    """A switch that groups of `ranks` neighbouring ranks share (a PCIe root or switch): bytes_per_s
    * efficiency for all transfers through it.
    """

    ranks: int
    bytes_per_s: float
    efficiency: float


@dataclass(frozen=True)
class Node:
    """One host: its ranks and what lies between them.

    link: a rank's way to the others of its node. host_link: its way to the host's memory and the
    NICs; None: the same as `link`. host_memory: what messages between two host memories of the node
    share; None: they take `link`. cores: compute tasks of the node's ranks share this many, one
    each at most; None: every rank has a device of its own.
    """

    ranks: int
    link: Link
    cores: int | None = None
    switch: Switch | None = None
    host_link: Link | None = None
    host_memory: Link | None = None


@dataclass(frozen=True)
class Nics:
    """The network cards of a node, `count` of them, dealt out to its ranks in neighbouring
    groups.
    """

    count: int
    link: Link


@dataclass(frozen=True)
class Hardware:
    """A machine: equal nodes of equal devices. nics: None for a machine of one node."""

    name: str
    device: Device
    node: Node
    nics: Nics | None = None

    def folded(self) -> Hardware | None:
        """The machine of a simulation that has one rank for each node, whose ranks all do the same
        at the same time; None where they share more than cards. See `Rotated`.
        """
        node, nics = self.node, self.nics
        if node.switch or node.cores or node.host_memory or nics is None:
            return None
        if node.link.work_byte_s or nics.link.work_byte_s:
            return None
        share = nics.link.bytes_per_s * nics.count / node.ranks
        link = replace(nics.link, bytes_per_s=min(share, nics.link.bytes_per_s))
        return replace(self, node=replace(node, ranks=1), nics=Nics(1, link))
