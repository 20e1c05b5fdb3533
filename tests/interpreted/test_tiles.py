"""The Triton kernels tile by tile, against the spec: positions of every layout, head sizes, types,
and what is left unwritten.

Interpreted on a CPU, or compiled on a GPU, where tiles of eight times as many tokens come on top:
its blocks are larger.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import triton
from spec import Attention, reference, relative_error
from tolerances import ERROR, PRODUCTS

from burst_rt import Causal, Full, Mask
from burst_rt.errors import InternalError
from burst_rt.kernels import KERNELS, QKV, Gradients, Results, State, Tile, Upstream
from burst_rt.kernels.triton.chosen import config_for
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.launch import uses_descriptors
from burst_rt.kernels.triton.tuned import TUNED, trial_of

KERNEL = KERNELS["triton"]
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
# Of sums in float32. The interpreter's products are float32 whatever the inputs.
SUMS = {torch.float32: ERROR[torch.float32]} | {
    d: ERROR[torch.float32] if DEVICE.type == "cpu" else PRODUCTS[d] for d in PRODUCTS
}

_Runs = tuple[range, ...]


@dataclass(frozen=True, eq=False)
class Table(Mask):
    """A boolean table `[q_len, kv_len]`; rows are positions from kv_len - q_len on, as the spec
    aligns them.
    """

    seen: torch.Tensor

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # tensors
        return self.seen[q_position - (self.seen.shape[1] - self.seen.shape[0]), kv_position]


class Place(NamedTuple):
    """Where queries stand, and the keys of each tile, in the order of a call."""

    q: _Runs
    kv: tuple[_Runs, ...]


_THIRDS = range(1, 181, 3)
# Blocks of the interpreter are 32 x 16 in the forward, 16 x 32 in the backward: most lengths here
# are divided by neither.
PLACES = {
    "aligned": Place((range(70),), ((range(70),),)),
    "lengths that are divided": Place((range(32, 96),), ((range(64),), (range(64, 96),))),
    "zigzag, keys travel": Place(
        (range(10, 45), range(95, 130)),
        ((range(10, 45),), (range(95, 130),), (range(10),), (range(45, 95),)),
    ),
    "zigzag, queries travel": Place((range(95, 130),), ((range(10, 45), range(95, 130)),)),
    "a long jump": Place(
        (range(7), range(300, 361)), ((range(7), range(300, 361)), (range(7, 40), range(260, 300)))
    ),
    "striped, keys travel": Place(
        (_THIRDS[:30], _THIRDS[30:]), ((range(2, 92, 3),), (range(92, 182, 3),), (range(0, 90, 3),))
    ),
    "striped, queries travel": Place((_THIRDS[30:],), ((range(2, 92, 3), range(92, 182, 3)),)),
    "contiguous": Place(
        (range(40, 61), range(61, 83)), ((range(40, 61), range(61, 83)), (range(19), range(19, 40)))
    ),
    "more queries than keys": Place((range(-37, 5), range(5, 41)), ((range(41),),)),
    "nothing is seen": Place((range(33),), ((range(40, 77),), (range(33, 35),))),
    "all is seen": Place((range(100, 133),), ((range(50),), (range(50, 100),))),
    "an empty block": Place((range(0), range(5, 60)), ((range(30), range(30, 30)),)),
    "few tokens": Place(
        (range(3, 4), range(9, 10)), ((range(2), range(9, 11)), (range(11, 12),), (range(4, 5),))
    ),
}


def _longer(run: range, factor: int = 8) -> range:
    """So many times as many positions, as far apart, from so many times as far on."""
    start = run.start % run.step + run.start // run.step * run.step * factor
    return range(start, start + len(run) * factor * run.step, run.step)


if DEVICE.type == "cuda":
    PLACES |= {
        f"{name}, longer": Place(
            tuple(map(_longer, place.q)), tuple(tuple(map(_longer, runs)) for runs in place.kv)
        )
        for name, place in PLACES.items()
    }


class Call(NamedTuple):
    """The tensors of a call, its tiles, and which columns each tile has."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    tiles: tuple[Tile, ...]
    columns: tuple[slice, ...]
    truth: Attention

    def qkv(self, columns: slice) -> QKV:
        """The inputs of a tile."""
        return QKV(self.q, self.k[:, columns], self.v[:, columns])


