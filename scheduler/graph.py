"""Task graphs as plain data, and the builder that derives their edges.

A program adds tasks in order and says what each reads, writes and accumulates into; the edges
follow (read after write, write after read, write after write), as in sequential-task-flow runtimes
(StarPU, PaRSEC). Double buffering is not code anywhere: it is two buffers and the write-after-read
edges between them. Accumulations into one part form a chain in program order, which makes results
bitwise repeatable whatever the timing.

A graph holds names and numbers only: no callable, no tensor. The runner of a graph decides what an
`Operation` means.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise
from typing import NamedTuple, Protocol, TypeAlias

from burst_rt.errors import InputError

__all__ = [
    "COMPUTE", "CONTROL", "DEVICE_LANES", "HOST_LANES", "NCCL_LANES", "NETWORK",
    "Buffer", "Cost", "Graph", "GraphBuilder", "Lane", "Message", "Op", "Operation", "Part", "Task",
]  # fmt: skip


class Cost(NamedTuple):
    """The cost of a task."""

    # Floating-point operations.
    flops: int = 0
    # Bytes moved: on the wire by a transfer, in memory by any other task.
    size_bytes: int = 0
    # The part of `flops` in pieces that a mask cuts through: kernels do them at a lower rate.
    masked_flops: int = 0
    # The part of `flops` for cells along the mask's edge, where kernels also compute hidden cells.
    edge_flops: int = 0


_FREE = Cost()


class Operation(Protocol):
    """The work of a compute task: frozen, hashable data of a type that the graph's runner knows.

    name: what telemetry shows, and what machine files rate.
    """

    @property
    def name(self) -> str: ...


class Op(NamedTuple):
    """An operation of a custom pipeline: its name, and its arguments (plain, hashable data).

    Parts and buffers among the arguments must be among those that the task reads, writes or
    accumulates into; whoever runs the graph hands over what they hold.
    """

    name: str
    args: tuple[Hashable, ...] = ()


class Message(NamedTuple):
    """One message of an exchange: `size_bytes` of part number `part` to or from `peer`.

    offset: where in the part the message begins, in bytes. Messages of one exchange with the same
    peer and tag match in the order they are listed.
    """

    part: int
    peer: int
    tag: int
    size_bytes: int
    offset: int = 0

    @property
    def end(self) -> int:
        """One after the last byte of the part that the message moves."""
        return self.offset + self.size_bytes


class Extent(NamedTuple):
    """Bytes of a part: from `offset` to before `end`."""

    part: int
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of a device or of the network."""

    name: str
    # The hardware runs the tasks in the order in which they were issued (a CUDA stream). Otherwise
    # the lane is free: tasks end one by one, in any order (MPI requests).
    ordered: bool = False
    # Lanes with the same device can wait for each other's events.
    device: int | None = None
    # Tasks are issued strictly in program order, whatever the policy says. An ordered communication
    # lane needs this.
    in_program_order: bool = False
    # Maximum number of tasks that are issued and not done; None: any number.
    max_in_flight: int | None = None


# The lanes of a CPU rank: one task computes at a time, any number of transfers are in progress.
COMPUTE = Lane("compute", max_in_flight=1)
NETWORK = Lane("network")
CONTROL = Lane("control")
HOST_LANES = (COMPUTE, NETWORK, CONTROL)
# The lanes of a rank with a GPU: its compute lane is a stream. Its network lane is a stream with
# NCCL, and a lane of the host otherwise.
_STREAM = Lane("compute", ordered=True, device=0)
DEVICE_LANES = (_STREAM, NETWORK, CONTROL)
NCCL_LANES = (_STREAM, Lane("network", ordered=True, device=0, in_program_order=True), CONTROL)


