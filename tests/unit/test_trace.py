"""Traces: bounded, and idle time split into exposed communication and skew as computed by hand."""

from __future__ import annotations

import pytest

from burst_rt.errors import InputError
from burst_rt.scheduler import (
    Graph,
    GraphBuilder,
    Idle,
    Op,
    Span,
    Trace,
    Wait,
    exposed,
    match_messages,
    waits,
)

_WORK = Op("work")


def _span(graph: Graph, task: int, issued_s: float, started_s: float, ended_s: float) -> Span:
    node = graph.tasks[task]
    return Span(
        task,
        node.name,
        node.lane,
        issued_s,
        started_s,
        ended_s,
        node.cost.size_bytes,
        node.cost.flops,
    )


def _spans(graph: Graph, *times: tuple[float, float, float]) -> list[Span]:
    """One span a task: (issued, started, ended)."""
    return [_span(graph, task, *when) for task, when in enumerate(times)]


def test_a_trace_keeps_the_last_spans_and_counts_the_rest() -> None:
    trace = Trace(capacity=3)
    spans = [Span(i, f"t{i}", "compute", 0.0, 0.0, 1.0, 0, 0) for i in range(5)]
    for i, span in enumerate(spans):
        assert (len(trace), trace.num_dropped) == (min(i, 3), max(0, i - 3))
        trace.add(span)
    assert list(trace) == spans[2:]
    assert (len(trace), trace.num_dropped) == (3, 2)


def test_a_trace_without_room_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1 span, got 0"):
        Trace(capacity=0)


def _swap(rank: int, *, tiles: int = 2) -> Graph:
    """Tasks: 0 swaps a part with the other rank; 1 works meanwhile; 2 works on what came."""
    g = GraphBuilder(rank, 2)
    own, slot = g.buffer("own", size_bytes=8, initialised=True), g.buffer("slot", size_bytes=8)
    out = g.buffer("out", size_bytes=8, initialised=True)
    g.exchange("swap", sends=[(own, 1 - rank)], recvs=[(slot, 1 - rank)], tag=0)
    for tile in range(tiles):
        g.compute(f"tile {tile}", _WORK, reads=[slot if tile else own], accumulates=[out])
    return g.build()


def test_a_transfer_behind_compute_is_not_exposed() -> None:
    graphs = [_swap(0), _swap(1)]
    traces = [_spans(g, (0, 0, 3), (0, 0, 4), (0, 4, 8)) for g in graphs]
    assert exposed(graphs, traces) == [Idle(0.0, 0.0, 8.0)] * 2


def test_what_sticks_out_of_compute_is_exposed() -> None:
    graphs = [_swap(0), _swap(1)]
    # The wire is busy from 0 to 7, compute until 4 and from 7.5: the half second in between is
    # neither.
    traces = [_spans(g, (0, 0, 7), (0, 0, 4), (7, 7.5, 10)) for g in graphs]
    assert exposed(graphs, traces) == [Idle(3.0, 0.0, 10.0)] * 2


def test_waiting_for_a_late_peer_is_skew_and_not_exposed() -> None:
    graphs = [_swap(0), _swap(1)]
    # Rank 1 posts at 5; from then to 7 the message is on the wire. Rank 0 idles from 2 to 7, rank 1
    # from 6 to 7.
    first = _spans(graphs[0], (0, 0, 7), (0, 0, 2), (7, 7, 9))
    second = _spans(graphs[1], (5, 5, 7), (5, 5, 6), (7, 7, 8))
    assert exposed(graphs, [first, second]) == [Idle(2.0, 3.0, 9.0), Idle(1.0, 0.0, 3.0)]


def test_a_rank_that_starts_late_compares_by_its_own_run() -> None:
    graphs = [_swap(0), _swap(1)]
    first = _spans(graphs[0], (100, 100, 107), (100, 100, 102), (107, 107, 109))
    second = _spans(graphs[1], (105, 105, 107), (105, 105, 106), (107, 107, 108))
    assert exposed(graphs, [first, second]) == [Idle(2.0, 3.0, 9.0), Idle(1.0, 0.0, 3.0)]


def test_idle_time_with_nothing_to_receive_is_neither() -> None:
    g = GraphBuilder(0, 2)
    own = g.buffer("own", size_bytes=8, initialised=True)
    g.exchange("send", sends=[(own, 1)], tag=0)
    g.compute("tile", _WORK, reads=[own], writes=[g.buffer("out")])
    sender = g.build()
    g = GraphBuilder(1, 2)
    g.exchange("receive", recvs=[(g.buffer("slot", size_bytes=8), 0)], tag=0)
    receiver = g.build()
    # Rank 0 idles from 2 to 6 while its own send is under way; rank 1 computes nothing at all.
    idle = exposed(
        [sender, receiver], [_spans(sender, (0, 0, 6), (0, 0, 2)), _spans(receiver, (1, 1, 6))]
    )
    assert idle == [Idle(0.0, 0.0, 6.0), Idle(5.0, 0.0, 5.0)]