def make_call(
    place: Place,
    dtype: torch.dtype,
    mask: Mask | None = None,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    batch: int = 1,
) -> Call:
    mask = mask or Causal()
    # What is random is made on the CPU: the same numbers on any device.
    q_positions = torch.tensor([i for run in place.q for i in run])
    kv_positions = torch.tensor([j for runs in place.kv for run in runs for j in run])
    q_len, kv_len = len(q_positions), len(kv_positions)
    generator = torch.Generator().manual_seed(1)
    # One packed tensor, as a projection to q, k, v leaves it: strided views.
    packed = torch.randn(
        batch,
        max(q_len, kv_len),
        heads + 2 * kv_heads,
        head_dim,
        generator=generator,
        dtype=torch.float64,
    )
    packed = packed.to(DEVICE, dtype)
    q, (k, v) = packed[:, :q_len, :heads], packed[:, :kv_len, heads:].split(kv_heads, dim=2)
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    dlse = torch.randn(batch, heads, q_len, generator=generator).to(DEVICE)
    ends = [0]
    for runs in place.kv:
        ends.append(ends[-1] + sum(map(len, runs)))
    last = len(place.kv) - 1
    tiles = tuple(
        Tile((), place.q, runs, mask, head_dim**-0.5, lambda: None, first=i == 0, last=i == last)
        for i, runs in enumerate(place.kv)
    )
    columns = tuple(slice(a, b) for a, b in pairwise(ends))
    visible = mask.allows(q_positions[:, None], kv_positions[None, :])
    return Call(q, k, v, dout, dlse, tiles, columns, truth_of(q, k, v, dout, dlse, visible))


def truth_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None = None,
) -> Attention:
    """The spec's answer, made on the CPU, where the kernel's will be."""
    whole = reference(*(x.cpu() for x in (q, k, v, dout, dlse)), mask=Table(visible), scale=scale)
    return Attention(*(None if x is None else x.to(DEVICE) for x in whole))  # type: ignore[arg-type]  # out and lse are never None


def empty_state(q: torch.Tensor) -> State:
    """All of it NaN."""
    batch, q_len, heads, _ = q.shape
    acc, out = (
        torch.full(q.shape, torch.nan, dtype=dtype, device=DEVICE)
        for dtype in (torch.float32, q.dtype)
    )
    m, l, lse = (torch.full((batch, heads, q_len), torch.nan, device=DEVICE) for _ in range(3))  # noqa: E741
    return State(acc, m, l, out, lse)


def run_forward(call: Call, state: State | None = None) -> State:
    state = state or empty_state(call.q)
    for tile, at in zip(call.tiles, call.columns, strict=True):
        KERNEL.forward(call.qkv(at), tile, state)
    return state


def run_delta(call: Call) -> torch.Tensor:
    rows = torch.full((2, *call.truth.lse.shape), torch.nan, device=DEVICE)
    # out as it comes from a forward in the inputs' type would lose digits that are not the
    # backward's fault.
    out, lse = call.truth.out.float().contiguous(), call.truth.lse.float()
    KERNEL.delta(Results(out, lse, call.dout.float(), call.dlse), rows)
    return rows


def run_backward(
    call: Call, *, needs: str = "qkv", start: float = 1.0
) -> list[torch.Tensor | None]:
    """dq, dk, dv: what the kernel added to sums that were `start`, as if they came from other
    tiles; sums are strided.
    """
    lse, delta = run_delta(call)
    sums = [strided(x, start, torch.float32) if n in needs else None for n, x in named(call)]
    for tile, at in zip(call.tiles, call.columns, strict=True):
        tile = tile._replace(first=False)  # there are others
        dk, dv = (None if x is None else x[:, at] for x in sums[1:])
        into = Gradients(sums[0], dk, dv)
        KERNEL.backward(call.qkv(at), Upstream(call.dout, lse, delta), tile, into)
    return [None if total is None else total - start for total in sums]


def write_backward(call: Call, *, needs: str = "qkv") -> list[torch.Tensor | None]:
    """dq, dk, dv of a call with one tile, in the inputs' type; before, they are NaN."""
    (tile,), (lse, delta) = call.tiles, run_delta(call)
    grads = [strided(x, torch.nan, x.dtype) if name in needs else None for name, x in named(call)]
    KERNEL.backward(QKV(*call[:3]), Upstream(call.dout, lse, delta), tile, Gradients(*grads))
    return grads


