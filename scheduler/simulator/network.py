"""What transfers share: resources, the flows on them, and the resources between two ranks.

A resource divides its bandwidth equally among the flows on it; a flow goes at the least of its
shares. A share that a flow cannot use because another resource limits it is not given to the other
flows. Thus a flow's rate depends only on its own resources, and a world of a thousand ranks needs
no global solution each time a transfer ends. If all flows on a resource are equal, as in a ring,
both rules give the same rates. Cores are a resource too. Their capacity is seconds of work per
second, and a task uses at most one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from burst_rt.errors import InputError
from burst_rt.scheduler.simulator.hardware import Hardware, Link, Node

__all__ = ["Flow", "Network", "Path", "Resource", "Traffic"]


class Resource:
    """Something that flows share. `share`: what each flow on it gets now, in units a second."""

    __slots__ = ("flows", "per_s", "share")

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self.share = per_s
        self.flows: dict[Flow, None] = {}


class Flow:
    """Something under way: `left` units at `rate` since `since_s`, over its resources; never faster
    than `limit`.

    number: numbers all flows of a run. owner: the rank and task it counts as; a message is its
    receiver's. version: how often its rate has changed, so that an end foreseen earlier can be told
    from the last.
    """

    __slots__ = (
        "left",
        "limit",
        "number",
        "owner",
        "rate",
        "resources",
        "seen",
        "since_s",
        "version",
    )

    def __init__(
        self,
        number: int,
        owner: tuple[int, int],
        amount: float,
        resources: tuple[Resource, ...],
        limit: float = float("inf"),
    ) -> None:
        self.number = number
        self.owner = owner
        self.left = amount
        self.resources = resources
        self.limit = limit
        self.rate = 0.0
        self.since_s = 0.0
        self.version = 0
        self.seen = 0


class Traffic:
    """All flows under way. `join` and `leave` note the resources that changed; `settle` then works
    out the new rates of one instant.
    """

    def __init__(self) -> None:
        self.changed: dict[Resource, None] = {}
        self._round = 0

    def join(self, flow: Flow) -> None:
        """The flow starts."""
        for resource in flow.resources:
            flows = resource.flows
            flows[flow] = None
            resource.share = resource.per_s / len(flows)
            self.changed[resource] = None

    def leave(self, flow: Flow) -> None:
        """The flow has ended, or is given up."""
        for resource in flow.resources:
            flows = resource.flows
            del flows[flow]
            if flows:
                resource.share = resource.per_s / len(flows)
                self.changed[resource] = None

    def settle(self, now_s: float) -> list[Flow]:
        """Brings all rates up to date; returns the flows whose rate is a new one, each with its new
        version.
        """
        self._round = stamp = self._round + 1
        faster_or_slower = []
        for resource in self.changed:
            for flow in resource.flows:
                if flow.seen == stamp:
                    continue
                flow.seen = stamp
                rate = flow.limit
                for one in flow.resources:
                    if one.share < rate:
                        rate = one.share
                if rate != flow.rate:
                    flow.left = max(0.0, flow.left - (now_s - flow.since_s) * flow.rate)
                    flow.since_s = now_s
                    flow.rate = rate
                    flow.version += 1
                    faster_or_slower.append(flow)
        self.changed.clear()
        return faster_or_slower


# Seconds before the first byte, and what the bytes pass.
Path: TypeAlias = tuple[float, tuple[Resource, ...]]


class Network:
    """The resources of a machine with `world_size` ranks, node after node. Raises InputError where
    the machine has no way between nodes.
    """

    def __init__(self, hardware: Hardware, world_size: int) -> None:
        node, nics = hardware.node, hardware.nics
        num_nodes = -(-world_size // node.ranks)
        if num_nodes > 1 and nics is None:
            raise InputError(
                f"simulate: {world_size} ranks on {hardware.name!r} need {num_nodes} nodes of "
                f"{node.ranks} ranks, but the machine file has no [nics]; add [nics], or simulate "
                f"at most {node.ranks} ranks"
            )
        self._hardware = hardware
        self._links = [_both_ways(node.link) for _ in range(world_size)]
        self._host_links = (
            self._links
            if node.host_link is None
            else [_both_ways(node.host_link) for _ in range(world_size)]
        )
        self._host_memory = [
            None if node.host_memory is None else _both_ways(node.host_memory)
            for _ in range(num_nodes)
        ]
        links = [node.link, *([nics.link] if nics is not None and num_nodes > 1 else [])]
        # Whether messages take time from computing.
        self.working = any(link.work_byte_s for link in links)
        # By rank.
        self._cores: list[Resource | None]
        if node.cores is not None:
            of_nodes = [Resource(node.cores) for _ in range(num_nodes)]
            self._cores = [of_nodes[rank // node.ranks] for rank in range(world_size)]
        else:
            self._cores = [Resource(1.0) if self.working else None for _ in range(world_size)]
        self._switch_of = _switches(node, world_size)
        self._nics = (
            [] if nics is None else [_both_ways(nics.link) for _ in range(num_nodes * nics.count)]
        )
        self._paths: dict[tuple[int, int, bool], Path] = {}
        farthest = nics.link if nics is not None and num_nodes > 1 else node.link
        # An allreduce of a few bytes by recursive doubling.
        self.agree_s = (world_size - 1).bit_length() * farthest.latency_s

    def between(self, source: int, destination: int, staged: bool) -> Path:
        """The path of a message between two ranks' devices, or where `staged` between their
        hosts.
        """
        key = source, destination, staged
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = self._find(source, destination, staged)
        return path

    def to_or_from_host(self, rank: int, to_host: bool) -> Path:
        """The path of a copy between a rank's device and its host."""
        node = self._hardware.node
        out, into = self._host_links[rank]
        return (node.host_link or node.link).latency_s, _once(
            [out if to_host else into, *self._switch_of[rank]]
        )

    def cores(self, rank: int) -> Resource | None:
        """What the rank's compute tasks share with others of its node and with messages, or
        None.
        """
        return self._cores[rank]

    def work_byte_s(self, source: int, destination: int) -> float:
        """Seconds of computing that a byte takes from each of two ranks."""
        node, nics = self._hardware.node, self._hardware.nics
        apart = source // node.ranks != destination // node.ranks
        return (nics.link if nics is not None and apart else node.link).work_byte_s or 0.0

    def _find(self, source: int, destination: int, staged: bool) -> Path:
        node = self._hardware.node
        host, other_host = source // node.ranks, destination // node.ranks
        if host == other_host:
            memory = self._host_memory[host]
            if staged and memory is not None and node.host_memory is not None:
                return node.host_memory.latency_s, memory[:1]
            switches = self._switch_of[source] + self._switch_of[destination]
            return node.link.latency_s, _once(
                [self._links[source][0], *switches, self._links[destination][1]]
            )
        assert self._hardware.nics is not None
        cards = [self._nic(source)[0], self._nic(destination)[1]]
        latency_s = self._hardware.nics.link.latency_s
        if staged:
            return latency_s, _once(cards)
        out, into = self._host_links[source][0], self._host_links[destination][1]
        return latency_s, _once(
            [out, *self._switch_of[source], *cards, *self._switch_of[destination], into]
        )

    def _nic(self, rank: int) -> tuple[Resource, Resource]:
        node, nics = self._hardware.node, self._hardware.nics
        assert nics is not None
        return self._nics[
            rank // node.ranks * nics.count + rank % node.ranks * nics.count // node.ranks
        ]


def _switches(node: Node, world_size: int) -> list[tuple[Resource, ...]]:
    """The switch that each rank's transfers pass; none where nodes have none."""
    switch = node.switch
    if switch is None:
        return [()] * world_size
    groups = -(-node.ranks // switch.ranks)
    num_nodes = -(-world_size // node.ranks)
    switches = [Resource(switch.bytes_per_s * switch.efficiency) for _ in range(num_nodes * groups)]
    return [
        (switches[rank // node.ranks * groups + rank % node.ranks // switch.ranks],)
        for rank in range(world_size)
    ]


def _both_ways(link: Link) -> tuple[Resource, Resource]:
    """A link's way out and its way in: one and the same where it is half duplex."""
    out = Resource(link.bytes_per_s * link.efficiency)
    return out, out if link.duplex == "half" else Resource(link.bytes_per_s * link.efficiency)


def _once(resources: Iterable[Resource]) -> tuple[Resource, ...]:
    return tuple(dict.fromkeys(resources))
