"""The verifier: each planted fault is caught, by name, in a world that passes without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from graphs import check_shares
from hypothesis import event, given, settings
from hypothesis import strategies as st

from burst_rt.errors import InternalError
from burst_rt.scheduler import (
    COMPUTE,
    CONTROL,
    Graph,
    GraphBuilder,
    Lane,
    Message,
    Op,
    Task,
    Transfer,
    check_graph,
    check_share,
    check_world,
    match_messages,
)
from burst_rt.scheduler.graph import Extent
from burst_rt.scheduler.verify import Endpoint

_FREE = Lane("network")
# A stream of a device: NCCL on it matches messages by their order alone.
_ORDERED = Lane("network", ordered=True, device=0, in_program_order=True)
_WORK = Op("work")
_BYTES = 8


def _builder(rank: int, world_size: int, network: Lane) -> GraphBuilder:
    return GraphBuilder(rank, world_size, (COMPUTE, network, CONTROL))


def _ring_rank(rank: int, world_size: int, network: Lane) -> Graph:
    """Two slots, a tile each hop: what strategies build, in small. Tasks: x0 t0 x1 t1 ... ; tags
    are hops.
    """
    g = _builder(rank, world_size, network)
    own = g.buffer("own", size_bytes=_BYTES, initialised=True)
    slots = [g.buffer(f"slot{i}", size_bytes=_BYTES) for i in range(2)]
    out = g.buffer("out", size_bytes=_BYTES, initialised=True)
    for hop in range(world_size):
        here = slots[hop % 2] if hop else own
        if hop + 1 < world_size:
            left, right = (rank - 1) % world_size, (rank + 1) % world_size
            g.exchange(
                f"hop {hop}", sends=[(here, right)], recvs=[(slots[(hop + 1) % 2], left)], tag=hop
            )
        g.compute(f"tile {hop}", _WORK, reads=[here], accumulates=[out])
    return g.build()


def _ring(world_size: int, network: Lane = _FREE) -> list[Graph]:
    return [_ring_rank(rank, world_size, network) for rank in range(world_size)]


def _two_messages(network: Lane) -> list[Graph]:
    """Rank 0 sends two parts of one size to rank 1, an exchange each."""
    graphs = []
    for rank in range(2):
        g = _builder(rank, 2, network)
        buffer = g.buffer("b", parts=2, size_bytes=_BYTES, initialised=rank == 0)
        for i in range(2):
            message = [(buffer[i], 1 - rank)]
            g.exchange(f"m{i}", sends=() if rank else message, recvs=message if rank else (), tag=i)
        graphs.append(g.build())
    return graphs


def _one_exchange() -> list[Graph]:
    """Rank 0 sends a small and a large part to rank 1, in one exchange and with one tag."""
    graphs = []
    for rank in range(2):
        g = _builder(rank, 2, _FREE)
        small = g.buffer("small", size_bytes=4, initialised=True)
        large = g.buffer("large", size_bytes=16, initialised=True)
        messages = [(small, 1 - rank), (large, 1 - rank)]
        g.exchange("all", sends=() if rank else messages, recvs=messages if rank else (), tag=5)
        graphs.append(g.build())
    return graphs


def _apart(network: Lane, *, together: bool) -> list[Graph]:
    """Both ranks send to and receive from each other: in one exchange, or the send in one and the
    receive in the next.
    """
    graphs = []
    for rank in range(2):
        g = _builder(rank, 2, network)
        out = g.buffer("out", size_bytes=_BYTES, initialised=True)
        slot = g.buffer("slot", size_bytes=_BYTES)
        if together:
            g.exchange("both", sends=[(out, 1 - rank)], recvs=[(slot, 1 - rank)], tag=0)
        else:
            g.exchange("send", sends=[(out, 1 - rank)], tag=0)
            g.exchange("receive", recvs=[(slot, 1 - rank)], tag=0)
        graphs.append(g.build())
    return graphs


def _pairs(network: Lane, orders: Sequence[Sequence[int]]) -> list[Graph]:
    """Three ranks, every two of which swap a part; `orders[rank]` is the order in which that rank
    meets its partners.
    """
    graphs = []
    for rank, partners in enumerate(orders):
        g = _builder(rank, 3, network)
        out = g.buffer("out", size_bytes=_BYTES, initialised=True)
        for peer in partners:
            slot = g.buffer(f"from {peer}", size_bytes=_BYTES)
            g.exchange(f"swap with {peer}", sends=[(out, peer)], recvs=[(slot, peer)], tag=0)
        graphs.append(g.build())
    return graphs


def _ask_and_answer(*, both_wait: bool) -> list[Graph]:
    """Each rank's answer is made from what it receives; a rank that waits asks only after it has
    been asked.
    """
    graphs = []
    for rank in range(2):
        g = _builder(rank, 2, _FREE)
        out = g.buffer("out", size_bytes=_BYTES, initialised=True)
        slot = g.buffer("slot", size_bytes=_BYTES)
        waits = rank == 1 or both_wait
        if not waits:
            g.exchange("send", sends=[(out, 1 - rank)], tag=rank)
        g.exchange("receive", recvs=[(slot, 1 - rank)], tag=1 - rank)
        if waits:
            g.compute("answer", _WORK, reads=[slot], writes=[out])
            g.exchange("send", sends=[(out, 1 - rank)], tag=rank)
        graphs.append(g.build())
    return graphs


def _task(graphs: Sequence[Graph], rank: int, name: str) -> Task:
    (task,) = (task for task in graphs[rank].tasks if task.name == name)
    return task


def _with_task(
    graphs: Sequence[Graph], rank: int, name: str, **changes: Any
) -> list[Graph]:  # Any: fields of Task
    """The same world with some fields of one task changed."""
    old = _task(graphs, rank, name)
    tasks = tuple(replace(task, **changes) if task is old else task for task in graphs[rank].tasks)
    return [replace(graph, tasks=tasks) if graph.rank == rank else graph for graph in graphs]


def _with_message(
    graphs: Sequence[Graph], rank: int, name: str, side: str, index: int = 0, **changes: int
) -> list[Graph]:
    messages: tuple[Message, ...] = getattr(_task(graphs, rank, name), side)
    changed = tuple(m._replace(**changes) if i == index else m for i, m in enumerate(messages))
    return _with_task(graphs, rank, name, **{side: changed})


def _without_edge(graphs: Sequence[Graph], rank: int, first: str, second: str) -> list[Graph]:
    u, v = _task(graphs, rank, first).id, _task(graphs, rank, second).id
    graph = graphs[rank]
    assert u in graph.predecessors[v], "the edge to be removed is not there"
    predecessors = [
        tuple(t for t in edges if (t, i) != (u, v)) for i, edges in enumerate(graph.predecessors)
    ]
    successors = [
        tuple(t for t in edges if (i, t) != (u, v)) for i, edges in enumerate(graph.successors)
    ]
    return [
        replace(g, predecessors=tuple(predecessors), successors=tuple(successors))
        if g.rank == rank
        else g
        for g in graphs
    ]


def _with_edge(graphs: Sequence[Graph], rank: int, first: int, second: int) -> list[Graph]:
    predecessors = list(graphs[rank].predecessors)
    predecessors[second] = (*predecessors[second], first)
    return [replace(g, predecessors=tuple(predecessors)) if g.rank == rank else g for g in graphs]


def _with_lane(graphs: Sequence[Graph], rank: int, lane: Lane) -> list[Graph]:
    return [replace(g, lanes={**g.lanes, lane.name: lane}) if g.rank == rank else g for g in graphs]


def _uninitialised(graphs: Sequence[Graph], rank: int, buffer: str) -> list[Graph]:
    parts = tuple(
        replace(part, initialised=part.initialised and part.buffer != buffer)
        for part in graphs[rank].parts
    )
    return [replace(g, parts=parts) if g.rank == rank else g for g in graphs]


def _part(graph: Graph, buffer: str) -> int:
    (part,) = (part.id for part in graph.parts if part.buffer == buffer)
    return part


@dataclass(frozen=True)
class _Fault:
    """`world` passes; `plant(world)` must not, with `message`."""

    name: str
    world: list[Graph]
    plant: Callable[[list[Graph]], Sequence[Graph]]
    message: str


def _needing(graphs: Sequence[Graph], rank: int, name: str, size_bytes: int) -> list[Graph]:
    """The same world, with a task that needs the first bytes of what it reads."""
    (part,) = _task(graphs, rank, name).reads
    return _with_task(graphs, rank, name, looks_at=(Extent(part, 0, size_bytes),))


def _four_bytes_fewer(graphs: Sequence[Graph]) -> list[Graph]:
    """The same ring, whose last message to rank 0 both sides hold to be shorter."""
    shorter = _with_message(graphs, 2, "hop 1", "sends", size_bytes=_BYTES - 4)
    return _with_message(shorter, 0, "hop 1", "recvs", size_bytes=_BYTES - 4)


def _added_to(size_bytes: int) -> list[Graph]:
    """Rank 1 adds to the first four of the bytes that come from rank 0, and sends eight back."""
    graphs = []
    for rank in range(2):
        g = _builder(rank, 2, _FREE)
        out = g.buffer("out", size_bytes=_BYTES, initialised=True)
        slot = g.buffer("slot", size_bytes=_BYTES)
        if rank == 0:
            g.exchange("away", sends=[(out, 1, size_bytes)], tag=0)
            g.exchange("home", recvs=[(slot, 1)], tag=1)
        else:
            g.exchange("away", recvs=[(slot, 0, size_bytes)], tag=0)
            g.compute("add", _WORK, accumulates=[slot], looks_at=[(slot[0], 4, 0)])
            g.exchange("home", sends=[(slot, 0)], tag=1)
        graphs.append(g.build())
    return graphs


_FREE_RING, _ORDERED_RING = _ring(3), _ring(3, _ORDERED)

_FAULTS = [
    # Messages.
    _Fault(
        "missing receive",
        _FREE_RING,
        lambda w: _needing(_with_task(w, 2, "hop 1", recvs=()), 2, "tile 2", 0),
        r"rank 1: task 2 'hop 1' sends tag 1 to rank 2, which never receives it",
    ),
    _Fault(
        "missing send",
        _FREE_RING,
        lambda w: _with_task(w, 1, "hop 1", sends=()),
        r"rank 2: task 2 'hop 1' receives tag 1 from rank 1, which never sends it",
    ),
    _Fault(
        "a receive from the wrong rank",
        _FREE_RING,
        lambda w: _with_message(w, 2, "hop 1", "recvs", peer=0),
        r"rank 1: task 2 'hop 1' sends tag 1 to rank 2, which never receives it",
    ),
    _Fault(
        "wrong size",
        _FREE_RING,
        lambda w: _needing(
            _with_message(w, 0, "hop 1", "recvs", size_bytes=_BYTES - 4), 0, "tile 2", _BYTES - 4
        ),
        r"rank 2: task 2 'hop 1' sends 8 bytes with tag 1, but rank 0: task 2 'hop 1' "
        r"expects 4 bytes",
    ),
    _Fault(
        "an operation on bytes that never came",
        _FREE_RING,
        _four_bytes_fewer,
        r"rank 0: task 4 'tile 2' looks at \(looks_at=\) the bytes 0 to 8 of slot0\[0\], of "
        r"which only \[\(0, 4\)\] have come",
    ),
    _Fault(
        "an operation that needs more bytes than came",
        _needing(_four_bytes_fewer(_FREE_RING), 0, "tile 2", 4),
        lambda w: _needing(w, 0, "tile 2", 5),
        r"rank 0: task 4 'tile 2' looks at \(looks_at=\) the bytes 0 to 5 of slot0\[0\], of "
        r"which only \[\(0, 4\)\] have come",
    ),
    _Fault(
        "bytes sent on that never came, though others were added to",
        _added_to(8),
        lambda w: _added_to(4),
        r"rank 1: task 2 'home' sends the bytes 0 to 8 of slot\[0\], of which only "
        r"\[\(0, 4\)\] have come",
    ),
    _Fault(
        "bytes sent on that never came",
        _FREE_RING,
        lambda w: _with_message(
            _with_message(w, 2, "hop 0", "sends", size_bytes=_BYTES - 4),
            0,
            "hop 0",
            "recvs",
            size_bytes=_BYTES - 4,
        ),
        r"rank 0: task 2 'hop 1' sends the bytes 0 to 8 of slot1\[0\], of which only \[\(0, 4\)\] "
        r"have come",
    ),
    _Fault(
        "swapped tags",
        _FREE_RING,
        lambda w: _with_message(
            _with_message(w, 1, "hop 0", "sends", tag=1), 1, "hop 1", "sends", tag=0
        ),
        r"deadlock: .*rank 1: task 0 'hop 0' waits for rank 2 to reach task 2 'hop 1'",
    ),
    _Fault(
        "swapped tags on an ordered lane",
        _two_messages(_ORDERED),
        lambda w: _with_message(_with_message(w, 0, "m0", "sends", tag=1), 0, "m1", "sends", tag=0),
        r"rank 0 sends tags \[1, 0\] to rank 1, which receives tags \[0, 1\]: an ordered "
        r"lane matches messages by order, so both orders must be the same",
    ),
    _Fault(
        "a tag used twice with one peer",
        _two_messages(_FREE),
        lambda w: [
            g
            for r in (0, 1)
            for g in [_with_message(w, r, "m1", "recvs" if r else "sends", tag=0)[r]]
        ],
        r"rank 0: task 0 'm0' and task 1 'm1' both use tag 0 with rank 1; give each exchange its "
        r"own tag",
    ),
    _Fault(
        "a peer outside the world",
        _FREE_RING,
        lambda w: _with_message(w, 2, "hop 1", "recvs", peer=3),
        r"rank 2: task 2 'hop 1' names rank 3 as its peer, in a world of 3",
    ),
    _Fault(
        "a message to itself",
        _FREE_RING,
        lambda w: _with_message(
            _with_message(w, 2, "hop 1", "recvs", peer=2), 2, "hop 1", "sends", peer=2
        ),
        r"rank 2: task 2 'hop 1' names rank 2 as its peer, in a world of 3",
    ),
    _Fault(
        "more bytes than the part has",
        _two_messages(_FREE),
        lambda w: _with_message(
            _with_message(w, 0, "m0", "sends", size_bytes=9), 1, "m0", "recvs", size_bytes=9
        ),
        r"rank 0: task 0 'm0' moves the bytes 0 to 9 of b\[0\], which has 8",
    ),
    # Accesses.
    _Fault(
        "a slot overwritten while it is read",
        _ring(4),
        lambda w: _without_edge(w, 1, "tile 1", "hop 2"),
        r"rank 1: task 3 'tile 1' and task 4 'hop 2' both use slot1\[0\] and nothing orders them",
    ),
    _Fault(
        "a slot overwritten while it is sent",
        _ring(4),
        lambda w: _without_edge(w, 1, "hop 1", "hop 2"),
        r"rank 1: task 2 'hop 1' and task 4 'hop 2' both use slot[01]\[0\] and nothing orders them",
    ),
    _Fault(
        "a slot read before it is filled",
        _FREE_RING,
        lambda w: _without_edge(w, 1, "hop 0", "tile 1"),
        r"rank 1: task 0 'hop 0' and task 3 'tile 1' both use slot1\[0\] and nothing orders them",
    ),
    _Fault(
        "accumulations out of their chain",
        _FREE_RING,
        lambda w: _without_edge(w, 0, "tile 0", "tile 1"),
        r"rank 0: task 1 'tile 0' and task 3 'tile 1' both use out\[0\] and nothing orders them",
    ),
    _Fault(
        "a read of what nothing wrote",
        _FREE_RING,
        lambda w: _uninitialised(w, 2, "own"),
        r"rank 2: task 0 'hop 0' reads own\[0\], which nothing wrote",
    ),
    _Fault(
        "an accumulation into what nothing wrote",
        _FREE_RING,
        lambda w: _uninitialised(w, 0, "out"),
        r"rank 0: task 1 'tile 0' reads out\[0\], which nothing wrote",
    ),
    _Fault(
        "an exchange that does not declare what it sends",
        _FREE_RING,
        lambda w: _with_task(w, 0, "hop 0", reads=()),
        r"rank 0: task 0 'hop 0' sends or receives parts it does not declare",
    ),
    _Fault(
        "an exchange that does not declare what it receives",
        _ring(2),
        lambda w: _with_task(_with_task(w, 0, "hop 0", writes=()), 0, "tile 1", reads=()),
        r"rank 0: task 0 'hop 0' sends or receives parts it does not declare",
    ),
    _Fault(
        "an exchange that receives into what it sends",
        _apart(_FREE, together=True),
        lambda w: _with_task(
            _with_message(w, 0, "both", "recvs", part=_part(w[0], "out")),
            0,
            "both",
            writes=(_part(w[0], "out"),),
        ),
        r"rank 0: task 0 'both' receives into the same bytes twice, or into a part that it "
        r"also reads or sends",
    ),
    _Fault(
        "an exchange that receives twice into one part",
        _one_exchange(),
        lambda w: _with_message(w, 1, "all", "recvs", part=_part(w[1], "large")),
        r"rank 1: task 0 'all' receives into the same bytes twice, or into a part that it "
        r"also reads or sends",
    ),
    # Edges.
    _Fault(
        "an edge backwards",
        _FREE_RING,
        lambda w: _with_edge(w, 0, 3, 1),
        r"rank 0: task 1 'tile 0' depends on task 3, .*a cycle",
    ),
    _Fault(
        "an edge to itself",
        _FREE_RING,
        lambda w: _with_edge(w, 0, 2, 2),
        r"rank 0: task 2 'hop 1' depends on task 2, .*a cycle",
    ),
    _Fault(
        "an edge from nowhere",
        _FREE_RING,
        lambda w: _with_edge(w, 0, -1, 2),
        r"rank 0: task 2 'hop 1' depends on task -1",
    ),
    # Lanes.
    _Fault(
        "an ordered lane that is not issued in program order",
        _ORDERED_RING,
        lambda w: _with_lane(w, 1, replace(_ORDERED, in_program_order=False)),
        r"rank 1: task 0 'hop 0' is on ordered lane 'network', which must be issued in program "
        r"order",
    ),
    _Fault(
        "a lane with a limit that is not issued in program order",
        _FREE_RING,
        lambda w: _with_lane(w, 1, replace(_FREE, max_in_flight=1)),
        r"rank 1: task 0 'hop 0' is on bounded lane 'network', which must be issued in program "
        r"order",
    ),
    _Fault(
        "an ordered communication lane beside another",
        _ORDERED_RING,
        lambda w: _with_task(_with_lane(w, 1, Lane("mpi")), 1, "hop 1", lane="mpi"),
        r"rank 1: exchanges are on lanes \['mpi', 'network'\]; a graph with exchanges on an "
        r"ordered lane must have all its exchanges on that lane",
    ),
    _Fault(
        "a task that computes and exchanges",
        _FREE_RING,
        lambda w: _with_task(w, 1, "hop 0", op=_WORK),
        r"rank 1: task 0 'hop 0' both computes and exchanges",
    ),
    # Worlds.
    _Fault(
        "a rank without a graph",
        _FREE_RING,
        lambda w: w[:2],
        r"the graph of every rank, in order; got ranks \[0, 1\] of worlds of \[3, 3\]",
    ),
    _Fault(
        "ranks out of order",
        _FREE_RING,
        lambda w: w[::-1],
        r"the graph of every rank, in order; got ranks \[2, 1, 0\]",
    ),
    _Fault(
        "a rank of another world",
        _FREE_RING,
        lambda w: [*w[:2], _ring(4)[2]],
        r"got ranks \[0, 1, 2\] of worlds of \[3, 3, 4\]",
    ),
    # Deadlocks: everything matches, but nothing can move.
    _Fault(
        "a cycle across ranks",
        _ask_and_answer(both_wait=False),
        lambda w: _ask_and_answer(both_wait=True),
        r"deadlock: rank 0: task 0 'receive' waits for rank 1 to reach task 2 'send'; .*'answer' "
        r"never starts",
    ),
    _Fault(
        "a send and a receive that are not one exchange on an ordered lane",
        _apart(_ORDERED, together=True),
        lambda w: _apart(_ORDERED, together=False),
        r"deadlock: rank 0: task 0 'send' waits for rank 1 to reach task 1 'receive'; rank 0: task "
        r"1 'receive' never starts",
    ),
    _Fault(
        "three ranks that meet in a circle on ordered lanes",
        _pairs(_ORDERED, [(1, 2), (0, 2), (0, 1)]),
        lambda w: _pairs(_ORDERED, [(1, 2), (2, 0), (0, 1)]),
        r"deadlock: rank 0: task 0 'swap with 1' waits for rank 1 to reach task 1 'swap with 0'",
    ),
    _Fault(
        "two ranks that issue exchanges in different order on ordered lanes",
        _two_messages(_ORDERED),
        lambda w: [
            w[0],
            replace(
                w[1], tasks=tuple(replace(t, id=i) for i, t in enumerate(reversed(w[1].tasks)))
            ),
        ],
        r"rank 0 sends tags \[0, 1\] to rank 1, which receives tags \[1, 0\]",
    ),
]


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: _Fault) -> None:
    check_world(fault.world)
    with pytest.raises(InternalError, match=fault.message):
        check_world(fault.plant(fault.world))


@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_in_the_share_of_some_rank(fault: _Fault) -> None:
    planted = list(fault.plant(fault.world))
    if [graph.rank for graph in planted] != list(range(fault.world[0].world_size)):
        return  # not a world: nobody asks for another rank's graph
    with pytest.raises(InternalError):
        check_shares(planted)


_KINDS = [_FREE, _ORDERED, replace(_FREE, in_program_order=True, max_in_flight=1)]


@pytest.mark.parametrize("network", _KINDS, ids=["free", "ordered", "one"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_a_ring_passes_on_every_kind_of_lane(world_size: int, network: Lane) -> None:
    check_world(_ring(world_size, network))
    check_shares(_ring(world_size, network))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_where_all_shares_hold_the_world_holds(data: st.DataObject) -> None:
    """Drawn swaps between pairs of ranks, with computes between, in drawn orders and under drawn
    tags; each rank leaves one out now and then.
    """
    network = data.draw(st.sampled_from(_KINDS))
    ranks = st.permutations(range(4)).map(lambda order: tuple(sorted(order[:2])))
    swaps = list(enumerate(data.draw(st.lists(ranks, min_size=1, max_size=6))))
    tags = data.draw(st.lists(st.integers(0, 5), min_size=len(swaps), max_size=len(swaps)))
    graphs = []
    for rank in range(4):
        g = _builder(rank, 4, network)
        out = g.buffer("out", size_bytes=_BYTES, initialised=True)
        own = [(number, pair) for number, pair in swaps if rank in pair]
        if data.draw(st.integers(0, 3)) == 0:
            own = data.draw(st.permutations(own))
        if data.draw(st.integers(0, 9)) == 0:
            own = own[1:]
        for number, pair in own:
            (peer,) = set(pair) - {rank}
            slot = g.buffer(f"slot {number}", size_bytes=_BYTES)
            g.exchange(str(number), sends=[(out, peer)], recvs=[(slot, peer)], tag=tags[number])
            if data.draw(st.booleans()):
                g.compute(f"use {number}", _WORK, reads=[slot], accumulates=[out])
        graphs.append(g.build())
    try:
        check_shares(graphs)
    except InternalError:
        event("refused")
        return
    event("passed")
    check_world(graphs)


def test_a_share_wants_one_tag_an_exchange_and_tags_that_ascend() -> None:
    """Else the ranks' shares might all hold, and the world stand still."""
    check_shares(_two_messages(_FREE))
    circle = _pairs(_FREE, [(1, 2), (2, 0), (0, 1)])  # goes well on free lanes; all tags are 0
    check_world(circle)
    with pytest.raises(InternalError, match=r"rank 0: task 1 'swap with 2' uses tags \[0\] after"):
        check_shares(circle)
    graphs = _with_message(_one_exchange(), 0, "all", "sends", index=1, tag=6)
    with pytest.raises(InternalError, match=r"'all' uses tags \[5, 6\] after tag None; give each"):
        check_shares(graphs)


