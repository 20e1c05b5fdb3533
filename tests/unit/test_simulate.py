"""The simulator's times against ones worked out by hand, what it refuses, and that one input has
one result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from burst_rt.errors import InputError
from burst_rt.planning.machines import load_hardware
from burst_rt.scheduler import (
    CONTROL,
    HOST_LANES,
    NCCL_LANES,
    NETWORK,
    Cost,
    Graph,
    GraphBuilder,
    Lane,
    Op,
    Schedule,
    Task,
    exposed,
)
from burst_rt.scheduler.simulator import (
    Deadlock,
    Device,
    Hardware,
    Link,
    Nics,
    Node,
    Rate,
    Rotated,
    Simulated,
    Switch,
    simulate,
)
from burst_rt.transport.staged import stage_graph

_WORK = Op("work")
# A task's flops are the seconds it takes.
_SECOND_A_FLOP = Rate(launch_s=0.0, flops_per_s=1.0, bytes_per_s=float("inf"), efficiency=1.0)
_DEVICE = Device(1, {"default": _SECOND_A_FLOP})


def _link(bytes_per_s: float, latency_s: float = 0.0) -> Link:
    return Link(latency_s, bytes_per_s, 1.0, "full")


_NODE = Node(4, _link(100.0))


def _on(node: Node, nics: Nics | None = None) -> Hardware:
    return Hardware("test", _DEVICE, node, nics)


_Program = Callable[[GraphBuilder], None]


def _world(*programs: _Program, lanes: Sequence[Lane] = HOST_LANES) -> list[Graph]:
    """One graph a rank, of what its program adds."""
    graphs = []
    for rank, program in enumerate(programs):
        g = GraphBuilder(rank, len(programs), lanes)
        program(g)
        graphs.append(g.build())
    return graphs


def _run(graphs: Sequence[Graph], hardware: Hardware, *, spans: bool = False) -> Simulated:
    return simulate([Schedule.of(graph) for graph in graphs], hardware, spans=spans)


def _messages(*flows: tuple[int, int, int], world_size: int | None = None) -> list[Graph]:
    """Messages that start together: (source, destination, bytes), each an exchange of its own on
    both sides.
    """
    num_ranks = world_size or 1 + max(max(source, destination) for source, destination, _ in flows)

    def program(rank: int) -> _Program:
        def add(g: GraphBuilder) -> None:
            for tag, (source, destination, size) in enumerate(flows):
                if source == rank:
                    g.exchange(
                        f"out {tag}",
                        sends=[
                            (g.buffer(f"o{tag}", size_bytes=size, initialised=True), destination)
                        ],
                        tag=tag,
                    )
                if destination == rank:
                    g.exchange(
                        f"in {tag}", recvs=[(g.buffer(f"i{tag}", size_bytes=size), source)], tag=tag
                    )

        return add

    return _world(*map(program, range(num_ranks)))


def _ends(run: Simulated) -> list[float]:
    return [rank.end_s for rank in run.ranks]


# Messages.


def test_a_message_takes_its_latency_and_its_bytes_at_the_rate_that_is_reached() -> None:
    link = Link(latency_s=2.0, bytes_per_s=100.0, efficiency=0.5, duplex="full")
    run = _run(_messages((0, 1, 1000)), _on(Node(2, link)))
    assert _ends(run) == [22.0, 22.0]
    assert [rank.sent_bytes for rank in run.ranks] == [1000, 0]


def test_two_messages_on_a_link_share_it_until_one_has_arrived() -> None:
    # 50 bytes/s each for 10 s, in which the short one arrives; then 100 bytes/s for the other's
    # last 500.
    run = _run(_messages((0, 1, 1000), (0, 1, 500)), _on(_NODE), spans=True)
    assert {span.name: span.ended_s for span in run.spans[0]} == {"out 1": 10.0, "out 0": 15.0}


def test_a_message_that_comes_later_slows_the_one_under_way() -> None:
    def sender(g: GraphBuilder) -> None:
        first, second = (g.buffer(name, size_bytes=1000, initialised=True) for name in "ab")
        g.exchange("first", sends=[(first, 1)], tag=0)
        g.compute("wait", _WORK, accumulates=[second], cost=Cost(4))
        g.exchange("second", sends=[(second, 1)], tag=1)

    def receiver(g: GraphBuilder) -> None:
        for tag in range(2):
            g.exchange(f"in {tag}", recvs=[(g.buffer(f"b{tag}", size_bytes=1000), 0)], tag=tag)

    run = _run(_world(sender, receiver), _on(_NODE), spans=True)
    # First: 400 bytes alone, 600 at half the rate, so at 4 + 12; second: 600 by then, 400 alone.
    assert {span.name: span.ended_s for span in run.spans[1]} == {"in 0": 16.0, "in 1": 20.0}


def test_what_comes_into_one_rank_from_two_shares_its_way_in() -> None:
    assert _ends(_run(_messages((0, 2, 1000), (1, 2, 1000)), _on(_NODE))) == [20.0, 20.0, 20.0]


@pytest.mark.parametrize(("duplex", "end_s"), [("full", 10.0), ("half", 20.0)])
def test_both_directions_share_a_half_duplex_link(duplex: str, end_s: float) -> None:
    link = Link(0.0, 100.0, 1.0, "half" if duplex == "half" else "full")
    assert _ends(_run(_messages((0, 1, 1000), (1, 0, 1000)), _on(Node(2, link)))) == [end_s, end_s]


def test_a_message_starts_once_both_sides_are_posted() -> None:
    def late(g: GraphBuilder) -> None:
        part = g.buffer("b", size_bytes=1000)
        g.compute("first", _WORK, writes=[part], cost=Cost(7))
        g.exchange("in", recvs=[(part, 0)], tag=0)

    def prompt(g: GraphBuilder) -> None:
        g.exchange("out", sends=[(g.buffer("b", size_bytes=1000, initialised=True), 1)], tag=0)

    assert _ends(_run(_world(prompt, late), _on(_NODE))) == [17.0, 17.0]


@pytest.mark.parametrize(
    ("ranks", "flows", "end_s"),
    [
        # Two messages through one switch of 160 bytes/s: 80 each. Through one each: the link's 100.
        (4, [(0, 1, 1000), (2, 3, 1000)], 12.5),
        (2, [(0, 1, 1000), (2, 3, 1000)], 10.0),
        # From one switch to the other and back: both pass both.
        (2, [(0, 2, 1000), (3, 1, 1000)], 12.5),
    ],
)
def test_ranks_share_their_switch(
    ranks: int, flows: list[tuple[int, int, int]], end_s: float
) -> None:
    node = replace(_NODE, switch=Switch(ranks, bytes_per_s=320.0, efficiency=0.5))
    assert _run(_messages(*flows), _on(node)).end_s == end_s


@pytest.mark.parametrize(("count", "end_s"), [(1, 1.0 + 1000 / 30), (2, 1.0 + 1000 / 60)])
def test_ranks_of_a_node_share_its_network_cards(count: int, end_s: float) -> None:
    machine = _on(Node(2, _link(100.0)), Nics(count, _link(60.0, latency_s=1.0)))
    assert _run(_messages((0, 2, 1000), (1, 3, 1000)), machine).end_s == pytest.approx(
        end_s, rel=1e-12
    )


def test_the_way_to_the_network_card_is_the_one_to_the_host() -> None:
    machine = _on(Node(2, _link(100.0), host_link=_link(20.0)), Nics(1, _link(60.0)))
    assert _run(_messages((0, 1, 1000), world_size=4), machine).end_s == 10.0
    assert _run(_messages((0, 2, 1000), world_size=4), machine).end_s == 50.0


def test_on_an_ordered_lane_transfers_go_one_by_one() -> None:
    def swap(g: GraphBuilder) -> None:
        for i in range(3):
            own, slot = (
                g.buffer(f"own{i}", size_bytes=100, initialised=True),
                g.buffer(f"slot{i}", size_bytes=100),
            )
            g.exchange(f"swap {i}", sends=[(own, 1 - g.rank)], recvs=[(slot, 1 - g.rank)], tag=i)

    run = _run(_world(swap, swap, lanes=NCCL_LANES), _on(_NODE), spans=True)
    assert [(s.issued_s, s.started_s, s.ended_s) for s in run.spans[0]] == [
        (0.0, 0.0, 1.0),
        (0.0, 1.0, 2.0),
        (0.0, 2.0, 3.0),
    ]
    # All at once a third of the bandwidth each: the same end, but none is there before.
    together = _run(_world(swap, swap), _on(_NODE), spans=True)
    assert [span.ended_s for span in together.spans[0]] == pytest.approx([3.0, 3.0, 3.0], rel=1e-12)


# Tasks.


def test_streams_run_in_order_and_wait_for_each_others_events() -> None:
    def program(g: GraphBuilder) -> None:
        a, b, c = g.buffer("a"), g.buffer("b"), g.buffer("c")
        g.compute("a", _WORK, writes=[a], cost=Cost(3))
        g.compute("b", _WORK, writes=[b], cost=Cost(5), lane="copy")
        g.compute("both", _WORK, reads=[a, b], writes=[c], cost=Cost(2))
        g.compute("last", _WORK, accumulates=[c], cost=Cost(1))

    lanes = [
        Lane("compute", ordered=True, device=0),
        Lane("copy", ordered=True, device=0),
        NETWORK,
        CONTROL,
    ]
    run = _run(_world(program, lanes=lanes), _on(_NODE), spans=True)
    # Everything is issued at once; "both" waits for the other stream's event, "last" for its own
    # stream.
    assert {s.name: (s.issued_s, s.started_s, s.ended_s) for s in run.spans[0]} == {
        "a": (0.0, 0.0, 3.0), "b": (0.0, 0.0, 5.0), "both": (0.0, 5.0, 7.0), "last": (0.0, 7.0,
        8.0),
    }  # fmt: skip
    assert (run.ranks[0].busy_s, run.ranks[0].idle_s) == (6.0, 2.0)


def test_ranks_share_the_cores_of_their_node() -> None:
    def computing(seconds: int) -> _Program:
        def program(g: GraphBuilder) -> None:
            g.compute("work", _WORK, writes=[g.buffer("a")], cost=Cost(seconds))

        return program

    # Three on two cores go at 2/3 for 15 s, the first is done; then the others have one each for
    # their last 10 s.
    run = _run(
        _world(computing(10), computing(20), computing(20)), _on(Node(3, _link(1.0), cores=2))
    )
    assert _ends(run) == pytest.approx([15.0, 25.0, 25.0], rel=1e-12)
    # No task has more than one core, and nodes share nothing.
    assert _ends(_run(_world(computing(10)), _on(Node(3, _link(1.0), cores=2)))) == [10.0]
    apart = _on(Node(1, _link(1.0), cores=1), Nics(1, _link(1.0)))
    assert _ends(_run(_world(computing(10), computing(20)), apart)) == [10.0, 20.0]


def test_a_message_takes_time_from_the_computing_of_its_ranks() -> None:
    """50 bytes, half a second of computing each on either side."""

    def computing(g: GraphBuilder) -> None:
        a, into = g.buffer("a"), g.buffer("in", size_bytes=50)
        out = g.buffer("out", size_bytes=50, initialised=True)
        if g.rank < 2:
            sends, recvs = [(out, 1)], [(into, 0)]
            g.exchange("pass", sends=sends * (1 - g.rank), recvs=recvs * g.rank, tag=0)
        g.compute("work", _WORK, writes=[a], cost=Cost(30))

    def working(node: Node, nics: Nics | None = None) -> list[float]:
        return _ends(_run(_world(computing, computing, computing), _on(node, nics)))

    link, light = replace(_link(100.0), work_byte_s=0.5), _link(100.0)
    # While both are there each has half of the rank's time: 25 s of work take 50 s.
    assert working(Node(3, link)) == pytest.approx([55.0, 55.0, 30.0], rel=1e-12)
    assert working(Node(3, light)) == [30.0, 30.0, 30.0]
    # Five on three cores: the messages' work ends after 25 / 0.6 s, when tasks have 5 s left.
    shared = working(Node(3, link, cores=3))
    assert shared == pytest.approx([25 / 0.6 + 5] * 3, rel=1e-12)
    # Ranks 0 and 1 share a node, and its link.
    assert working(Node(2, light), Nics(2, link)) == [30.0, 30.0, 30.0]
    assert working(Node(1, light), Nics(1, link)) == pytest.approx([55.0, 55.0, 30.0], rel=1e-12)


def test_an_agreement_waits_for_the_last_rank_and_takes_the_rounds_of_an_allreduce() -> None:
    def entering(at_s: int) -> _Program:
        def program(g: GraphBuilder) -> None:
            agreed = g.buffer("agreed")
            g.compute("before", _WORK, writes=[agreed], cost=Cost(at_s))
            g.compute("agree", Op("agree"), writes=[agreed], lane="control")

        return program

    # 5 ranks: 3 rounds of half a second after the last one.
    run = _run(_world(*map(entering, (1, 0, 9, 2, 3))), _on(Node(5, _link(1.0, latency_s=0.5))))
    assert _ends(run) == [10.5] * 5


def test_without_hardware_only_the_given_seconds_pass() -> None:
    def seconds(task: Task) -> float:
        return 3.0 if task.name == "tile 1" else 0.25

    schedules = [Schedule.of(graph) for graph in _ring(2, tile_s=100, size_bytes=100)]
    assert simulate(schedules, seconds=seconds).end_s == 3.25
    assert simulate(schedules).end_s == 0.0


# Rings.


def _ring(
    world_size: int, *, tile_s: int, size_bytes: int, lanes: Sequence[Lane] = HOST_LANES
) -> list[Graph]:
    return [_ring_of(rank, world_size, tile_s, size_bytes, lanes) for rank in range(world_size)]


def _ring_of(
    rank: int, world_size: int, tile_s: int, size_bytes: int, lanes: Sequence[Lane]
) -> Graph:
    """One tile a hop; the rank's own part and two slots."""
    g = GraphBuilder(rank, world_size, lanes)
    own = g.buffer("own", size_bytes=size_bytes, initialised=True)
    slots = [g.buffer(f"slot{i}", size_bytes=size_bytes) for i in range(2)]
    out = g.buffer("out", initialised=True)
    for hop in range(world_size):
        here = slots[hop % 2] if hop else own
        if hop + 1 < world_size:
            sends, recvs = (
                [(here, (rank + 1) % world_size)],
                [(slots[(hop + 1) % 2], (rank - 1) % world_size)],
            )
            g.exchange(f"hop {hop}", sends=sends, recvs=recvs, tag=hop)
        g.compute(f"tile {hop}", Op("forward"), reads=[here], accumulates=[out], cost=Cost(tile_s))
    return g.build()


