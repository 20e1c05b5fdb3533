"""The local transport and its control group: rendezvous, order, sizes, cancelling, and many threads
at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from burst_rt.errors import InputError, ProtocolError
from burst_rt.transport import (
    Completion,
    ControlGroup,
    LocalTransport,
    LocalWorld,
    Notice,
    NoticeKind,
    Pending,
    Transport,
)

_DEADLINE_S = 30.0


def _pair() -> tuple[LocalTransport, LocalTransport]:
    world = LocalWorld(2)
    return world.transport(0), world.transport(1)


def _bytes(text: bytes) -> memoryview:
    return memoryview(bytearray(text))


def _empty(size: int) -> memoryview:
    return memoryview(bytearray(b"?" * size))


def _await(transport: Transport, handles: set[int]) -> None:
    """Polls until all these have completed, and nothing else."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while handles:
        assert time.monotonic() < deadline_s, f"{handles} never completed"
        for done in transport.poll():
            handles.remove(done.handle)
        time.sleep(0)


def _run_together(mains: Sequence[Callable[[], None]]) -> None:
    """Runs functions in a thread each; raises what one of them raised. They end by themselves: all
    they wait for has a deadline.
    """
    with ThreadPoolExecutor(len(mains)) as pool:
        for running in [pool.submit(main) for main in mains]:
            running.result()


@pytest.mark.parametrize("receive_first", [True, False])
def test_a_message_moves_once_both_sides_are_there(receive_first: bool) -> None:
    first, second = _pair()
    source, target = _bytes(b"hello"), _empty(5)
    if receive_first:
        recv = second.irecv(target, 0, 7)
        assert second.poll() == []
        assert bytes(target) == b"?????"
        send = first.isend(source, 1, 7)
    else:
        send = first.isend(source, 1, 7)
        assert first.poll() == []
        assert bytes(target) == b"?????"
        recv = second.irecv(target, 0, 7)
    assert first.poll() == [Completion(send)]
    assert second.poll() == [Completion(recv)]
    assert bytes(target) == b"hello"
    assert first.poll() == second.poll() == []
    assert (first.bytes_sent, first.bytes_received, second.bytes_sent, second.bytes_received) == (
        5,
        0,
        0,
        5,
    )


def test_bytes_are_counted_when_a_message_has_completed() -> None:
    first, second = _pair()
    first.isend(_bytes(b"12345678"), 1, 0)
    assert first.bytes_sent == 0
    second.irecv(_empty(8), 0, 0)
    assert second.bytes_received == 0
    first.poll()
    second.poll()
    assert (first.bytes_sent, second.bytes_received) == (8, 8)


def test_messages_with_one_peer_and_tag_match_in_order() -> None:
    first, second = _pair()
    targets = [_empty(1) for _ in range(6)]
    for i in range(3):
        first.isend(_bytes(b"%d" % i), 1, 4)
        second.irecv(targets[i], 0, 4)
    for i in range(3, 6):
        second.irecv(targets[i], 0, 4)
    for i in range(3, 6):
        first.isend(_bytes(b"%d" % i), 1, 4)
    assert [bytes(target) for target in targets] == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_tags_peers_and_directions_do_not_mix() -> None:
    world = LocalWorld(3)
    ends = [world.transport(rank) for rank in range(3)]
    targets = {(source, tag): _empty(2) for source in (1, 2) for tag in (0, 1)}
    for (source, tag), target in targets.items():
        ends[0].irecv(target, source, tag)
    back = _empty(2)
    ends[1].irecv(back, 0, 0)
    for tag in (1, 0):
        for source in (2, 1):
            ends[source].isend(_bytes(b"%d%d" % (source, tag)), 0, tag)
    assert {key: bytes(target) for key, target in targets.items()} == {
        (s, t): b"%d%d" % (s, t) for s, t in targets
    }
    assert bytes(back) == b"??"


def test_an_empty_message_completes() -> None:
    first, second = _pair()
    send, recv = first.isend(_empty(0), 1, 0), second.irecv(_empty(0), 0, 0)
    assert (first.poll(), second.poll()) == ([Completion(send)], [Completion(recv)])


