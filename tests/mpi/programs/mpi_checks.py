"""Rank program: what is MPI's own in the MPI transport; see `transport_checks.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import pytest
import transport_checks
from checked_worlds import DEADLINE_S
from mpi4py import MPI
from transport_checks import (
    LARGE,
    SMALL,
    all_to_all,
    gather_right,
    main,
    meet_wrong_size,
    reduce_right,
    wait_for,
)

from burst_rt.errors import ConfigError, Stalled
from burst_rt.transport import NoticeKind, Pending
from burst_rt.transport.mpi import MpiControl, MpiTransport, duplicate

_WORLD = MPI.COMM_WORLD
_RANK, _SIZE = _WORLD.rank, _WORLD.size


def _transport(piece_bytes: int = 1 << 30) -> MpiTransport:
    return MpiTransport(duplicate(_WORLD, DEADLINE_S), piece_bytes=piece_bytes)


def _control(piece_bytes: int = 1 << 30) -> MpiControl:
    return MpiControl(duplicate(_WORLD, DEADLINE_S), piece_bytes=piece_bytes)


def check_messages_in_pieces() -> None:
    for piece_bytes, sizes in (
        (1, [0, 1, 2, 5]),
        (8, SMALL),
        (7, SMALL),
        (1000, LARGE),
        (65_536, LARGE),
    ):
        transport = _transport(piece_bytes)
        all_to_all(transport, sizes, sends_first=True, tag_of=lambda i: i)
        all_to_all(transport, sizes, sends_first=False, tag_of=lambda i: 0)
        transport.close()


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
    wait_for(ours, handles[0])
    wait_for(others, handles[1])
    user = bytearray(4)
    _WORLD.Recv(user, left, 1)
    assert (bytes(slots[0]), bytes(slots[1]), bytes(user)) == (b"ours", b"thei", b"user")
    ours.close()
    others.close()


def check_a_part_of_the_ranks_can_have_a_transport() -> None:
    half = MPI.Intracomm(_WORLD.Split(_RANK % 2, key=-_RANK))
    transport = MpiTransport(duplicate(half, DEADLINE_S))
    assert (transport.rank, transport.size) == (half.rank, half.size)
    slot = memoryview(bytearray(1))
    left, right = (half.rank - 1) % half.size, (half.rank + 1) % half.size
    wait_for(
        transport,
        [transport.irecv(slot, left, 0), transport.isend(memoryview(bytes([_RANK])), right, 0)],
    )
    expected = half.allgather(_RANK)[left]
    assert slot[0] == expected
    transport.close()
    half.Free()


def check_wrong_sizes_of_messages_in_pieces() -> None:
    if _SIZE == 1:
        return
    for sent, expected in ((11, 15), (15, 11), (3, 7), (7, 3)):
        meet_wrong_size(_transport(piece_bytes=4), sent, expected, "")


def check_collectives_in_pieces() -> None:
    reduce_right(_control(piece_bytes=1000))
    gather_right(_control(piece_bytes=999))


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
            lambda _, transport: wait_for(
                transport, [transport.isend(memoryview(bytes(48)), 0, 0)]
            ),
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
        assert timeout_s <= time.monotonic() - began_s < DEADLINE_S
        assert caught.value.rank == _RANK
        _WORLD.send("gave up", 0)
        _WORLD.recv(source=0)
        return
    for peer in range(1, _SIZE):
        _WORLD.recv(source=peer)
    # It comes at last: everyone can then leave MPI in peace.
    duplicate(_WORLD, DEADLINE_S).Free()
    for peer in range(1, _SIZE):
        _WORLD.send("came", peer)


if __name__ == "__main__":
    main(vars(transport_checks) | globals())
