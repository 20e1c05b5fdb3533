"""Rank program: what is a group's own in transports of torch.distributed; see
`transport_checks.py`.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transport_checks
from checked_worlds import DEADLINE_S
from torch.distributed.device_mesh import init_device_mesh
from transport_checks import WORLD, finish, main, wait_for

from burst_rt.errors import ConfigError, InputError, PeerLost, Stalled
from burst_rt.runtime.connections import connect
from burst_rt.transport import Notice, NoticeKind
from burst_rt.transport.base import UNKNOWN_CODE
from burst_rt.transport.meeting import meet
from burst_rt.transport.sockets import SocketControl, SocketTransport

_WORLD = WORLD
_RANK, _SIZE = _WORLD.rank, _WORLD.size
_WHOLE: Any = dist.group.WORLD  # torch has no types for some of these
_STORE: Any = _WHOLE.get_group_store()


def _meet() -> tuple[SocketTransport, SocketControl]:
    return meet(_STORE, _RANK, _SIZE, DEADLINE_S)


def check_parts_of_the_ranks_as_groups_and_axes() -> None:
    halves = [dist.new_group(list(range(half, _SIZE, 2))) for half in range(min(2, _SIZE))]
    mesh = init_device_mesh("cpu", (1, _SIZE), mesh_dim_names=("dp", "cp"))
    for group, ranks in (
        (halves[_RANK % 2], list(range(_RANK % 2, _SIZE, 2))),
        (mesh["cp"], list(range(_SIZE))),
        (mesh["dp"], [_RANK]),
    ):
        connections = connect(None, group, DEADLINE_S)
        control = connections.control
        assert (control.rank, control.size) == (ranks.index(_RANK), len(ranks))
        assert (connections.job_rank, connections.job_size) == (_RANK, _SIZE)
        pending = control.allgather(str(_RANK).encode())
        finish(pending)
        assert [int(rank) for rank in pending.result()] == ranks
        connections.transport.close()
        control.close()
    with pytest.raises(InputError, match=r"one axis, got axes \('dp', 'cp'\)"):
        connect(None, mesh, DEADLINE_S)
    if _SIZE > 1:
        with pytest.raises(InputError, match="not in the process group"):
            connect(None, halves[1 - _RANK % 2], DEADLINE_S)


def check_a_rank_that_ends_without_a_word_is_noticed() -> None:
    if _SIZE == 1:
        return
    transport, control = _meet()
    finish(control.allreduce_max([1]))
    if _RANK == 0:
        # What the kernel does for a process that is killed.
        for links in control._links:
            links.close()
    elif _RANK in (1, _SIZE - 1):  # heard from rank 0, or spoke to it
        deadline_s = time.monotonic() + DEADLINE_S
        found: list[Notice] = []
        while not found:
            assert time.monotonic() < deadline_s
            found = control.notices()
        assert [(notice.peer, notice.kind, notice.value) for notice in found] == [
            (0, NoticeKind.LEFT, UNKNOWN_CODE)
        ]
        assert "its connection ended" in found[0].text
    _WORLD.barrier()
    control.close()
    transport.close()


def check_a_farewell_is_not_taken_for_a_death() -> None:
    transport, control = _meet()
    finish(control.allreduce_max([1]))
    if _RANK == 0:
        for peer in range(1, _SIZE):
            control.notify(peer, NoticeKind.LEFT, 3, "bye")
        control.close()
    else:
        began_s = time.monotonic()
        found: list[Notice] = []
        while time.monotonic() < began_s + 1.0:
            found += control.notices()
        assert [(notice.peer, notice.value, notice.text) for notice in found] == [(0, 3, "bye")]
    _WORLD.barrier()
    control.close()
    transport.close()


def check_notices_leave_a_rank_that_looks_no_more() -> None:
    """Also to peers that this rank has never written to, whose connections are still opening."""
    transport, control = _meet()
    _WORLD.barrier()
    for peer in range(_SIZE):
        if peer != _RANK:
            control.notify(peer, NoticeKind.LEFT, 7, "at once")
    _WORLD.barrier()
    found: list[Notice] = []
    for _ in range(20):
        found += [notice for notice in control.notices() if notice.value == 7]
        time.sleep(0.01)
    assert sorted(notice.peer for notice in found) == [p for p in range(_SIZE) if p != _RANK]
    _WORLD.barrier()
    control.close()
    transport.close()


def check_what_is_wrong_on_one_rank_is_raised_by_all() -> None:
    odd = _SIZE - 1
    with pytest.MonkeyPatch.context() as patch:
        if odd == _RANK:
            patch.setattr(resource, "getrlimit", lambda _: (60, 60))
        with pytest.raises(ConfigError, match=rf"rank {odd}: .* and this process may have 60"):
            _meet()
    _WORLD.barrier()


def check_strangers_are_turned_away() -> None:
    transport, control = _meet()
    for links in (transport._links, *control._links):
        for door in links._doors.values():
            name = door.getsockname()
            for greeting in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(9), bytes(24), b"x"):
                with socket.socket(door.family, socket.SOCK_STREAM) as stranger:
                    stranger.connect(name)
                    stranger.send(greeting)
                    links.poll()
    finish(control.allreduce_max([1]))
    slot = memoryview(bytearray(3))
    right, left = (_RANK + 1) % _SIZE, (_RANK - 1) % _SIZE
    wait_for(
        transport, [transport.irecv(slot, left, 0), transport.isend(memoryview(b"abc"), right, 0)]
    )
    assert bytes(slot) == b"abc"
    assert control.notices() == []
    _WORLD.barrier()
    control.close()
    transport.close()


def check_meeting_gives_up_on_a_rank_that_never_comes() -> None:
    if _SIZE == 1:
        return
    store: Any = torch.distributed.distributed_c10d.PrefixStore("late", _STORE)
    missing = _SIZE - 1
    if missing != _RANK:
        with pytest.raises(Stalled, match=rf"0\.3 s in burst_rt\.init .*ranks \[{missing}\]") as e:
            meet(store, _RANK, _SIZE, 0.3)
        assert e.value.peer == missing
    _WORLD.barrier()


def check_a_store_that_is_gone() -> None:
    class Gone:
        """What torch raises when the process of the store has ended."""

        def add(self, *_: object) -> int:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(PeerLost, match=r"store .* cannot be reached"):
        meet(Gone(), _RANK, _SIZE, 1.0)  # type: ignore[arg-type]


def check_what_is_no_group_is_refused() -> None:
    wrong: Any
    for wrong in (3, "cp", torch.zeros(1), [_WHOLE]):
        with pytest.raises(InputError, match="init: group must be a torch"):
            connect(None, wrong, 1.0)
    with pytest.raises(InputError, match="got both"):
        connect(wrong, _WHOLE, 1.0)


if __name__ == "__main__":
    assert "TORCHELASTIC_RUN_ID" in os.environ
    main(vars(transport_checks) | globals())
