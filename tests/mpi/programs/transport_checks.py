"""Rank program: the MPI transport and its control group on however many ranks it is started with.
Ends with exit code 0 if all is well.

It prints each check that has passed. Run it under `burst-rt run`, so that a failed check on one
rank ends the job.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from mpi4py import MPI

from burst_rt.errors import ConfigError, ProtocolError, Stalled
from burst_rt.transport import ControlGroup, Notice, NoticeKind, Pending, Transport
from burst_rt.transport.mpi import MpiControl, MpiTransport, duplicate

_WORLD = MPI.COMM_WORLD
_RANK, _SIZE = _WORLD.rank, _WORLD.size
_DEADLINE_S = 20.0


def _transport(piece_bytes: int | None = None) -> MpiTransport:
    comm = duplicate(_WORLD, _DEADLINE_S)
    return (
        MpiTransport(comm) if piece_bytes is None else MpiTransport(comm, piece_bytes=piece_bytes)
    )


def _control(piece_bytes: int = 1 << 30) -> MpiControl:
    return MpiControl(duplicate(_WORLD, _DEADLINE_S), piece_bytes=piece_bytes)


def _await(transport: Transport, handles: Iterable[int]) -> None:
    """Polls until all these have completed, and nothing else."""
    left = set(handles)
    deadline_s = time.monotonic() + _DEADLINE_S
    while left:
        assert time.monotonic() < deadline_s, f"rank {_RANK}: {left} never completed"
        for done in transport.poll():
            left.remove(done.handle)
        time.sleep(0)


def _finish(pending: Pending) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not pending.test():
        assert time.monotonic() < deadline_s, f"rank {_RANK}: a collective never ended"
        time.sleep(0)
    assert pending.test(), "a collective that has ended stays so"


def _payload(source: int, destination: int, number: int, size: int) -> bytes:
    return np.random.default_rng([source, destination, number]).bytes(size)


def _all_to_all(
    transport: MpiTransport, sizes: list[int], *, sends_first: bool, tag_of: Callable[[int], int]
) -> None:
    """Every rank sends every rank, itself too, a message of each size."""
    slots = {
        (peer, i): memoryview(bytearray(b"?" * (size + 1)))
        for peer in range(_SIZE)
        for i, size in enumerate(sizes)
    }
    handles: list[int] = []

    def receive() -> None:
        handles.extend(
            transport.irecv(slot[:-1], peer, tag_of(i)) for (peer, i), slot in slots.items()
        )

    def send() -> None:
        for peer in range(_SIZE):
            for i, size in enumerate(sizes):
                handles.append(
                    transport.isend(
                        memoryview(bytearray(_payload(_RANK, peer, i, size))), peer, tag_of(i)
                    )
                )

    before = transport.bytes_sent, transport.bytes_received
    for start in (send, receive) if sends_first else (receive, send):
        start()
    assert len(set(handles)) == len(handles)
    _await(transport, handles)
    for (peer, i), slot in slots.items():
        assert bytes(slot) == _payload(peer, _RANK, i, sizes[i]) + b"?", (
            f"message {i} from rank {peer}"
        )
    total = _SIZE * sum(sizes)
    assert (transport.bytes_sent - before[0], transport.bytes_received - before[1]) == (
        total,
        total,
    )
    assert transport.poll() == []


_SMALL = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 100]
# Past the limits up to which an MPI sends a message before its receive is there.
_LARGE = [1000, 4096, 65_537, 300_001]


def check_messages_of_many_sizes_and_tags() -> None:
    transport = _transport()
    assert (transport.rank, transport.size) == (_RANK, _SIZE)
    for sends_first in (True, False):
        _all_to_all(transport, _SMALL + _LARGE, sends_first=sends_first, tag_of=lambda i: 3 * i)
    transport.close()


def check_messages_of_one_tag_keep_their_order() -> None:
    transport = _transport()
    for sends_first in (True, False):
        _all_to_all(transport, _LARGE + _SMALL, sends_first=sends_first, tag_of=lambda i: 5)
    transport.close()


def check_messages_in_pieces() -> None:
    for piece_bytes, sizes in (
        (1, [0, 1, 2, 5]),
        (8, _SMALL),
        (7, _SMALL),
        (1000, _LARGE),
        (65_536, _LARGE),
    ):
        transport = _transport(piece_bytes)
        _all_to_all(transport, sizes, sends_first=True, tag_of=lambda i: i)
        _all_to_all(transport, sizes, sends_first=False, tag_of=lambda i: 0)
        transport.close()


def check_starting_and_polling_never_wait_for_the_other_side() -> None:
    if _SIZE == 1:
        return
    transport = _transport()
    peer, size = _RANK ^ 1, 300_001
    if peer < _SIZE:
        slot = memoryview(bytearray(size))
        handles = {transport.irecv(slot, peer, 0)}
        assert transport.poll() == []
        # If any of this waited for the other side, both ranks would wait here for ever.
        _WORLD.send("nothing was sent yet", peer)
        _WORLD.recv(source=peer)
        handles.add(transport.isend(memoryview(bytearray(_payload(_RANK, peer, 0, size))), peer, 0))
        _WORLD.send("sent", peer)
        _WORLD.recv(source=peer)
        _await(transport, handles)
        assert slot == _payload(peer, _RANK, 0, size)
    transport.close()


def _check_wrong_size(sent: int, expected: int, piece_bytes: int | None) -> None:
    # A communicator that has seen an error is not used again, so each trial has its own, which
    # stays open.
    transport = _transport(piece_bytes)
    if _RANK == 0:
        _await(transport, [transport.isend(memoryview(bytearray(sent)), _SIZE - 1, 0)])
    elif _RANK == _SIZE - 1:
        handle = transport.irecv(memoryview(bytearray(expected)), 0, 0)
        told = (
            f"expected {expected} bytes from rank 0, got {sent}"
            if sent < expected and piece_bytes is None
            else ""
        )
        with pytest.raises(ProtocolError, match=f"rank {_RANK}: {told}") as caught:
            _await(transport, [handle])
        assert caught.value.rank == _RANK
        transport.cancel()
    _WORLD.Barrier()


def check_wrong_sizes_are_found_by_the_receiver() -> None:
    if _SIZE == 1:
        return
    for sent, expected in ((3, 8), (0, 8), (8, 3), (100_000, 99_999)):
        _check_wrong_size(sent, expected, None)
    for sent, expected in ((11, 15), (15, 11), (3, 7), (7, 3)):
        _check_wrong_size(sent, expected, 4)


def check_a_tag_beyond_the_librarys_limit_is_refused() -> None:
    transport = _transport()
    limit = _WORLD.Get_attr(MPI.TAG_UB)
    assert limit is not None
    for start in (transport.isend, transport.irecv):
        with pytest.raises(
            ConfigError, match=f"tag {limit + 1}; this MPI allows tags up to {limit}"
        ):
            start(memoryview(bytearray(1)), 0, limit + 1)
    assert transport.poll() == []
    transport.close()


def check_the_programs_own_messages_do_not_match_ours() -> None:
    if _SIZE == 1:
        return
    ours, others = _transport(), _transport()
    right, left = (_RANK + 1) % _SIZE, (_RANK - 1) % _SIZE
    slots = [memoryview(bytearray(4)) for _ in range(2)]
    handles = [ours.irecv(slots[0], left, 1)], [others.irecv(slots[1], left, 1)]
    _WORLD.Send(b"user", right, 1)
    handles[1].append(others.isend(memoryview(b"thei"), right, 1))
    handles[0].append(ours.isend(memoryview(b"ours"), right, 1))
    _await(ours, handles[0])
    _await(others, handles[1])
    user = bytearray(4)
    _WORLD.Recv(user, left, 1)
    assert (bytes(slots[0]), bytes(slots[1]), bytes(user)) == (b"ours", b"thei", b"user")
    ours.close()
    others.close()


def check_a_part_of_the_ranks_can_have_a_transport() -> None:
    half = MPI.Intracomm(_WORLD.Split(_RANK % 2, key=-_RANK))
    transport = MpiTransport(duplicate(half, _DEADLINE_S))
    assert (transport.rank, transport.size) == (half.rank, half.size)
    slot = memoryview(bytearray(1))
    left, right = (half.rank - 1) % half.size, (half.rank + 1) % half.size
    _await(
        transport,
        [transport.irecv(slot, left, 0), transport.isend(memoryview(bytes([_RANK])), right, 0)],
    )
    expected = half.allgather(_RANK)[left]
    assert slot[0] == expected
    transport.close()
    half.Free()


def check_cancelled_receives_take_nothing() -> None:
    if _SIZE == 1:
        return
    transport = _transport()
    slot = memoryview(bytearray(b"?"))
    transport.irecv(slot, (_RANK - 1) % _SIZE, 0)
    transport.cancel()
    _WORLD.Barrier()
    again = _transport()
    other = memoryview(bytearray(b"?"))
    right = (_RANK + 1) % _SIZE
    _await(
        again, [again.irecv(other, (_RANK - 1) % _SIZE, 0), again.isend(memoryview(b"x"), right, 0)]
    )
    assert (bytes(slot), bytes(other)) == (b"?", b"x")
    again.close()


def check_reductions() -> None:
    _reduce(_control())
    _reduce(_control(piece_bytes=1000))


def _reduce(group: MpiControl) -> None:
    assert (group.rank, group.size) == (_RANK, _SIZE)
    for number in range(30):
        # The last rank comes late, a different one each time.
        if number % _SIZE == _RANK:
            time.sleep(0.001)
        pending = group.allreduce_max([_RANK, -_RANK, number, 2**62 + _RANK, -(2**62) - _RANK])
        _finish(pending)
        assert pending.result() == [_SIZE - 1, 0, number, 2**62 + _SIZE - 1, -(2**62)]
    for dtype in ("float32", "float64", "int64"):
        for length in (1, 5, 1000, 100_001):
            array = np.empty(length, dtype)
            inputs = [
                (np.random.default_rng([rank, length]).standard_normal(length) * 10.0**rank).astype(
                    dtype
                )
                for rank in range(_SIZE)
            ]
            for _ in range(2):
                array[:] = inputs[_RANK]
                _finish(group.allreduce_sum(array))
                bits = group.allgather(array.tobytes())
                _finish(bits)
                assert set(bits.result()) == {array.tobytes()}, f"{dtype} sums differ between ranks"
            expected = sum(
                (x.astype(np.float64) for x in inputs[1:]), start=inputs[0].astype(np.float64)
            )
            scale = sum(
                (np.abs(x.astype(np.float64)) for x in inputs[1:]),
                start=np.abs(inputs[0].astype(np.float64)),
            )
            assert (np.abs(array - expected) <= 1e-6 * scale).all()
    group.close()


def check_gathers_of_different_lengths() -> None:
    _gather(_control())
    _gather(_control(piece_bytes=999))


def _gather(group: MpiControl) -> None:
    for lengths in (
        [0] * _SIZE,
        [1] * _SIZE,
        [3 * r for r in range(_SIZE)],
        [5 * (_SIZE - r) for r in range(_SIZE)],
        [100_000 * r for r in range(_SIZE)],
    ):
        pending = group.allgather(_payload(_RANK, 0, 0, lengths[_RANK]))
        _finish(pending)
        assert pending.result() == [
            _payload(rank, 0, 0, length) for rank, length in enumerate(lengths)
        ]
    group.close()


def _read_notices(group: ControlGroup, num: int) -> list[Notice]:
    read: list[Notice] = []
    deadline_s = time.monotonic() + _DEADLINE_S
    while len(read) < num:
        assert time.monotonic() < deadline_s, f"rank {_RANK} read {len(read)} of {num} notices"
        read.extend(group.notices())
        time.sleep(0)
    return read


def check_notices() -> None:
    group, transport = _control(), _transport()
    assert group.notices() == []
    _WORLD.Barrier()
    peers = [peer for peer in range(_SIZE) if peer != _RANK]
    # A data message with the tag that notices have must not be taken for one.
    handles = [
        transport.irecv(slot := memoryview(bytearray(16)), _RANK, 1),
        transport.isend(memoryview(bytes(range(16))), _RANK, 1),
    ]
    num = 100
    for value in range(num):
        for peer in peers:
            group.notify(peer, NoticeKind.ALIVE, value * 2**40)
    for peer in peers:
        group.notify(peer, NoticeKind.LEFT, _RANK, f"rank {_RANK}: größer")
    read = _read_notices(group, (num + 1) * len(peers))
    for peer in peers:
        expected = [Notice(peer, NoticeKind.ALIVE, value * 2**40) for value in range(num)]
        expected.append(Notice(peer, NoticeKind.LEFT, peer, f"rank {peer}: größer"))
        assert [notice for notice in read if notice[0] == peer] == expected
    _await(transport, handles)
    assert slot == bytes(range(16))
    _WORLD.Barrier()
    # Notices and collectives do not disturb each other.
    for peer in peers:
        group.notify(peer, NoticeKind.ALIVE, 7)
    pending = group.allreduce_max([_RANK])
    _finish(pending)
    assert pending.result() == [_SIZE - 1]
    assert sorted(_read_notices(group, len(peers))) == [
        Notice(peer, NoticeKind.ALIVE, 7) for peer in peers
    ]
    _WORLD.Barrier()
    assert group.notices() == []
    transport.close()
    group.close()


def check_a_rank_may_leave_while_others_still_write_to_it() -> None:
    group = _control()
    if _RANK == 0:
        group.close()
    _WORLD.Barrier()
    if _RANK != 0:
        group.notify(0, NoticeKind.LEFT)
        group.close()


def check_late_messages_find_the_memory_they_were_given() -> None:
    """Rank 0 lets go of everything, and the others write to it only then."""
    for let_go, write in (
        (lambda control, _: control.close(), _notify),
        (lambda *_: None, _notify),  # not even closed
        (
            lambda control, _: control.allreduce_max([0] * 5),
            lambda control, _: _try(control.allreduce_max([_RANK] * 5)),
        ),
        (
            lambda control, _: control.allgather(b"x" * 9),
            lambda control, _: _try(control.allgather(b"x" * 9)),
        ),
        (
            _receive_from_all,
            lambda _, transport: _await(transport, [transport.isend(memoryview(bytes(48)), 0, 0)]),
        ),
    ):
        _late(let_go, write)


def _late(
    let_go: Callable[[MpiControl, MpiTransport], object],
    write: Callable[[MpiControl, MpiTransport], object],
) -> None:
    control, transport = _control(), _transport()
    if _RANK != 0:
        _WORLD.Barrier()
        write(control, transport)
        _WORLD.Barrier()
        return
    let_go(control, transport)
    del control, transport
    gc.collect()
    # Of the sizes that may have been freed: some of them are where that was.
    words = [np.full(size, -7, np.int64) for size in (2, 5, _SIZE) for _ in range(500)]
    blocks = [bytearray(b"?" * size) for size in (48, 512) for _ in range(1000)]
    _WORLD.Barrier()
    _WORLD.Barrier()
    for _ in range(200):
        _WORLD.Iprobe()  # moves whatever has arrived
    assert all((array == -7).all() for array in words)
    assert all(block == b"?" * len(block) for block in blocks)


def _notify(control: MpiControl, _: object) -> None:
    control.notify(0, NoticeKind.LEFT, _RANK)


def _try(pending: Pending) -> None:
    """It need not end: rank 0 does not look at it again."""
    for _ in range(1000):
        pending.test()


def _receive_from_all(_: object, transport: MpiTransport) -> None:
    for peer in range(1, _SIZE):
        transport.irecv(memoryview(bytearray(48)), peer, 0)


def check_closing_waits_for_nobody() -> None:
    transport = _transport()
    if _RANK == 0:
        transport.close()
        for peer in range(1, _SIZE):
            _WORLD.send("closed", peer)
    else:
        _WORLD.recv(source=0)
        transport.close()


def check_duplicate_refuses_what_is_no_intracommunicator() -> None:
    wrong: list[MPI.Comm] = [MPI.COMM_NULL]
    if _SIZE > 1:
        local = MPI.Intracomm(_WORLD.Split(min(_RANK, 1), key=_RANK))
        wrong.append(local.Create_intercomm(0, _WORLD, 1 if _RANK == 0 else 0, 3))
    for comm in wrong:
        with pytest.raises(ConfigError, match="intracommunicator"):
            duplicate(comm, 1.0)  # type: ignore[arg-type]


def check_duplicate_gives_up_on_a_rank_that_never_comes() -> None:
    """Last of all: what was begun here cannot be taken back."""
    if _SIZE == 1:
        return
    timeout_s = 0.3
    if _RANK != 0:
        began_s = time.monotonic()
        with pytest.raises(
            Stalled, match=f"rank {_RANK} of {_SIZE} waited 0.3 s in burst_rt.init"
        ) as caught:
            duplicate(_WORLD, timeout_s)
        assert timeout_s <= time.monotonic() - began_s < _DEADLINE_S
        assert caught.value.rank == _RANK
        _WORLD.send("gave up", 0)
        _WORLD.recv(source=0)
        return
    for peer in range(1, _SIZE):
        _WORLD.recv(source=peer)
    # It comes at last: everyone can then leave MPI in peace.
    duplicate(_WORLD, _DEADLINE_S).Free()
    for peer in range(1, _SIZE):
        _WORLD.send("came", peer)


def main() -> None:
    checks = [check for name, check in globals().items() if name.startswith("check_")]
    for check in checks:
        check()
        _WORLD.Barrier()
        if _RANK == 0:
            print(check.__name__, flush=True)


if __name__ == "__main__":
    main()
