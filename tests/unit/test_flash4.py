"""The flash-4 kernel without a GPU: how tiles become calls of FlashAttention-4, what a call hands
to it and makes of its answers, with a double of its two functions.

The double computes by what the package's own text says: windows are counted from the lower right
corner, dlse is taken from rowsum(dO * O), results have the inputs' 16 bits. `make test-flash-4`
gives the same calls to the package itself, which compiles its kernels; tests/gpu runs them.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from drawn_masks import drawn_mask
from mask_truths import Sizes, cells_of
from spec import errors_of, reference, relative_error
from tolerances import ERROR
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import Causal, Chunked, Documents, First, Full, Mask, Prefix, SlidingWindow
from burst_rt.kernels import KERNELS, QKV, Gradients, Results, State, Tile, Upstream, Work, flash4
from burst_rt.kernels.base import Kept, Places
from burst_rt.kernels.flash4 import _calls_of, whole_tile
from burst_rt.kernels.vendor import PartOfTile
from burst_rt.planning.masks import Shape
from burst_rt.planning.problem import ScoreFlags, TileShape

_KERNEL = KERNELS["flash-4"]
_WHOLE = ((range(64),), (range(64),))


def _window(rows: int, columns: int, left: int | None, right: int | None) -> torch.Tensor:
    """The cells of a call, by FlashAttention's rule."""
    i = torch.arange(rows)[:, None] + columns - rows
    j = torch.arange(columns)
    seen = torch.ones(rows, columns, dtype=torch.bool)
    if left is not None:
        seen &= j >= i - left
    if right is not None:
        seen &= j <= i + right
    return seen


def _cells(calls: Sequence[PartOfTile], q_len: int, kv_len: int, batch: int = 1) -> torch.Tensor:
    """How many calls see each cell."""
    seen = torch.zeros(batch, q_len, kv_len, dtype=torch.int64)
    for call in calls:
        for number in range(batch):
            of_row = seen[number, call.rows, call.columns]
            if not call.ends:
                rows, columns = of_row.shape
                of_row += _window(rows, columns, call.left, call.right)
                continue
            for start, end in pairwise((0, *call.ends[number % len(call.ends)])):
                size = end - start
                of_row[start:end, start:end] += _window(size, size, call.left, call.right)
    return seen


@pytest.mark.parametrize("seed", range(400))
def test_calls_see_the_cells_of_the_mask_once(seed: int) -> None:
    chance = random.Random(seed)
    size, batch = chance.choice([40, 200]), chance.randrange(1, 3)
    length = chance.randrange(1, size)
    drawn = drawn_mask(chance, length, length, batch, chance.randrange(3))
    places = ((range(length),), (range(length),))
    pieces = drawn.mask.pieces(range(length), range(length))
    whole = whole_tile(drawn.mask, places)
    for calls in ([] if whole is None else [whole], _calls_of(pieces)):
        if calls and (calls == [whole] or all(x.shape is not Shape.MASKED for x in pieces)):
            cells = drawn.cells[:, 0].expand(batch, length, length)
            assert torch.equal(_cells(calls, length, length, batch), cells.long())


