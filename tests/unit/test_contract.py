"""What ranks agree on: whose argument was wrong, where calls differ, and that the job goes on
afterwards. Ranks are threads.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

import burst_rt
from burst_rt import Causal, Context, Full, LocalRank, Mask
from burst_rt.drivers import Watch
from burst_rt.errors import BurstError, ConfigError, ContractMismatch, InputError, PeerLost, Stalled
from burst_rt.job.flight import FlightRecord
from burst_rt.job.flights import Flight, read_flight
from burst_rt.kernels import KERNELS
from burst_rt.planning.masks import Relation
from burst_rt.runtime.agreement import Agreement, Contract
from burst_rt.transport import LocalWorld


def _agree(*sides: tuple[dict[str, str], int, BurstError | None]) -> list[BurstError | None]:
    """What each rank raises: sides are (description, number of the call, error) by rank."""
    world = LocalWorld(len(sides))
    agreements = [
        Agreement(world.control(rank), number, Contract(description), error)
        for rank, (description, number, error) in enumerate(sides)
    ]
    for agreement in agreements:
        agreement.start()
    assert [agreement.test() for agreement in agreements] == [True] * len(sides)
    failures = [agreement.failure() for agreement in agreements]
    if not any(failures):
        return [None] * len(sides)
    assert all(isinstance(failure, ContractMismatch) for failure in failures)
    results: list[BurstError | None] = [None] * len(sides)

    def settle(rank: int) -> None:
        results[rank] = agreements[rank].settle(Watch(world.control(rank)), 10.0)

    # Watches read the notices of ends of their own; the agreements keep the ends they began with.
    threads = [threading.Thread(target=settle, args=(rank,)) for rank in range(len(sides))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_ranks_that_say_the_same_agree() -> None:
    assert _agree(*[({"call": "a", "shape": "b"}, 3, None)] * 4) == [None] * 4


@pytest.mark.parametrize("odd", range(4))
def test_the_odd_rank_is_named_with_what_differs(odd: int) -> None:
    same = {"call": "burst_attention", "heads": "8", "mask": "Causal()"}
    sides = [
        (same | ({"heads": "4", "mask": "Full()"} if rank == odd else {}), 7, None)
        for rank in range(4)
    ]
    for rank, error in enumerate(_agree(*sides)):
        assert isinstance(error, ContractMismatch)
        assert (error.rank, error.peer) == (rank, odd)
        assert (
            f"heads: 8 on most ranks, 4 on rank {odd}; mask: Causal() on most ranks, Full() on "
            f"rank {odd}" in str(error)
        )


@pytest.mark.parametrize("odd", range(3))
def test_a_rank_that_is_one_call_ahead_is_named(odd: int) -> None:
    for error in _agree(*[({"call": "x"}, 8 if rank == odd else 7, None) for rank in range(3)]):
        assert isinstance(error, ContractMismatch)
        assert error.peer == odd
        assert f"number of the call: 7 on most ranks, 8 on rank {odd}" in str(error)


def test_a_field_that_only_one_rank_has() -> None:
    (error, _) = _agree(({"call": "x", "extra": "1"}, 1, None), ({"call": "x"}, 1, None))
    assert error is not None
    assert "extra: 1 on rank 0, nothing on rank 1" in str(error)


def test_the_first_error_is_raised_by_all() -> None:
    sides = [
        ({"call": "x"}, 1, None),
        ({"call": "y"}, 1, InputError("bad shape")),
        ({"call": "x"}, 1, ConfigError("bad kernel")),
    ]
    for rank, error in enumerate(_agree(*sides)):
        assert type(error) is InputError
        assert (str(error), error.rank, error.peer) == ("rank 1: bad shape", rank, 1)


def test_digests_depend_on_all_and_on_nothing_else() -> None:
    same = {"b": "2", "a": "1"}
    assert Contract(same).digest == Contract({"a": "1", "b": "2"}).digest == 324549673064394677
    assert (
        len(
            {
                Contract(d).digest
                for d in ({}, same, {"a": "12"}, {"a": "1", "b": "3"}, {"a": "2", "b": "1"})
            }
        )
        == 5
    )
    assert 0 <= Contract(same).digest < 2**62


# --- calls, in worlds of threads. All bad inputs, over MPI: tests/mpi/test_bad_input.py.


def _qkv(ctx: Context, tokens: int = 12) -> list[torch.Tensor]:
    length = ctx.layout(tokens).shard_len
    return [torch.randn(1, length, 2, 16) for _ in range(3)]


def _good(ctx: Context) -> None:
    result = burst_rt.burst_attention(*_qkv(ctx), layout=ctx.layout(12))
    assert torch.isfinite(result).all()


class Scale(IntEnum):
    ONE = 1


def test_scales_that_are_equal_numbers_agree() -> None:
    """1, 1.0, a numpy float and a named number are one scale; also after calls they differed in."""
    import numpy as np

    def run(ctx: Context) -> None:
        layout = ctx.layout(12)
        for scales in ((1, 1.0), (np.float64(0.5), 0.5), (1.0, 1), (Scale.ONE, 1.0)):
            burst_rt.burst_attention(*_qkv(ctx), layout=layout, scale=scales[ctx.rank])

    burst_rt.run_local(2, run)


@dataclass
class Unhashable(Mask):
    """A dataclass that is not frozen has no hash."""

    keys: list[int] = field(default_factory=list)

    def relation(self, q: range, kv: range) -> Relation:
        return Relation.FULL

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # never asked
        raise AssertionError


@dataclass(frozen=True)
class Unwilling(Mask):
    """Raises an error of its own."""

    def relation(self, q: range, kv: range) -> Relation:
        raise RuntimeError("no answer")

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # never asked
        raise AssertionError


def test_masks_that_cannot_be_compared_are_refused_by_name() -> None:
    def run(ctx: Context) -> None:
        with pytest.raises(
            InputError, match=r"rank 1: .* a mask must be hashable, got Unhashable, which is not"
        ):
            burst_rt.burst_attention(
                *_qkv(ctx), layout=ctx.layout(12), mask=Unhashable() if ctx.rank == 1 else Full()
            )
        _good(ctx)

    burst_rt.run_local(2, run)


@pytest.mark.parametrize(
    "scale", [0, -1.0, 10**400, math.nan, -math.inf, "1", torch.tensor(1.0), True]
)
def test_impossible_scales(scale: float) -> None:
    with (
        burst_rt.init() as ctx,
        pytest.raises(InputError, match="scale must be None or a finite number above 0, got"),
    ):
        burst_rt.burst_attention(*_qkv(ctx), layout=ctx.layout(12), scale=scale)


@pytest.mark.parametrize("scale", [1e-50, 1e39])
def test_a_scale_that_is_none_in_the_type_of_the_sums(scale: float) -> None:
    def attend(ctx: Context) -> None:
        layout = ctx.layout(16)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.ones(1, layout.shard_len, 1, 8, dtype=dtype)
            if dtype == torch.float64:
                burst_rt.burst_attention(x, x, x, layout=layout, scale=scale)
                continue
            with pytest.raises(
                InputError, match=r"scale must be finite and above 0 in torch\.float32"
            ):
                burst_rt.burst_attention(x, x, x, layout=layout, scale=scale)

    burst_rt.run_local(2, attend)


def test_a_closed_context_takes_no_call() -> None:
    ctx = burst_rt.init()
    layout = ctx.layout(12)
    _good(ctx)
    ctx.close()
    ctx.close()
    x = _qkv(ctx)
    calls: list[Callable[[], object]] = [
        lambda: burst_rt.burst_attention(*x, layout=layout),
        lambda: layout.unshard(x[0]),
        lambda: ctx.all_reduce(torch.zeros(1)),
    ]
    for call in calls:
        with pytest.raises(
            ConfigError, match=r"this context is closed; make another with burst_rt\.init"
        ):
            call()


def test_ranks_that_left_are_known_to_the_next_call() -> None:
    def run(ctx: Context) -> None:
        _good(ctx)
        if ctx.rank == 1:
            ctx.close()
            return
        # The farewell is on its way.
        deadline_s = time.monotonic() + 5
        while 1 not in ctx.runtime.watch.left and time.monotonic() < deadline_s:
            ctx.runtime.watch.look()
        with pytest.raises(
            PeerLost, match=r"rank 1 closed its context or ended normally"
        ) as caught:
            _good(ctx)
        assert caught.value.peer == 1
        # And the context stays broken.
        with pytest.raises(PeerLost):
            _good(ctx)

    burst_rt.run_local(3, run)


def test_a_rank_that_never_comes_is_waited_for_until_timeout_s() -> None:
    stalled = threading.Barrier(2)

    def run(ctx: Context) -> None:
        if ctx.rank == 0:
            started_s = time.monotonic()
            with pytest.raises(
                Stalled,
                match=r"rank 0: waited 0\.\d s \(timeout_s\) for the other ranks to enter call \d+",
            ) as caught:
                _good(ctx)
            assert 0.3 <= time.monotonic() - started_s < 5
            assert caught.value.exit_code == 75
            assert ctx.runtime.transport.bytes_sent == 0
            with pytest.raises(PeerLost, match="broke in an earlier call"):
                _good(ctx)
        stalled.wait(20)
        if ctx.rank == 1:
            # Too late: the word that rank 0 left for this call is no agreement any more.
            with pytest.raises(PeerLost, match=r"rank 0 failed \(exit code 75\) with Stalled"):
                _good(ctx)
        stalled.wait(20)

    burst_rt.run_local(2, run, timeout_s=0.3)


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx: ctx.layout(12).unshard(torch.zeros(1, ctx.layout(12).shard_len)),
        lambda ctx: ctx.all_reduce(torch.zeros(3)),
    ],
    ids=["unshard", "all_reduce"],
)
def test_other_collectives_have_the_same_deadline(call: Callable[[Context], object]) -> None:
    stalled = threading.Barrier(2)

    def run(ctx: Context) -> None:
        if ctx.rank == 0:
            with pytest.raises(Stalled, match=r"rank 0: waited 0\.2 s"):
                call(ctx)
            with pytest.raises(PeerLost, match="broke in an earlier call"):
                call(ctx)
        stalled.wait(20)

    burst_rt.run_local(2, run, timeout_s=0.2)


def test_one_call_at_a_time() -> None:
    """A second thread is told so at once, and the first one's call goes through."""
    second_done = threading.Event()

    def run(ctx: Context) -> None:
        if ctx.rank == 1:
            assert second_done.wait(20)
            _good(ctx)
            return
        errors: list[BaseException] = []
        entered = threading.Event()

        def second() -> None:
            assert entered.wait(20)
            while not ctx.runtime._exclusive._busy.locked():
                time.sleep(0.001)
            for call in (
                lambda: _good(ctx),
                lambda: ctx.all_reduce(torch.zeros(1)),
                lambda: ctx.layout(12).unshard(torch.zeros(1, 6)),
            ):
                try:
                    call()
                except ConfigError as error:
                    errors.append(error)
            second_done.set()

        thread = threading.Thread(target=second)
        thread.start()
        entered.set()
        _good(ctx)
        thread.join(20)
        assert [str(error).split(";")[0] for error in errors] == [
            "a context takes one call at a time, and another thread is in a call of this context"
        ] * 3

    burst_rt.run_local(2, run)


