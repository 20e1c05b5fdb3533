"""Staging, a lowering of the graph: device memory goes as copies and messages of host chunks.

`staged(graph)` is the same graph with every exchange of device memory replaced by chunks. On the
sending side a chunk is a copy to a pinned chunk of the host (lane `d2h`) and a message out of that
chunk; on the receiving side it is a message into a chunk and a copy to the device (lane `h2d`).
There are few chunks, used in turn, so that copies and messages of neighbouring chunks overlap. The
graph's derived edges keep a chunk from being overwritten too early, and the verifier, the trace and
the simulator see every copy and message.

    exchange "hop 0": send k, receive k1      becomes, for each chunk i
        d2h  "hop 0 d2h i"    reads k, writes out[i % 2]
                              ToHost: copies k, from offset on, to out[i % 2]
        net  "hop 0 out i"    sends out[i % 2]
        net  "hop 0 in i"     receives in[i % 2]
        h2d  "hop 0 h2d i"    reads in[i % 2], writes k1
                              ToDevice: copies in[i % 2] to k1, from offset on

Parts keep their numbers; the chunks' parts come after them. Both sides cut a message at the same
places, so that the chunks' tags are the same on both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, groupby, zip_longest
from typing import ClassVar, NamedTuple

from burst_rt.errors import ConfigError
from burst_rt.scheduler import Cost, Graph, GraphBuilder, Lane, Message, Part, Task

__all__ = ["CHUNK_BYTES", "COPY_LANES", "ToDevice", "ToHost", "stage_graph"]

# Maximum size of a chunk: large enough for PCIe and the wire to run at full speed, small enough
# that a message of a few dozen MiB has several.
CHUNK_BYTES = 4 << 20
# Maximum number of chunks of one message, unless `chunk_bytes` is given: a longer message has
# larger chunks. Graphs grow with the number of chunks and gain nothing from more.
_CHUNKS_OF_A_MESSAGE = 32
# Number of chunks each way: one is copied while the other is on the wire.
_NUM_CHUNKS = 2
# Maximum number of chunks of one tag's messages to one peer: a chunk's tag is tag * _TAG_ROOM +
# number.
_TAG_ROOM = 4096


@dataclass(frozen=True, kw_only=True)
class ToHost:
    """Copies `size_bytes` of a part, from `offset` on, to the beginning of a chunk."""

    part: int  # number of the part that is read
    offset: int
    size_bytes: int
    chunk: int  # number of the part that is written
    name: ClassVar[str] = "to host"


@dataclass(frozen=True, kw_only=True)
class ToDevice:
    """Copies the beginning of a chunk to `size_bytes` of a part, from `offset` on."""

    part: int  # number of the part that is written
    offset: int
    size_bytes: int
    chunk: int  # number of the part that is read
    name: ClassVar[str] = "to device"


COPY_LANES = (Lane("d2h", ordered=True, device=0), Lane("h2d", ordered=True, device=0))
_HOST_COPY_LANES = (Lane("d2h"), Lane("h2d"))


class _Chunk(NamedTuple):
    """A piece of the message that carries the part `part`."""

    part: int
    offset: int
    size_bytes: int
    peer: int
    tag: int


def stage_graph(graph: Graph, chunk_bytes: int | None = None) -> Graph:
    """The graph with its exchanges staged through host chunks of at most `chunk_bytes`. Pure.

    chunk_bytes: None takes CHUNK_BYTES, or a 32nd of the message where that is more. Where the
    graph's compute lane is a stream, the copies are on streams of their own; otherwise (host memory
    in place of a device) they are tasks of the host. Raises ConfigError where the messages of one
    tag to one peer are more than 4,096 chunks.
    """

    def chunk(size_bytes: int) -> int:
        # The size depends on this message alone: both sides must cut it alike.
        return chunk_bytes or max(CHUNK_BYTES, -(-size_bytes // _CHUNKS_OF_A_MESSAGE))

    sizes: Counter[tuple[bool, int, int]] = Counter()
    largest = 0
    for task in graph.tasks:
        for received, messages in enumerate((task.sends, task.recvs)):
            for m in messages:
                sizes[bool(received), m.peer, m.tag] += -(-m.size_bytes // chunk(m.size_bytes))
                largest = max(largest, min(m.size_bytes, chunk(m.size_bytes)))
    if largest == 0:
        return graph
    most = max(sizes.values())
    if most > _TAG_ROOM:
        raise ConfigError(
            f"staged: the messages of one tag to one rank are cut into {most:,} chunks, at most "
            f"{_TAG_ROOM:,} are possible; use a layout of fewer runs, NCCL, or an MPI that takes "
            "device memory (see `burst-rt doctor`)"
        )
    return _Staging(graph, chunk, largest).build()


class _Staging:
    """Builds the staged graph of one rank, task by task."""

    def __init__(self, graph: Graph, chunk: Callable[[int], int], largest: int) -> None:
        self.graph, self.chunk = graph, chunk
        lanes = COPY_LANES if graph.lanes["compute"].ordered else _HOST_COPY_LANES
        self.g = GraphBuilder(graph.rank, graph.world_size, [*graph.lanes.values(), *lanes])
        self.parts: list[Part] = []
        for name, parts in groupby(graph.parts, lambda part: part.buffer):
            own = list(parts)
            sizes = [part.size_bytes for part in own]
            self.parts += self.g.buffer(
                name, parts=len(own), size_bytes=sizes, initialised=own[0].initialised
            ).parts
        self.out, self.into = self._in_turn("out", largest), self._in_turn("in", largest)
        self.num_chunks: Counter[tuple[str, int, int]] = Counter()

    def build(self) -> Graph:
        for task in self.graph.tasks:
            if task.is_exchange:
                self._exchange(task)
                continue
            assert task.op is not None
            self.g.compute(
                task.name,
                task.op,
                reads=self._parts(task.reads),
                writes=self._parts(task.writes),
                accumulates=self._parts(task.accumulates),
                cost=task.cost,
                lane=task.lane,
                hop=task.hop,
                looks_at=[(self.parts[x.part], x.end - x.offset, x.offset) for x in task.looks_at],
            )
        return self.g.build()

    def _in_turn(self, way: str, size_bytes: int) -> Iterator[Part]:
        """The chunks of one direction, which are used in turn."""
        chunks = (
            self.g.buffer(f"{way} chunk {i}", size_bytes=size_bytes) for i in range(_NUM_CHUNKS)
        )
        return cycle([chunk[0] for chunk in chunks])

    def _parts(self, ids: Iterable[int]) -> list[Part]:
        return [self.parts[i] for i in ids]

    def _exchange(self, task: Task) -> None:
        g, lane = self.g, task.lane
        sent = {m.part for m in task.sends}
        also = self._parts(i for i in task.reads if i not in sent)
        for i, (out, into) in enumerate(
            zip_longest(self._chunks("out", task.sends), self._chunks("in", task.recvs))
        ):
            if out:
                chunk, whole, size = next(self.out), self.parts[out.part], out.size_bytes
                op = ToHost(part=whole.id, offset=out.offset, size_bytes=size, chunk=chunk.id)
                g.compute(
                    f"{task.name} d2h {i}",
                    op,
                    reads=[whole],
                    writes=[chunk],
                    cost=Cost(0, size),
                    lane="d2h",
                    hop=task.hop,
                    looks_at=[(whole, size, out.offset)],
                )
                g.exchange(
                    f"{task.name} out {i}",
                    sends=[(chunk, out.peer, size)],
                    tag=out.tag,
                    reads=also,
                    lane=lane,
                    hop=task.hop,
                )
            if into:
                chunk, whole, size = next(self.into), self.parts[into.part], into.size_bytes
                back = ToDevice(part=whole.id, offset=into.offset, size_bytes=size, chunk=chunk.id)
                g.exchange(
                    f"{task.name} in {i}",
                    recvs=[(chunk, into.peer, size)],
                    tag=into.tag,
                    reads=also,
                    lane=lane,
                    hop=task.hop,
                )
                g.compute(
                    f"{task.name} h2d {i}",
                    back,
                    reads=[chunk],
                    writes=[whole],
                    cost=Cost(0, size),
                    lane="h2d",
                    hop=task.hop,
                    looks_at=[(chunk, size, 0)],
                )

    def _chunks(self, way: str, messages: tuple[Message, ...]) -> Iterator[_Chunk]:
        for m in messages:
            step = self.chunk(m.size_bytes)
            for offset in range(m.offset, m.end, step):
                number = self.num_chunks[way, m.peer, m.tag]
                self.num_chunks[way, m.peer, m.tag] += 1
                size, tag = min(step, m.end - offset), m.tag * _TAG_ROOM + number
                yield _Chunk(m.part, offset, size, m.peer, tag)