@pytest.mark.parametrize("lanes", [HOST_LANES, NCCL_LANES], ids=["host", "nccl"])
@pytest.mark.parametrize("tile_s", [1, 4, 5, 6, 20])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_hop_takes_the_longer_of_its_tile_and_its_transfer(
    world_size: int, tile_s: int, lanes: Sequence[Lane]
) -> None:
    graphs = _ring(world_size, tile_s=tile_s, size_bytes=400, lanes=lanes)
    run = _run(graphs, _on(Node(8, _link(100.0, latency_s=1.0))), spans=True)
    transfer_s = 5
    assert _ends(run) == [(world_size - 1) * max(tile_s, transfer_s) + tile_s] * world_size
    assert [rank.busy_s for rank in run.ranks] == [world_size * tile_s] * world_size
    assert [rank.sent_bytes for rank in run.ranks] == [(world_size - 1) * 400] * world_size
    # What a transfer takes longer than a tile is exposed, and nothing is skew.
    for idle in exposed(graphs, run.spans):
        assert (idle.exposed_s, idle.skew_s) == (
            (world_size - 1) * max(0, transfer_s - tile_s),
            0.0,
        )


def test_a_ring_over_two_nodes_goes_at_the_pace_of_the_network_cards() -> None:
    machine = _on(Node(2, _link(100.0)), Nics(1, _link(25.0)))
    # Of four messages a hop two pass the cards, one out of and one into each node, in 16 s.
    assert _run(_ring(4, tile_s=5, size_bytes=400), machine).end_s == 3 * 16 + 5