def _world_and_pairs(program: Callable[[Context, Context], None]) -> None:
    """Runs `program(world, pair)` on a world of four ranks and two pairs of them."""
    whole, pairs = LocalWorld(4), [LocalWorld(2), LocalWorld(2)]
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            with (
                burst_rt.init(LocalRank(whole, rank)) as world,
                burst_rt.init(LocalRank(pairs[rank // 2], rank % 2)) as pair,
            ):
                program(world, pair)
        except BaseException as error:  # noqa: BLE001  (raised below, in the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)


def test_several_contexts_in_one_process() -> None:
    """A world of four and two pairs, all ranks in both: calls of one do not disturb the other,
    layouts belong to their own.
    """

    def program(world: Context, pair: Context) -> None:
        for _ in range(3):
            _good(world)
            _good(pair)
        assert (world.stats().calls, pair.stats().calls) == (3, 3)
        q, k, v = _qkv(world)
        with pytest.raises(InputError, match="layout and kv_layout must belong to one context"):
            burst_rt.burst_attention(q, k, v, layout=world.layout(12), kv_layout=pair.layout(12))
        # Only two of four ranks close their pair; the world goes on.
        if world.rank < 2:
            pair.close()
        _good(world)

    _world_and_pairs(program)


@pytest.mark.parametrize("late", [0, 2, 3])
def test_a_call_that_all_of_a_pair_get_wrong_disturbs_no_other_context(late: int) -> None:
    def program(world: Context, pair: Context) -> None:
        for _ in range(3):
            if world.rank == late:
                time.sleep(0.2)  # others have gone on to a call of the world by then
            q, k, v = _qkv(pair)
            with pytest.raises(InputError, match="head_dim"):
                burst_rt.burst_attention(q, k[..., :1], v, layout=pair.layout(12))
            _good(world)
            _good(pair)

    _world_and_pairs(program)


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("wrong", ["other", "none"])
def test_a_wrong_layout_is_an_error_where_the_others_wait(odd: int, wrong: str) -> None:
    def program(ctx: Context) -> None:
        with burst_rt.init() as other:
            for _ in range(3):
                q, k, v = _qkv(ctx)
                layout: Any = ctx.layout(12)
                if ctx.rank == odd:
                    layout = other.layout(24) if wrong == "other" else None
                with pytest.raises(InputError, match=rf"rank {odd}: burst_attention: "):
                    burst_rt.burst_attention(q, k, v, layout=layout)
                _good(other)
                _good(ctx)

    burst_rt.run_local(3, program)


@pytest.mark.parametrize(
    ("made", "got", "remedy"),
    [
        (lambda x: x.transpose(1, 2), (1, 2, 6, 16), "give q.transpose(1, 2)"),
        (lambda x: x.transpose(0, 1), (6, 1, 2, 16), "give q.transpose(0, 1)"),
        (
            lambda x: x.repeat(1, 2, 1, 1),
            (1, 12, 2, 16),
            "cut the model's inputs with burst_rt.shard_batch or layout.shard, not q alone",
        ),
        (
            lambda x: x.repeat(1, 2, 1, 1).transpose(1, 2),
            (1, 2, 12, 16),
            "cut the model's inputs with burst_rt.shard_batch or layout.shard, not q alone",
        ),
        (
            lambda x: x[:, :5],
            (1, 5, 2, 16),
            "cut the model's inputs with burst_rt.shard_batch or layout.shard",
        ),
    ],
)
def test_a_wrong_shape_is_told_with_what_mends_it(
    made: Callable[[torch.Tensor], torch.Tensor], got: tuple[int, ...], remedy: str
) -> None:
    def run(ctx: Context) -> str:
        q, k, v = _qkv(ctx)
        with pytest.raises(InputError) as caught:
            burst_rt.burst_attention(made(q), k, v, layout=ctx.layout(12))
        return str(caught.value)

    expected = (
        "rank 0: burst_attention: q must be [batch, this rank's 6 of 12 tokens, heads, head_dim] "
        f"(layout: zigzag), got {got}; {remedy}"
    )
    assert burst_rt.run_local(2, run) == [expected] * 2


def test_one_traceback_is_shown_of_an_error_that_all_ranks_raise() -> None:
    def shown(call: Callable[[], object]) -> str:
        with pytest.raises(BurstError) as caught:
            call()
        return "".join(traceback.format_exception(caught.value))

    def run(ctx: Context) -> None:
        q, k, v = _qkv(ctx)
        layout = ctx.layout(12)

        def attend(**options: Any) -> Callable[[], object]:
            return lambda: burst_rt.burst_attention(q, k, v, layout=layout, **options)

        for text in (
            shown(attend(scale=-1.0)),
            shown(attend(scale=1.0 + ctx.rank)),
            shown(lambda: ctx.layout(12, "spiral")),
        ):
            assert text.count("Traceback") == 1, text
        # What a mask of the user's own raised is shown, on the ranks that have it.
        text = shown(attend(mask=Unwilling()))
        assert "RuntimeError: no answer" in text
        assert "During handling" not in text
        _good(ctx)

    burst_rt.run_local(2, run)


def test_ranks_whose_documents_differ_are_told_the_lengths() -> None:
    def run(ctx: Context) -> None:
        mask = Causal() & burst_rt.Documents([5, 7] if ctx.rank else [4, 8])
        with pytest.raises(
            ContractMismatch, match=r"Documents\(\[4, 8\]\)\) on rank 0, .*Documents\(\[5, 7\]\)\)"
        ):
            burst_rt.burst_attention(*_qkv(ctx), layout=ctx.layout(12), mask=mask)
        _good(ctx)

    burst_rt.run_local(2, run)


def test_ranks_that_get_different_calls_wrong_all_hear_of_their_own() -> None:
    def program(ctx: Context) -> None:
        with burst_rt.init() as other:
            for _ in range(3):
                q, k, v = _qkv(ctx)
                layout: Any = None if ctx.rank == 1 else ctx.layout(24)
                with pytest.raises(
                    InputError, match="layout must come" if ctx.rank == 1 else "q must be"
                ):
                    burst_rt.burst_attention(q, k, v, layout=layout)
                _good(other)
                _good(ctx)

    # A question that came late was not answered: in one world of eight.
    for _ in range(20):
        burst_rt.run_local(3, program)


def test_a_refused_call_waits_for_its_own_ranks_and_takes_nobody_elses_call() -> None:
    """A grid: rank 0 is in a row with rank 1, who comes late, and in a column with rank 2, who
    waits for it rightly.
    """
    row, column = LocalWorld(2), LocalWorld(2)
    failures: list[BaseException] = []

    def at(*members: tuple[LocalWorld, int]) -> Callable[[Callable[..., None]], threading.Thread]:
        def start(program: Callable[..., None]) -> threading.Thread:
            def run() -> None:
                try:
                    contexts = [
                        burst_rt.init(LocalRank(world, rank), timeout_s=20)
                        for world, rank in members
                    ]
                    program(*contexts)
                    for ctx in contexts:
                        ctx.close()
                except BaseException as error:  # noqa: BLE001  (raised below, in the test's thread)
                    failures.append(error)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            return thread

        return start

    def corner(mine: Context, other: Context) -> None:
        q, k, v = _qkv(mine)
        with pytest.raises(InputError, match="head_dim"):
            burst_rt.burst_attention(q, k[..., :1], v, layout=mine.layout(12))
        _good(other)

    def late(mine: Context) -> None:
        time.sleep(0.5)
        with pytest.raises(InputError, match=r"rank 0: .*head_dim"):
            _good(mine)

    threads = [at((row, 0), (column, 0))(corner), at((row, 1))(late), at((column, 1))(_good)]
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout_s", 5.0), ("stall_s", 5.0), ("kernel", "naive"), ("check_finite", True)],
)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_options_that_differ_between_ranks_are_refused_by_init(
    odd: int, name: str, value: object
) -> None:
    options: dict[str, Any] = {name: value}
    world = LocalWorld(3)
    errors: dict[int, BaseException] = {}

    def rank_main(rank: int) -> None:
        try:
            burst_rt.init(LocalRank(world, rank), **(options if rank == odd else {}))
        except ContractMismatch as error:
            errors[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(errors) == {0, 1, 2}
    for error in errors.values():
        assert isinstance(error, ContractMismatch)
        assert error.peer == odd
        assert f"{name}: " in str(error)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        (
            {"device": "tpu"},
            ConfigError,
            "device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got 'tpu'",
        ),
        (
            {"timeout_s": 0},
            InputError,
            "timeout_s must be a positive, finite number of seconds, got 0",
        ),
        ({"timeout_s": math.nan}, InputError, "timeout_s must be .* got nan"),
        ({"stall_s": "30"}, InputError, "stall_s must be .* got '30'"),
        ({"stall_s": True}, InputError, "stall_s must be .* got True"),
    ],
)
def test_impossible_options_of_init(
    options: dict[str, Any], kind: type[BurstError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        burst_rt.init(**options)


@dataclass(frozen=True)
class _Slow:
    """Makes one rank's tiles slow: those that match, `times` naps of 0.1 s with signs of life in
    between.
    """

    rank: int
    times: int


def _slow_kernel(
    monkeypatch: pytest.MonkeyPatch,
    slow: _Slow,
    owner: Callable[[Any], int],
    at: int,
    direction: str,
) -> None:
    from burst_rt.kernels import KERNELS

    method = getattr(type(KERNELS["cpu"]), direction)

    def sleepy(kernel: object, *args: Any) -> None:  # the kernel's arguments
        tile = args[1] if direction == "forward" else args[2]
        if threading.current_thread().name == f"burst_rt rank {slow.rank}" and owner(tile) == at:
            for _ in range(slow.times):
                time.sleep(0.1)
                tile.progress()
        method(kernel, *args)

    monkeypatch.setattr(type(KERNELS["cpu"]), direction, sleepy)


def _train_step(ctx: Context, strategy: str) -> None:
    q, k, v = (x.requires_grad_() for x in _qkv(ctx, 40))
    out = burst_rt.burst_attention(q, k, v, layout=ctx.layout(40, "contiguous"), strategy=strategy)
    out.sum().backward()


def test_a_rank_that_has_done_its_part_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call of a program: ranks end at different times, and who ended well is not missed by
    those still waiting for others.
    """
    # Rank 2 is slow with rank 3's queries, its last: ranks 0 and 1 owe nobody anything by then.
    _slow_kernel(
        monkeypatch, _Slow(2, times=10), lambda tile: tile.q_positions[0].start // 10, 3, "backward"
    )
    burst_rt.run_local(4, lambda ctx: _train_step(ctx, "burst"))


class _Late:
    """A collective whose last message comes 1.5 s after another rank has left."""

    def __init__(self, pending: Any, ctx: Context) -> None:
        self._pending, self._ctx, self.result = pending, ctx, pending.result

    def test(self) -> bool:
        left = self._ctx.runtime.watch.left.values()
        late = any(time.perf_counter() - how.noticed_s > 1.5 for how in left)
        return bool(self._pending.test()) and late


def _alone_with_itself(ctx: Context) -> None:
    """A call that sends no message: nothing but its opening awaits other ranks."""
    layout = ctx.layout(12, "contiguous")
    burst_rt.burst_attention(*_qkv(ctx), layout=layout, mask=burst_rt.SlidingWindow(0))


@pytest.mark.parametrize(
    ("call", "collective"),
    [
        (lambda ctx: ctx.all_gather(ctx.rank), "allgather"),
        (lambda ctx: ctx.together(lambda: None), "allreduce_max"),
        (_alone_with_itself, "allreduce_max"),
    ],
)
def test_a_rank_that_ended_after_a_call_is_not_lost_to_it(
    call: Callable[[Context], object], collective: str
) -> None:
    def run(ctx: Context) -> None:
        if ctx.rank == 0:
            control = ctx.runtime.control
            start = getattr(control, collective)
            setattr(control, collective, lambda said: _Late(start(said), ctx))
        call(ctx)

    burst_rt.run_local(3, run)


def test_a_rank_that_computes_is_alive_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for rank 3, which waits for rank 2, which computes for longer than stall_s."""
    _slow_kernel(
        monkeypatch,
        _Slow(2, times=12),
        lambda tile: tile.kv_positions[0].start // 10,
        0,
        "backward",
    )
    burst_rt.run_local(4, lambda ctx: _train_step(ctx, "ring-kv"), stall_s=0.5)


def test_an_error_inside_a_call_breaks_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    from burst_rt.kernels import KERNELS

    forward = type(KERNELS["cpu"]).forward

    def failing(kernel: Any, *args: Any) -> None:  # the kernel's arguments
        if threading.current_thread().name == "burst_rt rank 1":
            raise ArithmeticError("a defect in this tile")
        forward(kernel, *args)

    monkeypatch.setattr(type(KERNELS["cpu"]), "forward", failing)

    def run(ctx: Context) -> None:
        try:
            _good(ctx)
        finally:
            with pytest.raises(PeerLost, match="broke in an earlier call"):
                _good(ctx)

    started_s = time.monotonic()
    with pytest.raises(ArithmeticError, match="a defect in this tile"):
        burst_rt.run_local(3, run)
    assert time.monotonic() - started_s < 10  # the others were told: nobody waited for stall_s


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx: ctx.all_reduce(torch.ones(3)),
        lambda ctx: ctx.layout(12).unshard(torch.ones(1, 6)),
    ],
)
def test_a_rank_that_is_interrupted_in_a_collective_says_so(
    call: Callable[[Context], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it until `timeout_s`."""
    heard = threading.Event()

    def run(ctx: Context) -> None:
        if ctx.rank == 0:
            monkeypatch.setattr(ctx.runtime.watch, "look", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                call(ctx)
            assert heard.wait(20)
            return
        time.sleep(0.3)
        with pytest.raises(PeerLost, match=r"rank 0 failed \(exit code 1\)"):
            call(ctx)
        heard.set()

    burst_rt.run_local(2, run, timeout_s=60)


def _interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (SystemExit(0), 0),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("no"), 1),
        (OSError(), 1),
    ],
)
def test_how_a_context_is_left_is_told(stop: BaseException, code: int) -> None:
    told = threading.Event()

    def run(ctx: Context) -> None:
        if ctx.rank == 0:
            try:
                with ctx:
                    raise stop
            except type(stop):
                told.set()
            return
        assert told.wait(20)
        ctx.runtime.watch.look()
        assert [left.code for left in ctx.runtime.watch.left.values()] == [code]

    burst_rt.run_local(2, run)


def test_a_closed_context_holds_nothing() -> None:
    def run(ctx: Context) -> Context:
        _train_step(ctx, "burst")
        return ctx

    for ctx in burst_rt.run_local(2, run):
        assert ctx.runtime.last_run is None
        assert not ctx.attention.planner._plans
        assert not ctx.runtime.machine._pool._idle


def test_ranks_that_make_different_calls_are_told() -> None:
    def run(ctx: Context) -> None:
        layout = ctx.layout(12)
        q, k, v = (x.requires_grad_() for x in _qkv(ctx))
        out = burst_rt.burst_attention(q, k, v, layout=layout)
        calls: list[Callable[[], object]] = [
            lambda: out.sum().backward(retain_graph=True),
            lambda: burst_rt.burst_attention(q, k, v, layout=layout),
            lambda: layout.unshard(q.detach()),
        ]
        with pytest.raises(ContractMismatch, match="call: ") as caught:
            calls[ctx.rank]()
        for name in ("backward of burst_attention", "burst_attention", "unshard"):
            assert name in str(caught.value)
        out.sum().backward()
        _good(ctx)

    burst_rt.run_local(3, run)


def test_the_same_mask_of_another_name_is_the_same() -> None:
    def run(ctx: Context) -> None:
        layout = ctx.layout(12)
        mask: Mask = Causal() & Full() if ctx.rank else Causal()
        options: dict[str, Any] = {"causal": True} if ctx.rank == 2 else {"mask": mask}
        burst_rt.burst_attention(*_qkv(ctx), layout=layout, **options)

    burst_rt.run_local(3, run)


def test_the_flight_record_has_what_a_rank_was_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = FlightRecord(tmp_path, 0, 1)
    with burst_rt.init() as ctx:
        monkeypatch.setattr(ctx.runtime, "flight", record)
        layout = ctx.layout(12)
        q, k, v = _qkv(ctx)
        seen: list[Flight | None] = []

        def fail(*_: object) -> None:
            seen.append(read_flight(tmp_path, 0))
            raise ValueError("in a tile")

        monkeypatch.setattr(type(KERNELS["cpu"]), "forward", fail)
        with pytest.raises(ValueError, match="in a tile"):
            burst_rt.burst_attention(q, k, v, layout=layout)
    inside = seen[0]
    assert inside is not None
    assert inside.call is not None
    assert (inside.call.number, inside.call.name) == (ctx.runtime.number, "burst_attention")
    assert inside.doing is not None
    assert "q0" in inside.doing.name
    assert inside.doing.hop == 0
    assert inside.place == f"in {inside.call}, {inside.doing}"
    # What broke the context stays in it.
    broken = read_flight(tmp_path, 0)
    assert broken is not None
    assert broken.place == inside.place


def test_a_refused_call_is_no_call_that_a_rank_was_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(ctx: Context) -> None:
        record = FlightRecord(tmp_path, ctx.rank, ctx.world_size)
        monkeypatch.setattr(ctx.runtime, "flight", record)

        def in_no_call() -> bool:
            flight = read_flight(tmp_path, ctx.rank)
            return flight is not None and flight.call is None

        _good(ctx)
        assert in_no_call()
        with pytest.raises(ContractMismatch):
            ctx.all_reduce(torch.zeros(1 + ctx.rank))
        assert in_no_call()
        _good(ctx)

    burst_rt.run_local(2, run)