_ALL = slice(0, 64)
_PAIR = [[20, 44], [1, 3, 60]]
WHOLE = {
    "full": (Full(), PartOfTile(_ALL, _ALL)),
    "causal": (Causal(), PartOfTile(_ALL, _ALL, right=0)),
    "a window": (SlidingWindow(9, 0), PartOfTile(_ALL, _ALL, 9, 0)),
    "a window as long as all": (SlidingWindow(63, 0), PartOfTile(_ALL, _ALL, right=0)),
    "a window to both sides": (SlidingWindow(9, 3), PartOfTile(_ALL, _ALL, 9, 3)),
    "a window to the right": (SlidingWindow(-1, 3), PartOfTile(_ALL, _ALL, None, 3)),
    "documents": (Documents([20, 1, 43]), PartOfTile(_ALL, _ALL, ends=((20, 21, 64),))),
    "causal documents": (
        Documents([20, 1, 43]) & Causal(),
        PartOfTile(_ALL, _ALL, right=0, ends=((20, 21, 64),)),
    ),
    "documents under a window, two of them no longer than it": (
        Documents([20, 4, 3, 37]) & SlidingWindow(3, 0),
        PartOfTile(_ALL, _ALL, 3, 0, ends=((20, 24, 27, 64),)),
    ),
    "documents of each batch row": (
        Documents(_PAIR) & Causal(),
        PartOfTile(_ALL, _ALL, right=0, ends=((20, 64), (1, 4, 64))),
    ),
    "chunks": (Chunked(16), PartOfTile(_ALL, _ALL, ends=((16, 32, 48, 64),))),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_one_call_computes(name: str) -> None:
    mask, call = WHOLE[name]
    assert whole_tile(mask, _WHOLE) == call
    assert torch.equal(_cells([call], 64, 64, 2), cells_of(mask, Sizes(64, 64, 2)).long())


@pytest.mark.parametrize(
    ("mask", "places"),
    [
        (Causal(), ((range(40, 64),), (range(64),))),
        (SlidingWindow(9, 2), ((range(40, 64),), (range(25, 64),))),
        (SlidingWindow(2000, 0), ((range(9000),), (range(9000),))),
        # Keys before and after all that is seen.
        (SlidingWindow(9, 2), ((range(100, 140),), (range(400),))),
        (Documents([100, 20, 20, 100]), ((range(100, 140),), (range(240),))),
        # Striped: query 2i + 1 sees the keys 0, 2, ... up to 2i, which is its own place.
        (Causal(), ((range(1, 64, 2),), (range(0, 64, 2),))),
        (Causal(), ((range(16), range(48, 64)), (range(16), range(48, 64)))),
    ],
)
def test_what_one_call_computes_of_parts_of_a_sequence(mask: Mask, places: Places) -> None:
    call = whole_tile(mask, places)
    assert call is not None
    q, kv = (torch.cat([torch.tensor(run) for run in runs]) for runs in places)
    seen = mask.allows(q[:, None], kv)
    assert torch.equal(_cells([call], len(q), len(kv))[0].bool(), seen)


@pytest.mark.parametrize(
    ("mask", "places"),
    [
        (Prefix(10), _WHOLE),
        (Causal() | First(5), _WHOLE),
        (SlidingWindow(9, 0) | First(4), _WHOLE),
        (Mask.from_function(lambda q, kv: q >= kv), _WHOLE),
        # Rows that see nothing.
        (Causal(), ((range(64),), (range(32, 64),))),
        # Striped the other way round: query 0 does not see key 1.
        (Causal(), ((range(0, 62, 2),), (range(1, 63, 2),))),
        (Documents([32, 32]) & Causal(), ((range(16, 64),), (range(64),))),
        # Positions that do not ascend.
        (Full(), ((range(64),), (range(0, 64, 2), range(1, 64, 2)))),
        # One long document and many short ones: memory for as many long ones.
        (Documents([2000, *[1] * 30]), ((range(2030),), (range(2030),))),
    ],
)
def test_what_no_single_call_computes(mask: Mask, places: Places) -> None:
    assert whole_tile(mask, places) is None


class Double:
    """In the place of the package's two functions.

    calls: what each was asked for. in_order: whether each backward was to repeat its bits.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.in_order: list[bool] = []
        self._inside = threading.Lock()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The package compiles in its functions, and takes one thread at a time."""
        assert self._inside.acquire(blocking=False)
        time.sleep(1e-3)
        yield
        self._inside.release()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float,
        return_lse: bool, out: torch.Tensor, lse: torch.Tensor, **masked: Any,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        assert return_lse
        self.calls.append(masked)
        _check(q, k, v, out)
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        with self._alone():
            self._compute(q, k, v, softmax_scale, out, lse, masked)
        return out, lse, None, None, None

    @staticmethod
    def _compute(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, out: torch.Tensor,
        lse: torch.Tensor, masked: dict[str, Any],
    ) -> None:  # fmt: skip
        for at, of_lse, left, right in _sequences(q, lse, masked):
            wq, wk, wv = (_wide(y[at], q.shape[-2]) for y in (q, k, v))
            s = _scores(wq, wk, scale, left, right)
            out[at] = (s.softmax(-1) @ wv).transpose(0, 1).to(q.dtype)
            lse[of_lse] = s.logsumexp(-1).float()

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        dout: torch.Tensor, lse: torch.Tensor, *, softmax_scale: float, deterministic: bool,
        dlse: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, **masked: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        self.in_order.append(deterministic)
        self.calls.append(masked)
        _check(q, k, v, out, dout, dq, dk, dv)
        assert lse.dtype == dlse.dtype == torch.float32
        heads, kv_heads = q.shape[-2], k.shape[-2]
        for at, of_lse, left, right in _sequences(q, lse, masked):
            wq, wk, wv, wo, wdo = (_wide(y[at], heads) for y in (q, k, v, out, dout))
            s = _scores(wq, wk, softmax_scale, left, right)
            p = torch.exp(s - lse[of_lse].double()[..., None])
            delta = (wdo * wo).sum(-1) - dlse[of_lse].double()
            ds = p * (wdo @ wv.mT - delta[..., None]) * softmax_scale
            dq[at] = _narrow(ds @ wk, heads).to(q.dtype)
            dk[at] = _narrow(ds.mT @ wq, kv_heads).to(q.dtype)
            dv[at] = _narrow(p.mT @ wdo, kv_heads).to(q.dtype)
        return dq, dk, dv


def _check(q: torch.Tensor, *others: torch.Tensor) -> None:
    for x in (q, *others):
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.ndim == q.ndim
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride % 8 == 0 for stride in x.stride()[:-1])
        assert x.numel() > 0