def test_a_rotated_schedule_runs_like_each_ranks_own() -> None:
    graphs = _ring(6, tile_s=5, size_bytes=400)
    first = Schedule.of(graphs[0])
    for node in (Node(3, _link(100.0), switch=Switch(3, 170.0, 1.0)), Node(6, _link(70.0, 0.3))):
        machine = _on(node, Nics(1, _link(33.0, 0.1)))
        rotated = simulate([Rotated(first, rank) for rank in range(6)], machine, spans=True)
        assert rotated == _run(graphs, machine, spans=True)
        assert rotated.end_s > 30.0


def test_one_input_has_one_result_bit_for_bit() -> None:
    schedules = [Schedule.of(graph) for graph in _ring(5, tile_s=1, size_bytes=10**7 + 3)]
    machine = replace(load_hardware("a100-pcie"), device=_DEVICE)
    assert simulate(schedules, machine, spans=True) == simulate(schedules, machine, spans=True)


# Staging.


def test_chunks_are_copied_and_sent_in_a_pipeline() -> None:
    def swap(g: GraphBuilder) -> None:
        own, slot = (
            g.buffer("own", size_bytes=1000, initialised=True),
            g.buffer("slot", size_bytes=1000),
        )
        g.exchange("swap", sends=[(own, 1 - g.rank)], recvs=[(slot, 1 - g.rank)], tag=0)

    lanes = [Lane("compute", ordered=True, device=0), NETWORK, CONTROL]
    graphs = [stage_graph(graph, 500) for graph in _world(swap, swap, lanes=lanes)]
    node = Node(2, _link(1.0), host_link=_link(50.0), host_memory=_link(200.0))
    run = _run(graphs, _on(node), spans=True)
    # To the host 10 s a chunk, and to the device, both at once; the host's memory takes 1,000 bytes
    # (both ranks' chunks) in 5 s.
    assert {s.name.removeprefix("swap "): (s.started_s, s.ended_s) for s in run.spans[0]} == {
        "d2h 0": (0.0, 10.0), "d2h 1": (10.0, 20.0),
        "out 0": (10.0, 15.0), "in 0": (0.0, 15.0), "out 1": (20.0, 25.0), "in 1": (0.0, 25.0),
        "h2d 0": (15.0, 25.0), "h2d 1": (25.0, 35.0),
    }  # fmt: skip
    # Without a way of their own, chunks and copies take the link, here of 50 bytes/s each way, and
    # meet there.
    assert _run(graphs, _on(Node(2, _link(50.0)))).end_s > 35.0


