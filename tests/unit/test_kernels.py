"""Tile kernels, tile by tile: `naive` and `cpu` against the spec, and against each other where
parts are cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from covering import sampled
from spec import Attention, reference, relative_error
from tolerances import ERROR, RATIO
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_rt import Full, Mask
from burst_rt.errors import InputError
from burst_rt.kernels import KERNELS as ALL_KERNELS
from burst_rt.kernels import (
    QKV,
    Gradients,
    Kernel,
    Results,
    State,
    Tile,
    Upstream,
    Work,
    cpu,
    pick,
    sum_dtype,
)
from burst_rt.kernels.bands import scratch_of_band
from burst_rt.kernels.base import fold
from burst_rt.kernels.cpu_calls import PartSize
from burst_rt.planning.masks import Piece, Relation, Shape
from burst_rt.planning.problem import TileShape

# Those that take CPU tensors and any mask; tests/interpreted has the others.
KERNELS = {name: ALL_KERNELS[name] for name in ("cpu", "naive")}

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Table(Mask):
    """A boolean table `[q_len, kv_len]`; rows are positions from kv_len - q_len on, as the spec
    aligns them.
    """

    seen: torch.Tensor

    def relation(self, q: range, kv: range) -> Relation:
        return Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:  # tensors
        return self.seen[q_position - (self.seen.shape[1] - self.seen.shape[0]), kv_position]


class Block(NamedTuple):
    """One q-block against one kv-block: tensors, the pieces, and what they leave seen."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    pieces: tuple[Piece, ...]
    mask: Table

    @property
    def qkv(self) -> QKV:
        return QKV(self.q, self.k, self.v)

    @property
    def truth(self) -> Attention:
        return reference(self.q, self.k, self.v, self.dout, self.dlse, mask=self.mask)

    def tile(
        self, pieces: tuple[Piece, ...] | None = None, progress: Any = lambda: None
    ) -> Tile:  # a callable
        """All pieces, or some. Positions come in two runs, as in a shard of two blocks."""
        kv_len, q_len = self.k.shape[1], self.q.shape[1]
        q, kv = range(kv_len - q_len, kv_len), range(kv_len)
        q_runs, kv_runs = (
            (whole[: len(whole) // 3], whole[len(whole) // 3 :]) for whole in (q, kv)
        )
        return Tile(
            self.pieces if pieces is None else pieces,
            q_runs,
            kv_runs,
            self.mask,
            self.q.shape[3] ** -0.5,
            progress,
        )


# (q_start, q_stop, kv_start, kv_stop, shape) of the pieces of a block of 100 x 130.
PIECES: dict[str, list[tuple[Any, ...]]] = {
    "all": [(0, 100, 0, 130, Shape.RECTANGLE)],
    "two halves": [(0, 100, 0, 57, Shape.RECTANGLE), (0, 100, 57, 130, Shape.RECTANGLE)],
    "a corner": [(31, 100, 17, 90, Shape.RECTANGLE)],
    "a triangle": [(0, 100, 0, 100, Shape.LOWER)],
    "a triangle with offsets": [(9, 80, 30, 101, Shape.LOWER)],
    "a wide triangle": [(0, 90, 11, 52, Shape.LOWER)],
    "causal": [(0, 100, 0, 30, Shape.RECTANGLE), (0, 100, 30, 130, Shape.LOWER)],
    "the other triangle": [(3, 100, 20, 117, Shape.UPPER)],
    "a band": [(2, 98, 4, 129, Shape.BAND)],
    "a narrow band": [(0, 100, 10, 112, Shape.BAND)],
    "masked": [(0, 100, 0, 130, Shape.MASKED)],
    "masked parts": [(0, 60, 0, 130, Shape.MASKED), (60, 100, 40, 100, Shape.MASKED)],
    "of everything": [
        (0, 40, 0, 20, Shape.RECTANGLE),
        (5, 100, 20, 110, Shape.LOWER),
        (40, 100, 112, 130, Shape.MASKED),
    ],
}


def make_block(
    name: str,
    dtype: torch.dtype,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    batch: int = 2,
    head_dim: int = 16,
) -> Block:
    generator = torch.Generator().manual_seed(1)
    # One packed tensor, as a projection to q, k, v leaves it: strided views.
    packed = torch.randn(
        batch, 130, heads + 2 * kv_heads, head_dim, generator=generator, dtype=torch.float64
    ).to(dtype)
    q, (k, v) = packed[:, :100, :heads], packed[:, :, heads:].split(kv_heads, dim=2)
    dout = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(dtype)
    dlse = torch.randn(batch, heads, 100, generator=generator, dtype=torch.float64).to(
        sum_dtype(dtype)
    )
    random = torch.rand(100, 130, generator=generator) < 0.3
    random[3] = False  # a row that sees nothing
    random[:, 5] = False  # a key nobody sees
    seen = torch.zeros(100, 130, dtype=torch.bool)
    pieces = []
    for a, b, c, d, shape in PIECES[name]:
        part = torch.ones(b - a, d - c, dtype=torch.bool)
        seen[a:b, c:d] = {
            Shape.RECTANGLE: part,
            Shape.LOWER: part.tril(),
            Shape.UPPER: part.triu(),
            Shape.BAND: part.triu().tril(d - c - b + a),
            Shape.MASKED: random[a:b, c:d],
        }[shape]
        pieces.append(Piece(a, b, c, d, shape, int(seen[a:b, c:d].sum())))
    return Block(q, k, v, dout, dlse, tuple(pieces), Table(seen))


def tiles(block: Block, *, split: bool) -> list[Tile]:
    """The block as one tile, or each piece as a tile of its own."""
    found = [block.tile((piece,)) for piece in block.pieces] if split else [block.tile()]
    return [tile._replace(first=tile is found[0], last=tile is found[-1]) for tile in found]


def empty_state(q: torch.Tensor) -> State:
    """All of it NaN."""
    batch, q_len, heads, _ = q.shape
    acc, out = (
        torch.full(q.shape, torch.nan, dtype=dtype) for dtype in (sum_dtype(q.dtype), q.dtype)
    )
    m, l, lse = (torch.full((batch, heads, q_len), torch.nan, dtype=acc.dtype) for _ in range(3))  # noqa: E741
    return State(acc, m, l, out, lse)


def run_forward(
    kernel: Kernel, block: Block, *, split: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    state = empty_state(block.q)
    for tile in tiles(block, split=split):
        kernel.forward(block.qkv, tile, state)
    return state.out, state.lse


def run_backward(
    kernel: Kernel,
    block: Block,
    truth: Attention,
    *,
    needs: str = "qkv",
    start: float = 1.0,
    split: bool = False,
) -> list[torch.Tensor | None]:
    """dq, dk, dv: what the kernel added to sums that were `start`, as if they came from other
    tiles.
    """
    wide = sum_dtype(block.q.dtype)
    rows = torch.full((2, *truth.lse.shape), torch.nan, dtype=wide)
    # out as it comes from a forward in the inputs' type would lose digits that are not the
    # backward's fault.
    results = Results(truth.out.to(wide), truth.lse.to(wide), block.dout.to(wide), block.dlse)
    kernel.delta(results, rows)
    sums = Gradients(
        *(
            torch.full(x.shape, start, dtype=wide) if name in needs else None
            for name, x in zip("qkv", block.qkv, strict=True)
        )
    )
    for tile in tiles(block, split=split):
        kernel.backward(block.qkv, Upstream(block.dout, rows[0], rows[1]), tile, sums)
    return [None if total is None else total - start for total in sums]


def assert_right(kernel: Kernel, block: Block, truth: Attention | None = None) -> None:
    """truth: the block's, where another block has the same."""
    truth = truth or block.truth
    assert_right_in_tiles(kernel, block, truth, split=False)
    assert_right_in_tiles(kernel, block, truth, split=True)


def assert_right_in_tiles(kernel: Kernel, block: Block, truth: Attention, *, split: bool) -> None:
    dtype = block.q.dtype
    out, lse = run_forward(kernel, block, split=split)
    assert relative_error(out, truth.out) < ERROR[dtype]
    # Sums are float32 at least, whatever the inputs.
    assert relative_error(lse, truth.lse) < ERROR[sum_dtype(dtype)]
    for got, want in zip(run_backward(kernel, block, truth, split=split), truth[2:5], strict=True):
        assert got is not None
        assert want is not None
        assert relative_error(got, want) < ERROR[sum_dtype(dtype)]
        untouched = (want == 0).flatten(2).all(-1)  # rows that see nothing, keys that nobody sees
        assert not got[untouched].any()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that every piece crosses them, and divides by none."""
    monkeypatch.setattr("burst_rt.kernels.cpu.PART", PartSize(32, 48, 1))
    monkeypatch.setattr("burst_rt.kernels.cpu.SMALL_PART", PartSize(21, 21, 1))
    monkeypatch.setattr("burst_rt.kernels.cpu._SMALL_SIDE", 21)


@sampled(kernel=KERNELS, dtype=_DTYPES, name=PIECES)
def test_pieces_add_up_to_the_spec(kernel: str, dtype: torch.dtype, name: str) -> None:
    assert_right(KERNELS[kernel], make_block(name, dtype))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_cut_into_parts_add_up_to_the_spec(dtype: torch.dtype, name: str) -> None:
    assert_right(KERNELS["cpu"], make_block(name, dtype))


@sampled(dtype=[torch.float32, torch.bfloat16], name=PIECES, batch=[1, 2])
def test_triangles_and_bands_taken_apart_add_up_to_the_spec(
    dtype: torch.dtype, name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down to 4 rows; blocks alike are batch rows where there is one."""
    for part in ("PART", "SMALL_PART"):
        monkeypatch.setattr(f"burst_rt.kernels.cpu.{part}", PartSize(60, 48, 1, edge=4, largest=60))
    monkeypatch.setattr("burst_rt.kernels.cpu_calls.STRIP", 7)
    assert_right(KERNELS["cpu"], make_block(name, dtype, batch=batch))


def _leave_bands_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow ones, too: for matrix products, not for the fused kernel."""
    nothing = {"forward": -1, "backward": -1}
    monkeypatch.setattr("burst_rt.kernels.cpu_calls._NARROW", nothing)


@sampled(
    dtype=_DTYPES, name=["a band", "a narrow band"], rows=[28, 120], kv_heads=[1, 3], batch=[1, 2]
)
def test_bands_in_strips_add_up_to_the_spec(
    dtype: torch.dtype,
    name: str,
    rows: int,
    kv_heads: int,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some rows at a time, in strips of 3 rows, two at once; the last one is shorter."""
    part = PartSize(rows, 48, 3, edge=4, largest=60, strips=False)
    monkeypatch.setattr("burst_rt.kernels.cpu.SMALL_PART", part)
    _leave_bands_whole(monkeypatch)
    for number, value in {"_ROWS": 12, "_FEWEST": 3, "_STRIP_ROWS": 3}.items():
        monkeypatch.setattr(f"burst_rt.kernels.bands.{number}", value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        block = make_block(name, dtype, heads=2 * kv_heads, kv_heads=kv_heads, batch=batch)
        assert_right(KERNELS["cpu"], block)
        truth = block.truth
        for needs in ("q", "k", "v"):
            got = run_backward(KERNELS["cpu"], block, truth, needs=needs)
            for x, want in zip(got, truth[2:5], strict=True):
                assert want is not None
                assert x is None or relative_error(x, want) < ERROR[sum_dtype(dtype)]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("sharpness", [1.0, 20.0, 100.0])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("whole", [False, True])
def test_a_bands_errors_are_torchs_own(
    whole: bool, head_dim: int, sharpness: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one key has nearly all of a row: lse must give back the score it came from."""
    if whole:
        _leave_bands_whole(monkeypatch)
    torch.manual_seed(0)
    rows, width = 400, 64
    columns = rows + width - 1
    q, dout = (torch.randn(1, rows, 2, head_dim) for _ in range(2))
    k, v = (torch.randn(1, columns, 1, head_dim) for _ in range(2))
    q *= sharpness
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    table = (column >= row) & (column < row + width)
    piece = Piece(0, rows, 0, columns, Shape.BAND, rows * width)
    block = Block(q, k, v, dout, torch.zeros(1, 2, rows), (piece,), Table(table))
    truth = block.truth
    own, lse = run_forward(KERNELS["cpu"], block)
    own_truth = truth._replace(out=own, lse=lse)  # what its backward gets
    grads = run_backward(KERNELS["cpu"], block, own_truth, start=0.0)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    their_q, their_k, their_v = (x.transpose(1, 2) for x in inputs)
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(their_q, their_k, their_v, attn_mask=table, enable_gqa=True).transpose(1, 2)
    theirs = (out, *torch.autograd.grad(out, inputs, dout))
    for x, y, want in zip((own, *grads), theirs, (truth.out, *truth[2:5]), strict=True):
        assert x is not None
        assert want is not None
        assert relative_error(x, want) < RATIO * relative_error(y.detach(), want)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 256), (3, 3, 20), (8, 1, 33), (6, 2, 1)]
)
def test_head_counts_and_sizes(kernel: Kernel, heads: int, kv_heads: int, head_dim: int) -> None:
    assert_right(
        kernel,
        make_block(
            "of everything",
            torch.float32,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            batch=1,
        ),
    )


def test_tiles_larger_than_the_parts() -> None:
    """The part sizes as they are."""
    rows, columns = 4200, 4300
    generator = torch.Generator().manual_seed(2)
    q, dout, k, v = (
        torch.randn(1, n, 1, 16, generator=generator) for n in (rows, rows, columns, columns)
    )
    seen = torch.ones(rows, columns, dtype=torch.bool).tril(100)
    pieces = (
        Piece(0, rows, 0, 100, Shape.RECTANGLE, rows * 100),
        Piece(0, rows, 100, columns, Shape.LOWER, rows * (rows + 1) // 2),
    )
    block = Block(q, k, v, dout, torch.zeros(1, 1, rows), pieces, Table(seen))
    truth = block.truth
    assert_right(KERNELS["cpu"], block, truth)
    by_cells = (Piece(0, rows, 0, columns, Shape.MASKED, rows * columns),)
    assert_right(KERNELS["cpu"], block._replace(pieces=by_cells), truth)


def test_a_row_may_see_only_keys_far_into_a_masked_piece() -> None:
    """The fused kernel goes through the keys in blocks, of which the first ones are then masked
    altogether.
    """
    generator = torch.Generator().manual_seed(3)
    q, dout, k, v = (torch.randn(1, n, 2, 16, generator=generator) for n in (70, 70, 1500, 1500))
    seen = torch.zeros(70, 1500, dtype=torch.bool)
    seen[:35, 1400:] = True
    seen[35:60, :5] = True
    block = Block(
        q,
        k,
        v,
        dout,
        torch.zeros(1, 2, 70),
        (Piece(0, 70, 0, 1500, Shape.MASKED, 70 * 1500),),
        Table(seen),
    )
    for kernel in KERNELS.values():
        assert_right(kernel, block)


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_only_the_gradients_asked_for_are_made(kernel: Kernel) -> None:
    block = make_block("of everything", torch.float32)
    every = run_backward(kernel, block, block.truth)
    for needs in ("q", "k", "v", "kv", "qv"):
        some = run_backward(kernel, block, block.truth, needs=needs)
        for name, got, want in zip("qkv", some, every, strict=True):
            assert want is not None
            assert (
                (got is None) if name not in needs else (got is not None and torch.equal(got, want))
            )


@pytest.mark.parametrize("magnitude", [1e-38, 1e-25, 1e-10, 1.0, 1e10, 1e20])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_gradients_are_as_accurate_at_any_magnitude(kernel: Kernel, magnitude: float) -> None:
    """Whatever the size of dout O' can stand in for O, and where sizes differ from row to
    row, too.
    """
    block = make_block("causal", torch.float32)
    uneven = torch.logspace(-5, 5, 100)[:, None, None]
    for factor in (torch.tensor(magnitude), magnitude * uneven):
        scaled = block._replace(
            dout=(block.dout.double() * factor).float(), dlse=torch.zeros_like(block.dlse)
        )
        truth = scaled.truth
        for got, want in zip(
            run_backward(kernel, scaled, truth, start=0.0), truth[2:5], strict=True
        ):
            assert got is not None
            assert want is not None
            # Below the smallest normal number digits are lost: no relative accuracy there.
            tolerance = ERROR[torch.float32] if magnitude > 1e-30 else 1e-2
            assert relative_error(got.double() / magnitude, want / magnitude) < tolerance


@pytest.mark.parametrize("rows", ["some", "all"])
@pytest.mark.parametrize("dlse", ["zero", "random", "large"])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_rows_of_dout_that_are_zero_keep_the_gradient_of_lse(
    kernel: Kernel, dlse: str, rows: str
) -> None:
    block = make_block("of everything", torch.float32)
    dout = block.dout.clone()
    dout[:, :: 3 if rows == "some" else 1] = 0
    dout[:, 1] = torch.finfo(torch.float32).tiny / 1024 if rows == "some" else 0  # next to nothing
    factor = {"zero": 0.0, "random": 1.0, "large": 1e6}[dlse]
    block = block._replace(dout=dout, dlse=block.dlse * factor)
    truth = block.truth
    for got, want in zip(run_backward(kernel, block, truth, start=0.0), truth[2:5], strict=True):
        assert got is not None
        assert want is not None
        assert relative_error(got, want) < ERROR[torch.float32]


@pytest.mark.parametrize("largest", [2e-39, 1e-38, 2e-38])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_rows_of_dout_that_are_subnormal_keep_the_gradient_of_lse(
    kernel: Kernel, largest: float
) -> None:
    block = make_block("causal", torch.float32)
    block = block._replace(dout=block.dout.sign() * largest, dlse=block.dlse * 1e-4)
    truth = block.truth
    for got, want in zip(run_backward(kernel, block, truth, start=0.0), truth[2:5], strict=True):
        assert got is not None
        assert want is not None
        assert relative_error(got / 1e-4, want / 1e-4) < 1e-5


@pytest.mark.parametrize("columns", [1, 4, 15, 16, 33])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_query_of_nan_gives_nan(kernel: Kernel, columns: int) -> None:
    """Whatever the number of keys, of which a fused kernel may lose it."""
    q, k, v = (torch.randn(1, n, 2, 8) for n in (20, columns, columns))
    q[:, 3] = torch.nan
    piece = Piece(0, 20, 0, columns, Shape.RECTANGLE, 20 * columns)
    sides = (range(20),), (range(columns),)
    tile = Tile((piece,), *sides, Full(), 1.0, lambda: None, first=True, last=True)
    state = empty_state(q)
    kernel.forward(QKV(q, k, v), tile, state)
    for x in (state.out[0].flatten(1), state.lse[0].T):
        assert x.isnan().any(1).tolist() == [row == 3 for row in range(20)]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_the_same_bits_every_time(kernel: Kernel) -> None:
    block = make_block("of everything", torch.float32)
    first = (*run_forward(kernel, block), *run_backward(kernel, block, block.truth))
    for _ in range(5):
        for x, y in zip(
            first,
            (*run_forward(kernel, block), *run_backward(kernel, block, block.truth)),
            strict=True,
        ):
            assert x is not None
            assert y is not None
            assert torch.equal(x, y)


@pytest.mark.usefixtures("small_parts")
def test_transfers_are_looked_after_between_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # With one thread the kernel takes the kv heads one by one.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    block = make_block("all", torch.float32)
    calls: list[str] = []
    tile = block.tile(progress=lambda: calls.append("progress"))._replace(first=True)
    KERNELS["cpu"].forward(block.qkv, tile, empty_state(block.q))
    # ceil(100 / 32) x ceil(130 / 48), for each of 2 kv heads.
    assert len(calls) == 4 * 3 * 2
    zeros = torch.zeros(2, 4, 100)
    KERNELS["cpu"].backward(
        block.qkv, Upstream(block.dout, zeros, zeros), tile, Gradients(None, None, None)
    )
    assert len(calls) == 2 * 4 * 3 * 2


@pytest.mark.usefixtures("small_parts")
def test_a_triangle_is_not_computed_where_it_hides_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 x 100 under a triangle, no more is computed than what is seen and triangles of at most
    a part's 32 rows.
    """
    cells, waste = 0, 0
    attend = cpu._attend

    def counting(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal cells, waste
        rows, columns = q.shape[2], k.shape[2]
        assert not causal or rows == columns <= 32
        cells += q.shape[1] * rows * columns
        waste += q.shape[1] * rows * (rows - 1) // 2 if causal else 0
        return attend(q, k, v, causal, mask, scale)

    monkeypatch.setattr(cpu, "_attend", counting)
    run_forward(KERNELS["cpu"], make_block("a triangle", torch.float32))
    assert cells - waste == 4 * 100 * 101 // 2
    assert waste == 4 * (3 * 32 * 31 + 4 * 3) // 2


@dataclass(frozen=True, eq=False)
class Stated(Table):
    """A table that says of every rectangle what it leaves of it."""

    def relation(self, q: range, kv: range) -> Relation:
        part = self.allows(torch.tensor(q)[:, None], torch.tensor(kv))
        return Relation.FULL if part.all() else Relation.PARTIAL if part.any() else Relation.EMPTY


@pytest.mark.usefixtures("small_parts")
def test_of_a_masked_piece_only_what_is_seen_in_part_is_computed_under_the_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A band of 70 columns along the diagonal, in parts of 21 x 21 at positions that come in two
    runs.
    """
    seen = torch.ones(100, 130, dtype=torch.bool).tril(50).triu(-19)
    block = make_block("masked", torch.float32)._replace(mask=Stated(seen))
    assert_right(KERNELS["cpu"], block)
    cells = {True: 0, False: 0}
    attend = cpu._attend

    def counting(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cells[mask is not None] += q.shape[1] * q.shape[2] * k.shape[2]
        return attend(q, k, v, causal, mask, scale)

    monkeypatch.setattr(cpu, "_attend", counting)
    run_forward(KERNELS["cpu"], block)
    parts = [part for rows in seen.split(21) for part in rows.split(21, dim=1)]
    assert cells[False] == 4 * sum(part.numel() for part in parts if part.all()) > 0
    assert (
        cells[True]
        == 4 * sum(part.numel() for part in parts if part.any() and not part.all())
        < 4 * seen.numel()
    )


@pytest.mark.parametrize("dtype", _DTYPES)
def test_what_a_row_that_saw_nothing_ends_as(dtype: torch.dtype) -> None:
    state = empty_state(torch.empty(2, 3, 1, 4, dtype=dtype))
    state.start()
    state.finish()
    assert torch.equal(state.out, torch.zeros(2, 3, 1, 4, dtype=dtype))
    assert torch.equal(state.lse, torch.full((2, 1, 3), -torch.inf, dtype=sum_dtype(dtype)))


@pytest.mark.parametrize("dtype", _DTYPES)
def test_states_merge_as_if_their_tiles_had_been_folded_into_one(dtype: torch.dtype) -> None:
    """Where one has seen nothing, the other stays bit for bit; where both, it is nothing."""
    wide = sum_dtype(dtype)
    q, k, v = (torch.randn(1, 6, 2, 8, dtype=torch.float64).to(dtype) for _ in range(3))

    def folded(*columns: slice) -> State:
        state = empty_state(q)
        state.start()
        for some in columns:
            # Rows 2 and 3 see none of the first columns, rows 4 and 5 none at all.
            rows = slice(0, 4) if some.start else slice(0, 2)
            cells = 3 * (rows.stop - rows.start)
            piece = Piece(rows.start, rows.stop, 0, 3, Shape.RECTANGLE, cells)
            one = Tile((piece,), (range(6),), (range(3),), Full(), 0.5, lambda: None)
            ALL_KERNELS["naive"].forward(QKV(q, k[:, some], v[:, some]), one, state)
        return state

    first, other = slice(0, 3), slice(3, 6)
    merged, part, both = folded(first), folded(other), folded(first, other)
    every = slice(0, 6)
    fold(part.acc, part.m, merged, every, weight=part.l)
    for x, y in zip(merged[:3], both[:3], strict=True):
        assert relative_error(x, y.double()) < ERROR[wide]
    for x, y in zip(merged.at(slice(2, 6)), part.at(slice(2, 6)), strict=True):
        assert torch.equal(x, y)
    merged.finish()
    assert torch.equal(merged.out[:, 4:], torch.zeros_like(merged.out[:, 4:]))
    assert (merged.lse[:, :, 4:] == -torch.inf).all()
    again = folded(other)
    nothing = folded()
    fold(nothing.acc, nothing.m, again, every, weight=nothing.l)
    assert all(torch.equal(x, y) for x, y in zip(again[:3], part[:3], strict=True))


def test_which_kernel_is_taken() -> None:
    cpu = torch.device("cpu")
    for dtype in _DTYPES:
        picked = pick(Work(cpu, dtype, 64, Full()))
        # Nothing is measured where there is nothing to choose.
        assert picked.kernel.name == "cpu"
        reason, *others = picked.reason.split("; the cpu-bf16 kernel")
        assert reason == "the only kernel here that can compute this call"
        assert len(others) == (dtype == torch.bfloat16)
    picked = pick(Work(cpu, torch.float32, 64, Full()), "naive")
    assert (picked.kernel.name, picked.reason) == ("naive", "asked for by name")
    with pytest.raises(
        InputError,
        match=r"one of \['cpu', 'cpu-bf16', 'cudnn', .*\], got 'flashier'",
    ):
        pick(Work(cpu, torch.float32, 64, Full()), "flashier")
    for name in ("auto", "cpu"):
        with pytest.raises(InputError, match=r"the cpu kernel takes .*, got torch.int32"):
            pick(Work(cpu, torch.int32, 64, Full()), name)
        with pytest.raises(InputError, match="takes CPU tensors, got meta"):
            pick(Work(torch.device("meta"), torch.float32, 64, Full()), name)


class _Peak(TorchDispatchMode):
    """Counts the bytes that torch's operators return in new memory, as long as it is in use."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {x.untyped_storage().data_ptr() for x in known}
        self._live: dict[StorageWeakRef, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._live = {x: size for x, size in self._live.items() if not x.expired()}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._live[StorageWeakRef(storage)] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return out


_BANDS = [
    (8, 2, 32, 1700, 701), (3, 3, 32, 1700, 701), (24, 1, 32, 1700, 701),
    (5, 5, 1, 1000, 2048), (8, 8, 128, 1024, 2048), (2, 2, 16, 100, 64),
]  # fmt: skip
_TYPES_AND_THREADS = list(itertools.product([torch.float32, torch.bfloat16], [1, 4]))


# Heads, kv heads, head_dim, rows, width.
_Sizes: TypeAlias = tuple[int, int, int, int, int]


def _peaks(sizes: _Sizes, dtype: torch.dtype, threads: int) -> tuple[TileShape, int, int]:
    """A tile that is a band, and the most memory that its forward and its backward take."""
    heads, kv_heads, head_dim, rows, width = sizes
    columns = rows + width - 1
    shape = TileShape(2, heads, kv_heads, head_dim, rows, columns, banded=True)
    piece = Piece(0, rows, 0, columns, Shape.BAND, rows * width)
    return shape, *_peaks_of(shape, (head_dim, head_dim), piece, dtype, threads)


def _peaks_of(
    shape: TileShape, dims: tuple[int, int], piece: Piece, dtype: torch.dtype, threads: int
) -> tuple[int, int]:
    """dims: the head_dim of q and k, and that of v."""
    batch, heads, kv_heads, _, rows, columns = shape[:6]
    kernel, before = KERNELS["cpu"], torch.get_num_threads()
    q, dout = (torch.randn(batch, rows, heads, dim, dtype=dtype) for dim in dims)
    k, v = (torch.randn(batch, columns, kv_heads, dim, dtype=dtype) for dim in dims)
    block = Block(q, k, v, dout, torch.empty(0), (piece,), Table(torch.empty(0, 0)))
    (tile,) = tiles(block, split=False)
    torch.set_num_threads(threads)
    try:
        state = empty_state(dout)
        with _Peak([*block.qkv, *state]) as forward:
            kernel.forward(block.qkv, tile._replace(last=False), state)
        state.finish()
        wide = state.acc.dtype
        upstream = Upstream(dout, state.lse, torch.zeros_like(state.lse))
        zeros = [torch.zeros(x.shape, dtype=wide) for x in block.qkv]
        sums = Gradients(*zeros)
        with _Peak([*block.qkv, *upstream[:3], *zeros]) as backward:
            kernel.backward(block.qkv, upstream, tile, sums)
    finally:
        torch.set_num_threads(before)
    return forward.peak_bytes, backward.peak_bytes


# The types and numbers of threads take turns; the others of a size are `long`.
@pytest.mark.parametrize(
    ("dtype", "sizes", "threads"),
    [
        pytest.param(*pair, marks=() if at % 4 == turn else pytest.mark.long)
        for at, sizes in enumerate(_BANDS)
        for turn, pair in enumerate((dtype, sizes, n) for dtype, n in _TYPES_AND_THREADS)
    ],
)
def test_a_band_takes_no_more_memory_than_scratch_bytes(
    dtype: torch.dtype, sizes: _Sizes, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor than its own part of them says, where the widest band there can be is no wider."""
    *_, rows, width = sizes
    monkeypatch.setattr("burst_rt.kernels.bands.WIDEST_BAND", width)
    _leave_bands_whole(monkeypatch)
    shape, *peaks = _peaks(sizes, dtype, threads)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    for direction, peak in zip((True, False), peaks, strict=True):
        assert 0 < peak <= scratch_of_band(direction, dtype, shape, rows)
        assert peak <= KERNELS["cpu"].scratch_bytes(direction, dtype, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 65, 257, 513])
@pytest.mark.parametrize(("heads", "kv_heads", "rows"), [(8, 2, 1700), (3, 3, 100), (2, 1, 6000)])
def test_a_narrow_band_takes_no_more_memory_than_scratch_bytes(
    heads: int, kv_heads: int, rows: int, width: int, dtype: torch.dtype
) -> None:
    shape, *peaks = _peaks((heads, kv_heads, 32, rows, width), dtype, 1)
    for direction, peak in zip((True, False), peaks, strict=True):
        assert 0 < peak <= KERNELS["cpu"].scratch_bytes(direction, dtype, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dims", [(64, 64), (128, 32), (192, 128), (32, 96)])
def test_heads_of_two_sizes_take_no_more_memory_than_scratch_bytes(
    dims: tuple[int, int], dtype: torch.dtype
) -> None:
    """The narrower side is copied."""
    shape = TileShape(1, 8, 2, max(dims), 1024, 1024, uneven=dims[0] - dims[1])
    piece = Piece(0, 1024, 0, 1024, Shape.LOWER, 1024 * 1025 // 2)
    peaks = _peaks_of(shape, dims, piece, dtype, 1)
    for direction, peak in zip((True, False), peaks, strict=True):
        assert 0 < peak <= KERNELS["cpu"].scratch_bytes(direction, dtype, shape) < 3 * peak


@pytest.mark.parametrize("name", KERNELS)
def test_scratch_is_bounded_by_the_parts(name: str) -> None:
    kernel = KERNELS[name]
    for forward, masked in itertools.product((True, False), repeat=2):
        sizes = [
            kernel.scratch_bytes(forward, torch.bfloat16, TileShape(1, 8, 2, 64, n, n, masked))
            for n in (1000, 100_000, 1_000_000)
        ]
        assert sizes[0] > 0
        if name == "cpu":
            assert sizes[1] == sizes[2]