def named(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    return zip("qkv", call[:3], strict=True)


def strided(like: torch.Tensor, value: float, dtype: torch.dtype) -> torch.Tensor:
    batch, length, heads, head_dim = like.shape
    shape = (batch, length + 3, heads, head_dim)
    return torch.full(shape, value, dtype=dtype, device=DEVICE)[:, 1:-2]


@contextmanager
def described(call: Call) -> Iterator[None]:
    """Inside, the kernels load through tensor descriptors, with the blocks they would have
    anyway.
    """
    with ExitStack() as stack:
        for kind in TUNED:
            config = config_for(kind, call.q)._replace(loads="descriptors")
            assert uses_descriptors(config, *call[:4])
            stack.enter_context(trial_of(kind, config))
        yield


def assert_right(call: Call) -> None:
    state, truth = run_forward(call), call.truth
    assert relative_error(state.out, truth.out) < ERROR[call.q.dtype]
    assert relative_error(state.lse, truth.lse) < ERROR[torch.float32]
    found = [(run_backward(call), SUMS[call.q.dtype])]
    if len(call.tiles) == 1:
        found.append((write_backward(call), ERROR[call.q.dtype]))
    for grads, error in found:
        for got, want in zip(grads, truth[2:5], strict=True):
            assert got is not None
            assert want is not None
            assert relative_error(got, want) < error
            blind = (want == 0).flatten(2).all(-1)  # rows that see nothing, keys that nobody sees
            assert not got[blind].any()


@pytest.mark.parametrize("name", PLACES)
def test_tiles_add_up_to_the_spec(name: str) -> None:
    assert_right(make_call(PLACES[name], torch.float32))


@pytest.mark.parametrize(
    "name", ["striped, queries travel", "more queries than keys", "few tokens"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_have_sums_of_32(dtype: torch.dtype, name: str) -> None:
    assert_right(make_call(PLACES[name], dtype))


@pytest.mark.parametrize("name", ["lengths that are divided", "a long jump", "few tokens"])
def test_without_a_mask(name: str) -> None:
    assert_right(make_call(PLACES[name], torch.float32, Full()))


@pytest.mark.parametrize("head_dim", [16, 20, 33, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_sizes(dtype: torch.dtype, head_dim: int) -> None:
    assert_right(make_call(Place((range(37),), ((range(37),),)), dtype, heads=1, head_dim=head_dim))


@pytest.mark.parametrize(("heads", "kv_heads", "batch"), [(6, 2, 1), (4, 1, 2), (3, 3, 2)])
def test_heads_in_groups_and_batches(heads: int, kv_heads: int, batch: int) -> None:
    assert_right(
        make_call(
            Place((range(-5, 30),), ((range(19),), (range(19, 30),))),
            torch.float32,
            heads=heads,
            kv_heads=kv_heads,
            batch=batch,
        )
    )


@pytest.mark.parametrize(
    "name",
    ["lengths that are divided", "striped, queries travel", "more queries than keys", "few tokens"],
)
def test_through_descriptors(name: str) -> None:
    call = make_call(PLACES[name], torch.float32)
    with described(call):
        assert_right(call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_heads_and_batches_through_descriptors(dtype: torch.dtype) -> None:
    call = make_call(PLACES["few tokens"], dtype, heads=4, kv_heads=2, batch=2)
    with described(call):
        assert_right(call)


@pytest.mark.parametrize("head_dim", [20, 64, 96])
def test_head_sizes_through_descriptors(head_dim: int) -> None:
    call = make_call(
        Place((range(37),), ((range(37),),)), torch.float32, heads=1, head_dim=head_dim
    )
    with described(call):
        assert_right(call)


def test_what_has_no_producer_is_done_without() -> None:
    """float32 never has one, nor has the interpreter: the table's configuration is taken."""
    call = make_call(PLACES["few tokens"], torch.float32, head_dim=128)
    with trial_of("forward", Config(128, 128, 8, 3, "producer")):
        assert_right(call)


def test_the_allocator_of_the_program_stays() -> None:
    """Kernels that make descriptors ask Triton's allocator for memory, and a program may have its
    own.
    """

    def own(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        raise AssertionError("not for these kernels")

    def program() -> object:
        triton.set_allocator(own)
        call = make_call(PLACES["few tokens"], torch.float32)
        with described(call):
            run_forward(call)
        return triton.runtime._allocation._allocator.get()

    assert copy_context().run(program) is own


def test_what_the_copy_engine_cannot_read_is_loaded_through_pointers() -> None:
    """33 numbers of 4 bytes are no multiple of 16, nor is the address of the second of two."""
    config = Config(64, 64, 4, 2, "descriptors")
    fits = torch.empty(1, 9, 2, 36)
    assert uses_descriptors(config, torch.empty(1, 9, 2, 33)) is False
    assert uses_descriptors(config, fits, torch.empty(1, 9, 2, 37)[..., 1:]) is False
    assert uses_descriptors(config._replace(loads="pointers"), fits) is False
    assert uses_descriptors(config, fits) is True


def test_the_order_of_strides_makes_no_difference() -> None:
    """Heads outermost, tokens within them."""
    call = make_call(PLACES["few tokens"], torch.float32, batch=2)
    moved = [x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for x in call[:4]]
    other = call._replace(q=moved[0], k=moved[1], v=moved[2], dout=moved[3])
    for x, y in zip(
        (*run_forward(call)[3:], *run_backward(call)),
        (*run_forward(other)[3:], *run_backward(other)),
        strict=True,
    ):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


def test_out_may_be_the_state_itself() -> None:
    call = make_call(PLACES["zigzag, keys travel"], torch.float32)
    state = empty_state(call.q)
    alias = run_forward(call, state._replace(out=state.acc))
    assert torch.equal(alias.out, run_forward(call).out)


def test_tokens_of_the_state_may_come_before_batch_rows() -> None:
    """As they lie in what travels; and with a gap between batch rows, as in a part of a shard."""
    call = make_call(PLACES["zigzag, keys travel"], torch.float32, batch=2)
    plain = run_forward(call)
    batch, q_len, heads, head_dim = call.q.shape
    tokens_first = torch.full((q_len, batch, heads, head_dim), torch.nan, device=DEVICE)
    longer = torch.full((batch, q_len + 7, heads, head_dim), torch.nan, device=DEVICE)
    for acc in (tokens_first.transpose(0, 1), longer[:, 5:-2]):
        state = run_forward(call, empty_state(call.q)._replace(acc=acc, out=acc))
        assert torch.equal(state.out, plain.out)
        assert torch.equal(state.lse, plain.lse)
    assert longer[:, :5].isnan().all()
    assert longer[:, -2:].isnan().all()


def test_a_tile_that_sees_nothing_leaves_the_state_alone() -> None:
    call = make_call(PLACES["nothing is seen"], torch.float32)
    state = State(*(torch.randn_like(x) for x in empty_state(call.q)))
    before = [x.clone() for x in state]
    tile = call.tiles[0]._replace(first=False, last=False)
    KERNEL.forward(call.qkv(call.columns[0]), tile, state)
    assert all(torch.equal(x, y) for x, y in zip(before, state, strict=True))


def test_large_scores_do_not_overflow() -> None:
    call = make_call(PLACES["aligned"], torch.float32)
    q, k = call.q * 30, call.k * 30
    call = call._replace(
        q=q,
        k=k,
        truth=truth_of(q, k, call.v, call.dout, call.dlse, torch.ones(70, 70).tril().bool()),
    )
    state = run_forward(call)
    # A score of 1,000 in float32 is off by up to 1e-4, and so is its probability.
    assert relative_error(state.out, call.truth.out) < 1e-3
    assert relative_error(state.lse, call.truth.lse) < ERROR[torch.float32]
    assert all(got is not None and got.isfinite().all() for got in run_backward(call))


@pytest.mark.parametrize("scale", [1e-42, 1e-3, 3.0])
def test_the_scale_is_the_one_given(scale: float) -> None:
    call = make_call(PLACES["aligned"], torch.float32)
    truth = truth_of(
        call.q, call.k, call.v, call.dout, call.dlse, torch.ones(70, 70).tril().bool(), scale
    )
    call = call._replace(
        tiles=tuple(tile._replace(scale=scale) for tile in call.tiles), truth=truth
    )
    state = run_forward(call)
    assert relative_error(state.out, truth.out) < ERROR[torch.float32]
    for got, want in zip(run_backward(call, start=0.0), truth[2:5], strict=True):
        assert got is not None
        assert want is not None
        # Gradients of q and k as small as a scale of 1e-42 are no float32 numbers with digits.
        if scale > 1e-38 or want is truth.dv:
            assert relative_error(got, want) < ERROR[torch.float32]


def test_only_the_gradients_asked_for_are_made() -> None:
    call = make_call(PLACES["few tokens"], torch.float32)
    every = run_backward(call)
    for needs in ("q", "k", "v", "kv", "qv"):
        for name, got, want in zip("qkv", run_backward(call, needs=needs), every, strict=True):
            assert want is not None
            assert (
                (got is None) if name not in needs else (got is not None and torch.equal(got, want))
            )


def test_the_same_bits_every_time() -> None:
    call = make_call(PLACES["striped, queries travel"], torch.bfloat16)
    first = (*run_forward(call)[3:], *run_backward(call))
    for x, y in zip(first, (*run_forward(call)[3:], *run_backward(call)), strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


def test_rows_that_see_nothing_have_no_gradient_whatever_comes_for_their_lse() -> None:
    call = make_call(PLACES["more queries than keys"], torch.float32)
    blind = call.truth.lse.isinf()
    assert blind.any()
    # Strided as well: gradients of lse come as autograd leaves them.
    strided = torch.stack([call.dlse.masked_fill(blind, torch.nan), call.dlse], -1)[..., 0]
    top, delta = run_delta(call._replace(dlse=strided))
    assert torch.equal(top, call.truth.lse.float().masked_fill(blind, torch.inf))
    assert not delta[blind].any()
    want = (call.dout.double() * call.truth.out).sum(-1).transpose(1, 2) - call.dlse
    assert relative_error(delta, want.masked_fill(blind, 0.0)) < ERROR[torch.float32]


def test_delta_without_a_gradient_of_lse() -> None:
    call = make_call(PLACES["few tokens"], torch.float16)
    rows = torch.full((2, *call.truth.lse.shape), torch.nan, device=DEVICE)
    results = Results(call.truth.out.half(), call.truth.lse.float(), call.dout, None)
    KERNEL.delta(results, rows)
    want = (call.dout.double() * call.truth.out.half().double()).sum(-1).transpose(1, 2)
    assert relative_error(rows[1], want) < ERROR[torch.float32]


def test_transfers_are_looked_after_once_a_tile() -> None:
    call = make_call(PLACES["few tokens"], torch.float32)
    calls: list[str] = []
    tiles = tuple(tile._replace(progress=lambda: calls.append("progress")) for tile in call.tiles)
    run_forward(call._replace(tiles=tiles))
    run_backward(call._replace(tiles=tiles))
    assert len(calls) == 2 * len(tiles)


@pytest.mark.parametrize(
    ("positions", "why"),
    [
        ((range(69, -1, -1),), "columns must stand at ascending positions"),
        ((range(69),), "a tile with 70 kv tokens must have as many positions"),
    ],
)
def test_positions_it_cannot_do_are_an_internal_error(positions: _Runs, why: str) -> None:
    call = make_call(PLACES["aligned"], torch.float32)
    with pytest.raises(InternalError, match=why):
        KERNEL.forward(
            QKV(*call[:3]),
            call.tiles[0]._replace(kv_positions=positions),
            empty_state(call.q),
        )


def test_rows_in_any_order_and_columns_of_any_steps() -> None:
    """Spans are by row; columns need only ascend, in parts."""
    rows = (range(50, 70), range(69, 19, -2), range(20))
    for columns in (
        (range(5), range(7, 40, 3), range(50, 70)),
        (range(0, 30, 2), range(1, 31, 2), range(30, 70)),
    ):
        assert_right(make_call(Place(rows, (columns,)), torch.float32))


def test_tensors_it_cannot_do_are_an_internal_error() -> None:
    call = make_call(PLACES["aligned"], torch.float32)
    strided = call.q.repeat_interleave(2, 3)[..., ::2]
    with pytest.raises(InternalError, match="whose last dimension is dense"):
        KERNEL.forward(QKV(strided, call.k, call.v), call.tiles[0], empty_state(call.q))
    state = empty_state(call.q)
    heads_first = torch.empty(state.acc.transpose(1, 2).shape, device=DEVICE).transpose(1, 2)
    for wrong in (state._replace(acc=heads_first), state._replace(out=heads_first)):
        with pytest.raises(
            InternalError, match="tokens are dense, and whose acc and out lie alike"
        ):
            KERNEL.forward(QKV(*call[:3]), call.tiles[0], wrong)
    with pytest.raises(InternalError, match="dense states, lse and delta"):
        KERNEL.forward(
            QKV(*call[:3]),
            call.tiles[0],
            state._replace(m=torch.empty(1, 2, 140, device=DEVICE)[:, :, ::2]),
        )