def _sequences(q: torch.Tensor, lse: torch.Tensor, masked: dict[str, Any]) -> list[Any]:
    """The places of each sequence in tensors and in lse, with its window."""
    left, right = masked["window_size_left"], masked["window_size_right"]
    if masked["causal"]:
        assert (left, right) == (None, None)
        right = 0
    bounds = masked.get("cu_seqlens_q")
    assert lse.ndim == q.ndim - 1
    if bounds is None:
        return [(row, row, left, right) for row in range(q.shape[0])]
    assert bounds.dtype == torch.int32
    assert masked["cu_seqlens_k"] is bounds
    assert bounds[0] == 0
    assert bounds[-1] == q.shape[0]
    assert masked["max_seqlen_q"] == masked["max_seqlen_k"] == int(bounds.diff().max())
    parts = [slice(a, b) for a, b in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True)]
    return [(part, (slice(None), part), left, right) for part in parts]


def _wide(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[tokens, heads, d] -> [heads, tokens, d] in float64, with all query heads."""
    return x.double().transpose(0, 1).repeat_interleave(heads // x.shape[1], 0)


def _narrow(x: torch.Tensor, heads: int) -> torch.Tensor:
    narrow: torch.Tensor = x.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
    return narrow


def _scores(
    q: torch.Tensor, k: torch.Tensor, scale: float, left: int | None, right: int | None
) -> torch.Tensor:
    s = q @ k.mT * scale
    return s.masked_fill(~_window(s.shape[1], s.shape[2], left, right), -torch.inf)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    made = Double()
    functions = flash4._Interface(made.forward, made.backward)
    monkeypatch.setattr(flash4, "_interface", lambda: functions)
    monkeypatch.setattr(flash4.Flash4Kernel, "device_type", "cpu")
    monkeypatch.setattr(flash4.Flash4Kernel, "_generation", lambda self, device: 9)
    return made


# With the number of calls, and of tokens.
_MASKS: dict[str, tuple[Mask, int, int]] = {
    name: (mask, 1, 64) for name, (mask, _) in WHOLE.items()
} | {
    "a prefix": (Prefix(64), 3, 160),
    "the first keys and a window": (SlidingWindow(69, 0) | First(1), 3, 160),
}


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", _MASKS)
def test_a_tile_against_the_spec(name: str, dtype: torch.dtype, only: bool, double: Double) -> None:
    mask, number, size = _MASKS[name]
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(2, size, 8, 25, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = packed[:, :, :4, 1:], packed[:, :, 4:6, 1:], packed[:, :, 6:, 1:17]
    dout = torch.randn(2, size, 4, 16, generator=generator, dtype=torch.float64).to(dtype)
    dlse = torch.randn(2, 4, size, generator=generator)
    truth = reference(q, k, v, dout, dlse, mask=mask, scale=0.3)
    whole = (range(size),)
    pieces = mask.pieces(*whole, *whole)
    tile = Tile(pieces, whole, whole, mask, 0.3, lambda: None, True, True)
    wide = torch.float32
    m, total, lse = (torch.full((2, 4, size), torch.nan) for _ in range(3))
    acc, out = (torch.full(dout.shape, torch.nan, dtype=x) for x in (wide, dtype))
    _KERNEL.forward(QKV(q, k, v), tile, State(acc, m, total, out, lse))
    assert len(double.calls) == number
    assert relative_error(out, truth.out) < ERROR[dtype]
    assert torch.allclose(lse, truth.lse.float(), rtol=1e-6)

    rows = torch.full((2, 2, 4, size), torch.nan)
    _KERNEL.delta(Results(truth.out.float(), truth.lse.float(), dout, dlse), rows)
    start = torch.nan if only else 1.0
    grads = [torch.full(x.shape, start, dtype=dtype if only else torch.float32) for x in (q, k, v)]
    tile = tile._replace(first=only, last=only)
    _KERNEL.backward(QKV(q, k, v), Upstream(dout, rows[0], rows[1]), tile, Gradients(*grads))
    assert len(double.calls) == 2 * number
    for got, want in zip(grads, truth[2:5], strict=True):
        assert want is not None
        assert relative_error(got if only else got - 1.0, want) < ERROR[dtype]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("case", "world_size", "partials"),
    [
        (Case(60, mask=SlidingWindow(7, 0), dtype=torch.bfloat16), 1, "exact"),
        (Case(61, head_dim=192, v_head_dim=128, dtype=torch.float16), 1, "exact"),
        (Case(61, heads=4, kv_heads=2, dtype=torch.float16), 1, "exact"),
        (Case(64, mask=Documents([9, 55]) & Causal(), batch=2, dtype=torch.float16), 1, "exact"),
        (
            Case(
                64, heads=4, mask=Documents([9, 55]) & Causal(), strategy="all-to-all",
                dtype=torch.bfloat16,
            ),
            2,
            "exact",
        ),
        # Heads in slices, each of which is complete.
        (
            Case(64, heads=8, mask=Documents([9, 55]), strategy="sliced", dtype=torch.bfloat16),
            2,
            "exact",
        ),
        (Case(61, mask=Causal(), dtype=torch.float16, strategy="burst"), 3, "16bit"),
        # Positions of keys that do not ascend.
        (Case(64, heads=4, strategy="hybrid:2", kind="striped", dtype=torch.bfloat16), 4, "16bit"),
        # Keys that nobody needs, and that do not arrive.
        (
            Case(
                64, kv_len=2048, mask=SlidingWindow(100, 0), kind="contiguous", kv_kind="zigzag",
                strategy="ring-kv", dtype=torch.bfloat16,
            ),
            2,
            "16bit",
        ),
        (Case(320, mask=SlidingWindow(90, 0), dtype=torch.bfloat16), 2, "16bit"),
    ],
)  # fmt: skip
def test_whole_calls(case: Case, world_size: int, partials: str) -> None:
    got = attend_over_threads(world_size, case, kernel="flash-4", partials=partials)
    for field, error in errors_of(got, case.truth).items():
        limit = ERROR[torch.float32 if field == "lse" else case.dtype]
        # What is rounded once a tile is off by about as much as what is rounded at the end.
        rounded_twice = partials == "16bit" and field != "lse"
        assert error < limit * (2 if rounded_twice else 1), (field, error)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_in_any_order_where_bits_need_not_repeat(world_size: int, double: Double) -> None:
    """But not once torch is told otherwise."""
    case = Case(64, mask=Causal(), dtype=torch.bfloat16)
    options = {"kernel": "flash-4", "partials": "16bit"}
    for free in (False, True):
        for told in (False, True):
            double.in_order.clear()
            torch.use_deterministic_algorithms(told)
            try:
                attend_over_threads(world_size, case, deterministic=not free, **options)
            finally:
                torch.use_deterministic_algorithms(False)
            assert set(double.in_order) == {told or not free}

    def explained(ctx: burst_rt.Context) -> str:
        x = torch.zeros(1, 64, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        return str(burst_rt.explain(x, x, x, layout=ctx.layout(64)))

    for free in (False, True):
        (words,) = burst_rt.run_local(1, explained, kernel="flash-4", deterministic=not free)
        forward, backward = words.split("backward:")
        assert "differ" not in forward
        assert ("its sums differ in the last bits from run to run" in backward) is free


def test_bounds_are_kept_with_the_plan(double: Double) -> None:
    mask = Documents([9, 55]) & Causal()
    q, k, v = (torch.zeros(2, 64, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    kept = Kept({}, 0)
    tile = Tile((), *_WHOLE, mask, 0.3, lambda: None, True, True, kept=kept)
    lse = torch.zeros(2, 2, 64)
    for _ in range(2):
        _KERNEL.forward(QKV(q, k, v), tile, State(q.float(), lse, lse, torch.empty_like(q), lse))
    first, second = (call["cu_seqlens_q"] for call in double.calls)
    assert first is second
    assert first.tolist() == [0, 9, 64, 73, 128]


def _work(mask: Mask, **options: Any) -> Work:
    work = Work(torch.device("cuda"), torch.bfloat16, 128, mask, places=_WHOLE)
    return work._replace(**{"tiles": (mask.pieces(range(64), range(64)),)} | options)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = 9
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (generation, 0))
    monkeypatch.setattr(flash4, "_interface", lambda: flash4._Interface(None, None))
    fine = _work(Causal())
    pieces = Prefix(64).pieces(range(160), range(160))
    prefix = _work(Prefix(64), tiles=(pieces,), places=((range(160),), (range(160),)))
    table = Mask.from_function(lambda q, kv: q >= kv)
    for work, why in (
        (fine._replace(device=torch.device("cpu")), "takes CUDA tensors, got cpu"),
        (fine._replace(dtype=torch.float32), "takes bfloat16 and float16, got torch.float32"),
        (
            fine._replace(head_dim=20),
            "a multiple of 8, at most 256, or 192 and 128 of v, got 20 and 20 of v",
        ),
        (fine._replace(v_head_dim=64), "got 128 and 64 of v"),
        (fine._replace(head_dim=264), "at most 256"),
        (fine._replace(scores=ScoreFlags(softcap=True)), "no exact softcap"),
        (fine._replace(scores=ScoreFlags(alibi_slopes=True)), "no ALiBi"),
        (_work(table), "cuts this call's tiles into other shapes"),
        (fine._replace(ring_size=2), "burst_rt.init(partials='16bit') allows that"),
        (prefix, "several partial results"),
    ):
        reason = _KERNEL.refuses(work)
        assert reason is not None
        assert reason.startswith("the flash-4 kernel ")
        assert why in reason
    for direction in (True, False):
        for mask in (Full(), SlidingWindow(9, 0), Documents([20, 44]) & Causal()):
            assert _KERNEL.refuses(_work(mask, forward=direction)) is None
        assert _KERNEL.repeatable(direction)
        assert _KERNEL.refuses(fine._replace(forward=direction, dtype=torch.float16)) is None
        assert _KERNEL.refuses(fine._replace(forward=direction, head_dim=256)) is None
        odd = fine._replace(forward=direction, head_dim=192, v_head_dim=128)
        assert _KERNEL.refuses(odd) is None
        grouped = str(_KERNEL.refuses(odd._replace(grouped=True)))
        assert ("where query heads share keys, got 192 and 128 of v" in grouped) is not direction
    generation = 10
    for direction in (True, False):
        wide = fine._replace(forward=direction, head_dim=256)
        assert ("at most 128 on this GPU" in str(_KERNEL.refuses(wide))) is not direction
        assert _KERNEL.refuses(wide._replace(head_dim=192, v_head_dim=128)) is None
    generation = 8
    assert "compute capability 9 to 11, got 8" in str(_KERNEL.refuses(fine))


def test_which_results_it_writes_itself() -> None:
    prefix, places = Prefix(64), ((range(160),), (range(160),))
    for mask, writes in (
        (SlidingWindow(9, 0), True),
        (Documents([20, 44]), True),
        (prefix, False),
    ):
        work, size = _work(mask), 64
        if mask is prefix:
            size = 160
            pieces = prefix.pieces(range(size), range(size))
            work = work._replace(tiles=(pieces,), places=places)
        shape = TileShape(1, 2, 2, 64, size, size)
        assert _KERNEL.writes_results(work, shape) is writes
        assert _KERNEL.writes_gradients(work._replace(forward=False), shape) is writes


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType | None, str], str]:
    """What `_interface` says of a package that is installed, or not."""

    def said(module: ModuleType | None, release: str) -> str:
        from importlib.metadata import PackageNotFoundError

        def version(name: str) -> str:
            assert name == "flash-attn-4"
            if not release:
                raise PackageNotFoundError(name)
            return release

        monkeypatch.setattr(flash4, "version", version)
        # None in its place: importing it raises ImportError.
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", module)
        flash4._interface.cache_clear()
        found = flash4._interface()
        flash4._interface.cache_clear()
        return found if isinstance(found, str) else ""

    return said


def test_a_package_that_is_missing_broken_or_another_one(
    package: Callable[[ModuleType | None, str], str],
) -> None:
    assert package(None, "") == "needs the package flash-attn-4, which is not installed"
    broken = package(None, "4.0.0b36")
    assert broken.startswith("could not import flash-attn-4 4.0.0b36: ModuleNotFoundError: ")
    module = ModuleType("flash_attn.cute.interface")

    def backward(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, causal: bool) -> None: ...

    double = Double()

    def forward(
        q: Any, k: Any, v: Any, softmax_scale: Any, causal: Any, window_size_left: Any,
        window_size_right: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any,
        max_seqlen_k: Any, return_lse: Any, out: Any, lse: Any,
    ) -> None: ...  # fmt: skip

    module.__dict__.update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    older = package(module, "4.0.0b3")
    assert older.startswith("takes no flash-attn-4 4.0.0b3, whose backward has no [")
    assert "'dlse'" in older
    assert "'causal'" not in older
    module.__dict__.update(_flash_attn_fwd=double.backward)
    assert "whose backward has no ['causal'" in package(module, "5")