def _share(rank: int, change: Callable[[list[Transfer]], object]) -> None:
    """Checks a rank's share of a ring of 3, after a change of what is stated."""
    graphs = _ring(3)
    sent = [
        Transfer(graph.rank, m.peer, m.tag, m.size_bytes)
        for graph in graphs
        for task in graph.tasks
        for m in task.sends
    ]
    stated = [each for each in sent if rank in each[:2]]
    change(stated)
    check_share(graphs[rank], stated)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stated: stated.pop(), r"task 2 'hop 1' has 8 bytes from .* stated is no such"),
        (lambda stated: stated.append(Transfer(1, 2, 9, 5)), r"no task has 5 bytes .* with tag 9"),
        (lambda stated: stated.append(Transfer(2, 1, 0, 5)), r"no task has 5 bytes from rank 2 to"),
        (
            lambda stated: stated.insert(0, stated.pop(0)._replace(size_bytes=5)),
            r"'hop 0' has 8 bytes from rank 0 to rank 1 with tag 0; stated is 5 bytes from rank 0",
        ),
        (
            lambda stated: stated.insert(0, stated.pop(0)._replace(tag=7)),
            r"'hop 0' has .* with tag 0; stated is .* with tag 7",
        ),
        (lambda stated: stated.reverse(), r"'hop 0' has .* with tag 0; stated is .* with tag 1"),
    ],
)
def test_a_share_has_exactly_the_messages_that_are_stated(
    change: Callable[[list[Transfer]], object], message: str
) -> None:
    _share(1, lambda stated: None)
    with pytest.raises(InternalError, match=rf"rank 1: .*{message}"):
        _share(1, change)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_no_edge_of_a_ring_can_be_missing(world_size: int) -> None:
    graphs = _ring(world_size)
    for u, v in [(u, v) for v, before in enumerate(graphs[0].predecessors) for u in before]:
        names = graphs[0].tasks[u].name, graphs[0].tasks[v].name
        with pytest.raises(InternalError, match="nothing orders them"):
            check_world(_without_edge(graphs, 0, *names))


