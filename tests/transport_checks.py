"""What every transport between processes and its control group must do, on any number of ranks.

`mpi_checks.py` and `group_checks.py` are the programs. They print each check that has passed, and
end with exit code 0 if all is well. Run them under `burst-rt run` and torchrun, so that a failed
check on one rank ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from checked_worlds import DEADLINE_S, this_world

from burst_rt.errors import ProtocolError
from burst_rt.transport import ControlGroup, Notice, NoticeKind, Pending, Transport

WORLD = this_world()
_RANK, _SIZE = WORLD.rank, WORLD.size
_transport, _control = WORLD.transport, WORLD.control


def wait_for(transport: Transport, handles: Iterable[int]) -> None:
    """Polls until all these have completed, and nothing else."""
    left = set(handles)
    deadline_s = time.monotonic() + DEADLINE_S
    while left:
        assert time.monotonic() < deadline_s, f"rank {_RANK}: {left} never completed"
        for done in transport.poll():
            left.remove(done.handle)
        time.sleep(0)


def finish(pending: Pending) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not pending.test():
        assert time.monotonic() < deadline_s, f"rank {_RANK}: a collective never ended"
        time.sleep(0)
    assert pending.test(), "a collective that has ended stays so"


def _payload(source: int, destination: int, number: int, size: int) -> bytes:
    return np.random.default_rng([source, destination, number]).bytes(size)


def all_to_all(
    transport: Transport, sizes: list[int], *, sends_first: bool, tag_of: Callable[[int], int]
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
    wait_for(transport, handles)
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


SMALL = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 100]
# Past the limits up to which an MPI sends a message before its receive is there.
LARGE = [1000, 4096, 65_537, 300_001]


def check_messages_of_many_sizes_and_tags() -> None:
    transport = _transport()
    assert (transport.rank, transport.size) == (_RANK, _SIZE)
    for sends_first in (True, False):
        all_to_all(transport, SMALL + LARGE, sends_first=sends_first, tag_of=lambda i: 3 * i)
    transport.close()


def check_messages_of_one_tag_keep_their_order() -> None:
    transport = _transport()
    for sends_first in (True, False):
        all_to_all(transport, LARGE + SMALL, sends_first=sends_first, tag_of=lambda i: 5)
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
        WORLD.tell(peer)
        WORLD.hear(peer)
        handles.add(transport.isend(memoryview(bytearray(_payload(_RANK, peer, 0, size))), peer, 0))
        WORLD.tell(peer)
        WORLD.hear(peer)
        wait_for(transport, handles)
        assert slot == _payload(peer, _RANK, 0, size)
    transport.close()


def meet_wrong_size(transport: Transport, sent: int, expected: int, told: str) -> None:
    """A transport that has seen an error is not used again, and stays open."""
    if _RANK == 0:
        wait_for(transport, [transport.isend(memoryview(bytearray(sent)), _SIZE - 1, 0)])
    elif _RANK == _SIZE - 1:
        handle = transport.irecv(memoryview(bytearray(expected)), 0, 0)
        with pytest.raises(ProtocolError, match=f"rank {_RANK}: {told}") as caught:
            wait_for(transport, [handle])
        assert caught.value.rank == _RANK
        transport.cancel()
    WORLD.barrier()


def check_wrong_sizes_are_found_by_the_receiver() -> None:
    if _SIZE == 1:
        return
    for sent, expected in ((3, 8), (0, 8), (8, 3), (100_000, 99_999)):
        # MPI itself does not say how large a message was that did not fit.
        told = f"expected {expected} bytes from rank 0, got {sent}" if sent < expected else ""
        meet_wrong_size(_transport(), sent, expected, told)


def check_cancelled_receives_take_nothing() -> None:
    if _SIZE == 1:
        return
    transport = _transport()
    slot = memoryview(bytearray(b"?"))
    transport.irecv(slot, (_RANK - 1) % _SIZE, 0)
    transport.cancel()
    WORLD.barrier()
    again = _transport()
    other = memoryview(bytearray(b"?"))
    right = (_RANK + 1) % _SIZE
    wait_for(
        again, [again.irecv(other, (_RANK - 1) % _SIZE, 0), again.isend(memoryview(b"x"), right, 0)]
    )
    assert (bytes(slot), bytes(other)) == (b"?", b"x")
    again.close()


def check_reductions() -> None:
    reduce_right(_control())


def reduce_right(group: ControlGroup) -> None:
    assert (group.rank, group.size) == (_RANK, _SIZE)
    for number in range(30):
        # The last rank comes late, a different one each time.
        if number % _SIZE == _RANK:
            time.sleep(0.001)
        pending = group.allreduce_max([_RANK, -_RANK, number, 2**62 + _RANK, -(2**62) - _RANK])
        finish(pending)
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
                finish(group.allreduce_sum(array))
                bits = group.allgather(array.tobytes())
                finish(bits)
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
    gather_right(_control())


def gather_right(group: ControlGroup) -> None:
    for lengths in (
        [0] * _SIZE,
        [1] * _SIZE,
        [3 * r for r in range(_SIZE)],
        [5 * (_SIZE - r) for r in range(_SIZE)],
        [100_000 * r for r in range(_SIZE)],
    ):
        pending = group.allgather(_payload(_RANK, 0, 0, lengths[_RANK]))
        finish(pending)
        assert pending.result() == [
            _payload(rank, 0, 0, length) for rank, length in enumerate(lengths)
        ]
    group.close()


def _read_notices(group: ControlGroup, num: int) -> list[Notice]:
    read: list[Notice] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(read) < num:
        assert time.monotonic() < deadline_s, f"rank {_RANK} read {len(read)} of {num} notices"
        read.extend(group.notices())
        time.sleep(0)
    return read


def check_notices() -> None:
    group, transport = _control(), _transport()
    assert group.notices() == []
    WORLD.barrier()
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
    wait_for(transport, handles)
    assert slot == bytes(range(16))
    WORLD.barrier()
    # Notices and collectives do not disturb each other.
    for peer in peers:
        group.notify(peer, NoticeKind.ALIVE, 7)
    pending = group.allreduce_max([_RANK])
    finish(pending)
    assert pending.result() == [_SIZE - 1]
    assert sorted(_read_notices(group, len(peers))) == [
        Notice(peer, NoticeKind.ALIVE, 7) for peer in peers
    ]
    WORLD.barrier()
    assert group.notices() == []
    transport.close()
    group.close()


def check_a_rank_may_leave_while_others_still_write_to_it() -> None:
    group = _control()
    if _RANK == 0:
        group.close()
    WORLD.barrier()
    if _RANK != 0:
        group.notify(0, NoticeKind.LEFT)
        group.close()


def check_closing_waits_for_nobody() -> None:
    transport = _transport()
    if _RANK == 0:
        transport.close()
        for peer in range(1, _SIZE):
            WORLD.tell(peer)
    else:
        WORLD.hear(0)
        transport.close()


def main(program: dict[str, object]) -> None:
    """Runs the checks among a program's globals."""
    for name, check in program.items():
        if name.startswith("check_") and callable(check):
            check()
            WORLD.barrier()
            if _RANK == 0:
                print(name, flush=True)