@pytest.mark.parametrize(("sent", "expected"), [(3, 5), (5, 3), (0, 1), (1, 0)])
def test_a_message_of_the_wrong_size_is_found_by_the_receiver(sent: int, expected: int) -> None:
    first, second = _pair()
    target = _empty(expected)
    second.irecv(target, 0, 0)
    first.isend(_bytes(b"x" * sent), 1, 0)
    with pytest.raises(
        ProtocolError, match=f"rank 1: expected {expected} bytes from rank 0, got {sent}"
    ) as caught:
        second.poll()
    assert (caught.value.rank, caught.value.peer) == (1, 0)
    assert bytes(target) == b"?" * expected
    assert second.bytes_received == 0


@pytest.mark.parametrize("outgoing", [True, False])
def test_what_was_cancelled_neither_moves_nor_completes(outgoing: bool) -> None:
    first, second = _pair()
    target = _empty(1)
    if outgoing:
        first.isend(_bytes(b"x"), 1, 0)
        first.cancel()
        second.irecv(target, 0, 0)
    else:
        second.irecv(target, 0, 0)
        second.cancel()
        first.isend(_bytes(b"x"), 1, 0)
    assert first.poll() == second.poll() == []
    assert bytes(target) == b"?"


def test_a_message_that_moved_before_it_was_cancelled_is_not_reported() -> None:
    first, second = _pair()
    send = first.isend(_bytes(b"x"), 1, 0)
    second.irecv(_empty(1), 0, 0)
    second.cancel()
    assert second.poll() == []
    assert first.poll() == [Completion(send)]


def test_cancelling_takes_back_only_ones_own() -> None:
    world = LocalWorld(3)
    ends = [world.transport(rank) for rank in range(3)]
    targets = [_empty(1), _empty(1)]
    ends[1].irecv(targets[0], 0, 0)
    ends[2].irecv(targets[1], 0, 0)
    ends[1].cancel()
    for peer in (1, 2):
        ends[0].isend(_bytes(b"x"), peer, 0)
    assert [bytes(target) for target in targets] == [b"?", b"x"]
    # A transport can be used again after it gave up, and what its peer still has posted meets the
    # new messages.
    again = _empty(1)
    ends[1].irecv(again, 0, 0)
    assert bytes(again) == b"x"