def test_overlapping_transfers_count_once() -> None:
    graphs = []
    for rank in range(2):
        g = GraphBuilder(rank, 2)
        own = g.buffer("own", size_bytes=8, initialised=True)
        for tag in range(3):
            g.exchange(
                f"swap {tag}",
                sends=[(own, 1 - rank)],
                recvs=[(g.buffer(f"slot {tag}", size_bytes=8), 1 - rank)],
                tag=tag,
            )
        g.compute("tile", _WORK, reads=[own], writes=[g.buffer("out")])
        graphs.append(g.build())
    # On the wire from 0 to 4, 1 to 3 and 6 to 8; compute from 2 to 3.
    traces = [_spans(g, (0, 0, 4), (1, 1, 3), (6, 6, 8), (2, 2, 3)) for g in graphs]
    assert exposed(graphs, traces) == [Idle(1 + 1 + 1 + 2, 0.0, 8.0)] * 2


def test_skew_before_one_transfer_is_no_skew_while_another_is_on_the_wire() -> None:
    graphs = []
    for rank in range(2):
        g = GraphBuilder(rank, 2)
        own = g.buffer("own", size_bytes=8, initialised=True)
        for tag in range(2):
            g.exchange(
                f"swap {tag}",
                sends=[(own, 1 - rank)],
                recvs=[(g.buffer(f"slot {tag}", size_bytes=8), 1 - rank)],
                tag=tag,
            )
        graphs.append(g.build())
    # Rank 0 posts both at 0; rank 1 the first at 1, the second at 4. The first is on the wire from
    # 1 to 3, the second from 4 to 6.
    first = _spans(graphs[0], (0, 0, 3), (0, 0, 6))
    second = _spans(graphs[1], (1, 1, 3), (4, 4, 6))
    assert exposed(graphs, [first, second]) == [Idle(4.0, 2.0, 6.0), Idle(4.0, 0.0, 5.0)]


def _ring(rank: int, *, receives_from: int, sends_to: int) -> Graph:
    """Tasks of three ranks in a ring: 0 exchanges, 1 works meanwhile."""
    g = GraphBuilder(rank, 3)
    own, slot = g.buffer("own", size_bytes=8, initialised=True), g.buffer("slot", size_bytes=8)
    g.exchange("hop", sends=[(own, sends_to)], recvs=[(slot, receives_from)], tag=0)
    g.compute("tile", _WORK, reads=[own], writes=[g.buffer("out")])
    return g.build()


def test_a_receiver_that_is_late_is_skew_for_the_sender() -> None:
    graphs = [_ring(r, receives_from=(r + 2) % 3, sends_to=(r + 1) % 3) for r in range(3)]
    # Rank 0 sends to rank 1, which posts at 5. Rank 2, from which rank 0 receives, posts at 0. From
    # 5 to 7 messages are on the wire. Ranks 0 and 2 idle from 2.
    traces = [_spans(g, (0, 0, 7), (0, 0, 2)) for g in graphs]
    traces[1] = _spans(graphs[1], (5, 5, 7), (0, 0, 5))
    found = exposed(graphs, traces)
    assert found == [Idle(2.0, 3.0, 7.0), Idle(2.0, 0.0, 7.0), Idle(2.0, 3.0, 7.0)]
    own = waits(traces, match_messages(graphs))[0]
    assert own == [Wait(2, 5, False, 0, 1, 5), Wait(5, 7, True, 0, 1, 5)]


def test_a_message_that_was_taken_at_once_waits_for_no_receiver() -> None:
    graphs = [_ring(r, receives_from=(r + 2) % 3, sends_to=(r + 1) % 3) for r in range(3)]
    # Rank 0 has its message at 4, and its own has left, though rank 1 posts at 5.
    traces = [_spans(g, (0, 0, 4), (0, 0, 2)) for g in graphs]
    traces[1] = _spans(graphs[1], (5, 5, 6), (0, 0, 5))
    assert exposed(graphs, traces)[0] == Idle(2.0, 0.0, 4.0)


def test_another_lane_may_be_the_one_that_idles() -> None:
    graphs = [_swap(0, tiles=1), _swap(1, tiles=1)]
    traces = [_spans(g, (0, 0, 6), (0, 0, 2)) for g in graphs]
    assert exposed(graphs, traces) == [Idle(4.0, 0.0, 6.0)] * 2
    assert exposed(graphs, traces, compute_lane="a second device") == [Idle(6.0, 0.0, 6.0)] * 2


def test_an_incomplete_trace_is_refused() -> None:
    graphs = [_swap(0), _swap(1)]
    whole = _spans(graphs[1], (0, 0, 1), (0, 0, 1), (0, 1, 2))
    with pytest.raises(InputError, match="rank 0 has 2 spans for 3 tasks"):
        exposed(graphs, [_spans(graphs[0], (0, 0, 1), (0, 0, 1)), whole])


def test_a_rank_without_tasks_is_never_idle() -> None:
    assert exposed([GraphBuilder(0, 1).build()], [[]]) == [Idle(0.0, 0.0, 0.0)]