def test_free_lanes_may_do_what_would_block_ordered_ones() -> None:
    # Both sides of all exchanges are posted at once.
    check_world(_apart(_FREE, together=False))
    check_world(_pairs(_FREE, [(1, 2), (2, 0), (0, 1)]))
    swapped = _two_messages(_FREE)
    check_world(
        [
            swapped[0],
            replace(
                swapped[1],
                tasks=tuple(replace(t, id=i) for i, t in enumerate(reversed(swapped[1].tasks))),
            ),
        ]
    )


def test_messages_of_one_exchange_match_in_the_order_they_are_listed() -> None:
    graphs = _one_exchange()
    assert match_messages(graphs) == {
        Endpoint(1, 0, 0): Endpoint(0, 0, 0),
        Endpoint(1, 0, 1): Endpoint(0, 0, 1),
    }
    sends = graphs[0].tasks[0].sends
    with pytest.raises(InternalError, match=r"sends 16 bytes with tag 5, .* expects 4"):
        check_world([_with_task(graphs, 0, "all", sends=sends[::-1])[0], graphs[1]])


def test_a_rank_can_be_checked_on_its_own() -> None:
    graphs = _ring(6)
    check_graph(graphs[3])
    with pytest.raises(InternalError, match="nothing orders them"):
        check_graph(_without_edge(graphs, 3, "tile 2", "hop 3")[3])