def test_copies_meet_in_a_half_duplex_way_to_the_host_and_in_the_switch() -> None:
    def copies(g: GraphBuilder) -> None:
        for name, lane in (("to host", "d2h"), ("to device", "h2d")):
            g.compute(name, Op(name), writes=[g.buffer(name)], cost=Cost(0, 600), lane=lane)

    graphs = _world(copies, lanes=[*HOST_LANES, Lane("d2h"), Lane("h2d")])
    full, half = _link(60.0), Link(0.0, 60.0, 1.0, "half")
    assert _run(graphs, _on(Node(1, full))).end_s == 10.0
    assert _run(graphs, _on(Node(1, full, host_link=half))).end_s == 20.0
    assert _run(graphs, _on(Node(1, full, switch=Switch(1, 80.0, 1.0)))).end_s == 15.0


# What cannot run.


def test_a_wait_in_a_circle_is_a_deadlock() -> None:
    graphs = [replace(_messages((0, 1, 8))[0]), _world(lambda g: None, lambda g: None)[1]]
    with pytest.raises(Deadlock, match=r"rank 0 never ends tasks \['out 0'\]"):
        _run(graphs, _on(_NODE))


def test_a_machine_of_one_node_refuses_more_ranks_than_it_has() -> None:
    with pytest.raises(
        InputError,
        match=r"5 ranks on 'test' need 2 nodes of 4 ranks, but the machine file has no \[nics\]",
    ):
        _run(_ring(5, tile_s=1, size_bytes=1), _on(_NODE))


def test_schedules_that_are_no_world_are_refused() -> None:
    schedules = [Schedule.of(graph) for graph in _ring(3, tile_s=1, size_bytes=1)]
    with pytest.raises(
        InputError, match="got at place 0 of 2 the schedule of rank 0 of 3, shifted by 0"
    ):
        simulate(schedules[:2])
    with pytest.raises(
        InputError, match="got at place 1 of 3 the schedule of rank 2 of 3, shifted by 0"
    ):
        simulate([schedules[0], schedules[2], schedules[1]])
    with pytest.raises(
        InputError, match="got at place 1 of 3 the schedule of rank 0 of 3, shifted by 2"
    ):
        simulate([Rotated(schedules[0], shift) for shift in (0, 2, 1)])