@dataclass(frozen=True, slots=True)
class Part:
    """One independently tracked piece of a buffer. `id` numbers all parts of a graph."""

    id: int
    buffer: str
    index: int
    size_bytes: int
    initialised: bool

    @property
    def name(self) -> str:
        return f"{self.buffer}[{self.index}]"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Named memory in one or more parts; naming the whole buffer names all its parts."""

    name: str
    parts: tuple[Part, ...]

    def __getitem__(self, index: int) -> Part:
        return self.parts[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One node of a graph: it computes (`op`) or exchanges messages (`sends`, `recvs`).

    id: the task's place in program order. reads, writes, accumulates: ids of parts. hop: the step
    of the ring that the task belongs to, from 0; None: of no step. looks_at: the bytes that an
    operation needs of parts that it reads or accumulates into; it needs the whole of others.
    """

    id: int
    name: str
    lane: str
    op: Operation | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    accumulates: tuple[int, ...]
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    cost: Cost
    hop: int | None = None
    looks_at: tuple[Extent, ...] = ()
    # Follows from the rest, and is asked for whenever a task is issued.
    is_exchange: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_exchange", bool(self.sends or self.recvs))


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All tasks of one rank. `predecessors[t]` and `successors[t]` are the derived edges: ids in
    ascending order, no duplicates.
    """

    rank: int
    world_size: int
    lanes: dict[str, Lane]
    parts: tuple[Part, ...]
    tasks: tuple[Task, ...]
    predecessors: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...] = field(repr=False)
    # Tells the graphs of a process apart, also equal ones.
    number: int = field(init=False, repr=False, compare=False, default_factory=count(1).__next__)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Ranks this one exchanges messages with, ascending."""
        return tuple(sorted({m.peer for task in self.tasks for m in (*task.sends, *task.recvs)}))

    @cached_property
    def network_lanes(self) -> frozenset[str]:
        """Lanes that exchanges run on."""
        return frozenset(task.lane for task in self.tasks if task.is_exchange)

    @cached_property
    def has_ordered_lanes(self) -> bool:
        """Whether some lane is ordered."""
        return any(lane.ordered for lane in self.lanes.values())

    @cached_property
    def network_kinds(self) -> frozenset[bool]:
        """The values of `Lane.ordered` among the lanes that exchanges run on."""
        return frozenset(self.lanes[lane].ordered for lane in self.network_lanes)

    @cached_property
    def written(self) -> frozenset[int]:
        """Parts that some task writes or accumulates into."""
        return frozenset(part for task in self.tasks for part in (*task.writes, *task.accumulates))

    @cached_property
    def slots(self) -> tuple[Part, ...]:
        """The parts that hold nothing at the start and are written. A run needs memory for them in
        addition to the memory that is bound to it.
        """
        return tuple(
            part
            for part in self.parts
            if part.id in self.written and part.size_bytes and not part.initialised
        )

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends."""
        return sum(m.size_bytes for task in self.tasks for m in task.sends)

    @cached_property
    def sent(self) -> frozenset[int]:
        """Parts that some message sends."""
        return frozenset(m.part for task in self.tasks for m in task.sends)


def overlap(messages: Iterable[Message]) -> bool:
    """Whether two of the messages move the same bytes of a part."""
    by_place = sorted((m.part, m.offset, m.end) for m in messages)
    return any(a[0] == b[0] and a[2] > b[1] for a, b in pairwise(by_place))


_Access: TypeAlias = "Buffer | Part"
_Send: TypeAlias = "tuple[_Access, int] | tuple[_Access, int, int] | tuple[_Access, int, int, int]"


class GraphBuilder:
    """Builds the graph of one rank from tasks given in program order.

    Worked example, a ring step with a double buffer: tile 1 may not start before the exchange has
    filled kv1, and a later exchange that receives into kv0 will wait for tile 0 and for the send of
    kv0.

        g = GraphBuilder(rank=2, world_size=4)
        kv = [g.buffer("kv0", size_bytes=n, initialised=True), g.buffer("kv1", size_bytes=n)]
        out = g.buffer("out", size_bytes=n, initialised=True)
        g.exchange("hop 0", sends=[(kv[0], 3)], recvs=[(kv[1], 1)], tag=0)
        g.compute("tile 0", Op("tile", (0,)), reads=[kv[0]], accumulates=[out])
        g.compute("tile 1", Op("tile", (1,)), reads=[kv[1]], accumulates=[out])
        graph = g.build()
    """

    def __init__(self, rank: int, world_size: int, lanes: Sequence[Lane] = HOST_LANES) -> None:
        if not 0 <= rank < world_size:
            raise InputError(
                f"GraphBuilder: rank must be in [0, world_size), got rank {rank} of {world_size}"
            )
        self.rank = rank
        self.world_size = world_size
        self._lanes = {lane.name: lane for lane in lanes}
        self._parts: list[Part] = []
        self._buffers: dict[str, Buffer] = {}
        self._tasks: list[Task] = []
        self._predecessors: list[tuple[int, ...]] = []
        self._last_writer: list[int] = []
        self._readers: list[list[int]] = []

    def buffer(
        self,
        name: str,
        *,
        parts: int = 1,
        size_bytes: int | Sequence[int] = 0,
        initialised: bool = False,
    ) -> Buffer:
        """Declares memory. size_bytes: of each part, one number for all or one for each.
        initialised: the memory holds data at the start.
        """
        if name in self._buffers:
            raise InputError(
                f"GraphBuilder.buffer: the name {name!r} is taken; give every buffer its own name"
            )
        sizes = [size_bytes] * parts if isinstance(size_bytes, int) else list(size_bytes)
        if len(sizes) != parts or parts < 1 or min(sizes) < 0:
            raise InputError(
                f"GraphBuilder.buffer {name!r}: expected {parts} part sizes of at least 0 bytes, "
                f"got {sizes}"
            )
        new = tuple(
            Part(len(self._parts) + i, name, i, size, initialised) for i, size in enumerate(sizes)
        )
        self._parts.extend(new)
        self._last_writer.extend([-1] * parts)
        self._readers.extend([] for _ in range(parts))
        self._buffers[name] = Buffer(name, new)
        return self._buffers[name]

    def compute(
        self,
        name: str,
        op: Operation | str,
        *,
        reads: Iterable[_Access] = (),
        writes: Iterable[_Access] = (),
        accumulates: Iterable[_Access] = (),
        cost: Cost = _FREE,
        lane: str = COMPUTE.name,
        hop: int | None = None,
        looks_at: Iterable[tuple[Part, int, int]] = (),
    ) -> int:
        """Adds a task that performs `op`; returns its id. `accumulates` is a read and a write.

        Tasks that accumulate into one part run in the order in which they are added. cost: what the
        task takes; of the tasks that are ready, those on the longest path come first. lane: one of
        the builder's lanes. hop: see `Task`.

        op: a name alone means an `Op` whose arguments are what the task reads, then what it writes,
        then what it accumulates into.
        looks_at: (part, size_bytes, offset) of parts that the task reads or accumulates into
        without needing all of them: the verifier then wants no more bytes to have come.
        """
        reads, writes, accumulates = tuple(reads), tuple(writes), tuple(accumulates)
        if isinstance(op, str):
            op = Op(op, (*reads, *writes, *accumulates))
        if isinstance(op, Op) and not isinstance(op.args, tuple):
            raise InputError(
                f"GraphBuilder.compute {name!r}: the arguments of {op.name!r} must be a tuple, got "
                f"{op.args!r}; write Op({op.name!r}, (argument,)), with a comma"
            )
        return self._add(
            Task(
                id=len(self._tasks),
                name=name,
                lane=lane,
                op=op,
                reads=self._ids(reads),
                writes=self._ids(writes),
                accumulates=self._ids(accumulates),
                sends=(),
                recvs=(),
                cost=cost,
                hop=hop,
                looks_at=tuple(Extent(p.id, at, at + size) for p, size, at in looks_at),
            )
        )

    def exchange(
        self,
        name: str,
        *,
        sends: Iterable[_Send] = (),
        recvs: Iterable[_Send] = (),
        tag: int,
        reads: Iterable[_Access] = (),
        lane: str = NETWORK.name,
        hop: int | None = None,
    ) -> int:
        """Adds one transfer task whose messages progress together; returns its id.

        Each message is (part or one-part buffer, peer), (part, peer, size_bytes) or (part, peer,
        size_bytes, offset); without a size the whole part travels, without an offset (in bytes) its
        beginning. Messages may be received into one part where they do not overlap.

        tag: the same at both sides of a message. Each exchange of a rank has its own tag with each
        peer. reads: parts that must be ready before the exchange begins; the parts that it sends
        need not be named. hop: see `Task`.
        """
        outgoing = tuple(self._message(name, send, tag) for send in sends)
        incoming = tuple(self._message(name, recv, tag) for recv in recvs)
        if not outgoing and not incoming:
            raise InputError(
                f"GraphBuilder.exchange {name!r}: expected at least one send or receive, got none"
            )
        # A part may be named by several messages (sent to two peers): an edge needs it once.
        read = tuple(dict.fromkeys([*self._ids(reads), *(m.part for m in outgoing)]))
        written = tuple(dict.fromkeys(m.part for m in incoming))
        if overlap(incoming) or set(written) & set(read):
            raise InputError(
                f"GraphBuilder.exchange {name!r}: a part is received twice, or sent and received, "
                "in one exchange; receive into another buffer (a second slot)"
            )
        return self._add(
            Task(
                id=len(self._tasks),
                name=name,
                lane=lane,
                op=None,
                reads=read,
                writes=written,
                accumulates=(),
                sends=outgoing,
                recvs=incoming,
                cost=Cost(0, sum(m.size_bytes for m in outgoing)),
                hop=hop,
            )
        )

    def insert(
        self,
        tasks: Iterable[Task],
        parts: Sequence[Part],
        *,
        first_tag: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Adds tasks of another graph, which its own builder has checked.

        parts: of this builder, in place of the parts of the other graph, in their order, at least
        as large. first_tag: is added to the tags of messages. ranks: the numbers that the other
        graph's ranks have in this one; None: the same.
        """
        peers = ranks or range(self.world_size)
        number = [part.id for part in parts]

        def moved(messages: tuple[Message, ...]) -> tuple[Message, ...]:
            return tuple(
                Message(number[m.part], peers[m.peer], m.tag + first_tag, m.size_bytes, m.offset)
                for m in messages
            )

        for task in tasks:
            accesses = (task.reads, task.writes, task.accumulates)
            reads, writes, accumulates = (
                tuple(dict.fromkeys([number[part] for part in access])) for access in accesses
            )
            self._add(
                Task(
                    id=len(self._tasks), name=task.name, lane=task.lane, op=task.op, reads=reads,
                    writes=writes, accumulates=accumulates, sends=moved(task.sends),
                    recvs=moved(task.recvs), cost=task.cost, hop=task.hop,
                    looks_at=tuple(x._replace(part=number[x.part]) for x in task.looks_at),
                )
            )  # fmt: skip

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """The buffers that have been declared so far, by name."""
        return self._buffers

    def build(self) -> Graph:
        """Freezes the graph; the builder may go on being used."""
        successors: list[list[int]] = [[] for _ in self._tasks]
        for task, before in enumerate(self._predecessors):
            for other in before:
                successors[other].append(task)
        return Graph(
            rank=self.rank,
            world_size=self.world_size,
            lanes=dict(self._lanes),
            parts=tuple(self._parts),
            tasks=tuple(self._tasks),
            predecessors=tuple(self._predecessors),
            successors=tuple(map(tuple, successors)),
        )

    def _ids(self, accesses: Iterable[_Access]) -> tuple[int, ...]:
        ids: dict[int, None] = {}
        for access in accesses:
            for part in access.parts if isinstance(access, Buffer) else (access,):
                if part.id >= len(self._parts) or self._parts[part.id] is not part:
                    raise InputError(
                        f"GraphBuilder: {part.name} belongs to another builder; declare it with "
                        "this one's `buffer`"
                    )
                ids[part.id] = None
        return tuple(ids)

    def _message(self, name: str, spec: _Send, tag: int) -> Message:
        access, peer = spec[0], spec[1]
        ids = self._ids([access])
        if len(ids) != 1:
            raise InputError(
                f"GraphBuilder.exchange {name!r}: a message carries one part, got a buffer of "
                f"{len(ids)} parts; name one part in each message"
            )
        part = self._parts[ids[0]]
        if part.size_bytes == 0:
            raise InputError(
                f"GraphBuilder.exchange {name!r}: {part.name} is sent or received, so it must have "
                f"a size; declare it with g.buffer({part.buffer!r}, size_bytes=...)"
            )
        size = spec[2] if len(spec) > 2 else part.size_bytes
        offset = spec[3] if len(spec) > 3 else 0
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise InputError(
                f"GraphBuilder.exchange {name!r}: peer must be another rank in [0, "
                f"{self.world_size}), got {peer}"
            )
        limit = part.size_bytes
        if size < 1 or offset < 0 or offset + size > limit:
            where = f" from byte {offset} on" if offset else ""
            raise InputError(
                f"GraphBuilder.exchange {name!r}: a message must be 1 to {limit} bytes (its part's "
                f"size), got {size}{where}"
            )
        if tag < 0:
            raise InputError(
                f"GraphBuilder.exchange {name!r}: a tag is a non-negative integer, got {tag}"
            )
        return Message(ids[0], peer, tag, size, offset)

    def _add(self, task: Task) -> int:
        if task.lane not in self._lanes:
            raise InputError(
                f"GraphBuilder: the lane of task {task.name!r} must be one of "
                f"{sorted(self._lanes)}, got {task.lane!r}"
            )
        before: set[int] = set()
        for part in (*task.reads, *task.accumulates):
            before.add(self._last_writer[part])
        for part in (*task.writes, *task.accumulates):
            # After every reader of the last value; after the last writer only if nobody read in
            # between (they are after it already).
            before.update(self._readers[part] or (self._last_writer[part],))
        for part in task.reads:
            self._readers[part].append(task.id)
        for part in (*task.writes, *task.accumulates):
            self._last_writer[part] = task.id
            self._readers[part] = []
        before -= {-1, task.id}
        self._tasks.append(task)
        self._predecessors.append(tuple(sorted(before)))
        return task.id