def test_closing_gives_up_what_is_under_way() -> None:
    first, second = _pair()
    second.irecv(target := _empty(1), 0, 0)
    second.close()
    first.isend(_bytes(b"x"), 1, 0)
    assert bytes(target) == b"?"


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(InputError, match="1 to 4096 ranks, got 0"):
        LocalWorld(0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_threads_hammering_lose_mix_up_and_duplicate_nothing(world_size: int) -> None:
    """Every rank sends every rank (itself too) numbered messages on several tags, in bursts of a
    random mix of sends and receives.
    """
    num_tags, num_messages = 3, 40
    world = LocalWorld(world_size)
    counted: dict[int, tuple[int, int]] = {}

    def main(rank: int) -> None:
        rng = random.Random(rank)
        end = world.transport(rank)
        flows = [
            (outgoing, peer, tag)
            for outgoing in (True, False)
            for peer in range(world_size)
            for tag in range(num_tags)
        ]
        progress = dict.fromkeys(flows, 0)
        received: dict[tuple[int, int, int], memoryview] = {}
        handles: set[int] = set()
        deadline_s = time.monotonic() + _DEADLINE_S
        while flows or handles:
            assert time.monotonic() < deadline_s
            for _ in range(min(len(flows), rng.randrange(8))):
                flow = outgoing, peer, tag = rng.choice(flows)
                number = progress[flow]
                if outgoing:
                    handles.add(
                        end.isend(
                            _bytes(b"%d %d %d %d" % (rank, peer, tag, 1000 + number)), peer, tag
                        )
                    )
                else:
                    received[peer, tag, number] = _empty(len(b"%d %d %d 1000" % (peer, rank, tag)))
                    handles.add(end.irecv(received[peer, tag, number], peer, tag))
                progress[flow] += 1
                if progress[flow] == num_messages:
                    flows.remove(flow)
            for done in end.poll():
                handles.remove(done.handle)
            time.sleep(0)
        for (peer, tag, number), target in received.items():
            assert bytes(target) == b"%d %d %d %d" % (peer, rank, tag, 1000 + number)
        assert len(received) == world_size * num_tags * num_messages
        counted[rank] = end.bytes_sent, end.bytes_received

    _run_together([partial(main, rank) for rank in range(world_size)])
    total = world_size**2 * num_tags * num_messages * len(b"0 0 0 1000")
    assert (sum(sent for sent, _ in counted.values()), sum(got for _, got in counted.values())) == (
        total,
        total,
    )


# The control group.


def _finish(*pending: Pending) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    for one in pending:
        while not one.test():
            assert time.monotonic() < deadline_s, "a collective never ended"
            time.sleep(0)
        assert one.test(), "a collective that has ended stays so"


def _on_all(world_size: int, main: Callable[[ControlGroup], None]) -> None:
    world = LocalWorld(world_size)
    _run_together([partial(main, world.control(rank)) for rank in range(world_size)])


def test_a_collective_ends_only_when_all_have_joined() -> None:
    world = LocalWorld(3)
    groups = [world.control(rank) for rank in range(3)]
    pending = [group.allgather(b"%d" % group.rank) for group in groups[:2]]
    assert [one.test() for one in pending] == [False, False]
    pending.append(groups[2].allgather(b"2"))
    assert [one.test() for one in pending] == [True] * 3
    assert [one.result() for one in pending] == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_collectives_over_threads(world_size: int) -> None:
    def main(group: ControlGroup) -> None:
        for number in range(50):
            highest = group.allreduce_max([group.rank, -group.rank, number, -(2**62) + group.rank])
            _finish(highest)
            assert highest.result() == [world_size - 1, 0, number, -(2**62) + world_size - 1]
            gathered = group.allgather(b"x" * (group.rank + number))
            _finish(gathered)
            assert gathered.result() == [b"x" * (rank + number) for rank in range(world_size)]

    _on_all(world_size, main)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_sum_is_in_place_and_has_the_same_bits_on_every_rank(world_size: int, dtype: str) -> None:
    inputs = [
        (np.random.default_rng(rank).standard_normal((7, 5)) * 10**rank).astype(dtype)
        for rank in range(world_size)
    ]
    results: dict[int, bytes] = {}

    def main(group: ControlGroup) -> None:
        array = inputs[group.rank].copy()
        _finish(group.allreduce_sum(array))
        results[group.rank] = array.tobytes()

    _on_all(world_size, main)
    assert set(results.values()) == {results[0]}
    expected = sum(inputs[1:], start=inputs[0].astype(np.float64))
    assert np.allclose(np.frombuffer(results[0], dtype).reshape(7, 5), expected, rtol=1e-5)


def test_notices_arrive_in_order_once_and_at_the_right_rank() -> None:
    world = LocalWorld(3)
    groups = [world.control(rank) for rank in range(3)]
    assert groups[1].notices() == []
    groups[0].notify(1, NoticeKind.ALIVE, 5)
    groups[0].notify(1, NoticeKind.ALIVE, 6)
    groups[2].notify(1, NoticeKind.LEFT)
    groups[1].notify(2, NoticeKind.ALIVE, -1)
    assert groups[1].notices() == [
        Notice(0, NoticeKind.ALIVE, 5),
        Notice(0, NoticeKind.ALIVE, 6),
        Notice(2, NoticeKind.LEFT, 0),
    ]
    assert groups[1].notices() == []
    assert groups[2].notices() == [Notice(1, NoticeKind.ALIVE, -1)]
    assert groups[0].notices() == []


def test_no_notice_is_lost_while_threads_write() -> None:
    world, num_notices = LocalWorld(4), 500
    received: list[Notice] = []

    def write(rank: int) -> None:
        group = world.control(rank)
        for value in range(num_notices):
            group.notify(0, NoticeKind.ALIVE, value)

    def read() -> None:
        group = world.control(0)
        deadline_s = time.monotonic() + _DEADLINE_S
        while len(received) < 3 * num_notices:
            assert time.monotonic() < deadline_s
            received.extend(group.notices())
            time.sleep(0)

    _run_together([read, *(partial(write, rank) for rank in (1, 2, 3))])
    for rank in (1, 2, 3):
        assert [notice.value for notice in received if notice.peer == rank] == list(
            range(num_notices)
        )
