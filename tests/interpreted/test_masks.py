"""Every mask through the Triton kernels, forward and backward, over ranks that are threads, against
the float64 spec under cells from plain loops.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from covering import first_of
from mask_cases import FACTORS, Row, all_pairs, assert_row
from mask_truths import FUNCTIONS, MASKS, Sizes, cells_of, truth_of
from spec import errors_of, reference
from tolerances import ERROR
from worlds import Case, attend_over_threads

import burst_rt
from burst_rt import BlockSparse, Causal, Documents, First, Mask, Relation, SlidingWindow
from burst_rt.attention.call import make_call
from burst_rt.attention.options import OptionArguments
from burst_rt.kernels.triton import parts, tables
from burst_rt.planning import sides
from burst_rt.planning.masks import Function

# Blocks of the interpreter are 32 x 16 and 16 x 32, those of a GPU up to 128 x 128.
_TIMES = 1 if os.environ.get("TRITON_INTERPRET") == "1" else 9
# World, strategy, layouts of queries and keys, lengths: each mask takes the next of each.
_WORLDS = (1, 2, 3, 4, 5)
_STRATEGIES = ("burst", "all-to-all", "ring-kv", "bidirectional", "ring-q", "hybrid", "two-level")
_KINDS = (
    ("zigzag", "zigzag"),
    ("striped", "striped"),
    ("contiguous", "striped"),
    ("zigzag", "contiguous"),
    ("striped", "zigzag"),
)
_LENGTHS = ((40, 40), (33, 41), (41, 33))


def _cases() -> list[tuple[str, int, str, tuple[str, str], tuple[int, int]]]:
    factors = zip(*map(cycle, (_WORLDS, _STRATEGIES, _KINDS, _LENGTHS)), strict=False)
    found = []
    for name, (world, strategy, kinds, (q_len, kv_len)) in zip(MASKS, factors, strict=False):
        if truth_of(name, Sizes(q_len, kv_len, 2)) is None:
            q_len, kv_len = kv_len, q_len
        found.append((name, world, strategy, kinds, (_TIMES * q_len, _TIMES * kv_len)))
    return found


def _truth(name: str, sizes: Sizes) -> torch.Tensor:
    """Cells from plain loops, which take too long for a GPU's lengths."""
    if _TIMES > 1:
        return cells_of(MASKS[name].mask(sizes), sizes)
    truth = truth_of(name, sizes)
    assert truth is not None
    return truth


def assert_right(world: int, case: Case, truth: torch.Tensor) -> None:
    got = attend_over_threads(world, case, kernel="triton")
    expected = reference(*case.inputs(), mask=truth)
    for output, error in errors_of(got, expected).items():
        assert error < ERROR[torch.float32 if output == "lse" else case.dtype], output


@pytest.mark.parametrize(("name", "world", "strategy", "kinds", "lengths"), _cases())
def test_every_mask(
    name: str, world: int, strategy: str, kinds: tuple[str, str], lengths: tuple[int, int]
) -> None:
    sizes = Sizes(*lengths, 2)
    truth = _truth(name, sizes)
    heads = world if strategy in ("all-to-all", "hybrid") else 1
    case = Case(
        *lengths, heads=heads, batch=2, mask=MASKS[name].mask(sizes), strategy=strategy,
        kind=kinds[0], kv_kind=kinds[1]
    )  # fmt: skip
    assert_right(world, case, truth)


def _rows() -> list[Any]:
    """Each mask, strategy, kind of layout, world and pair of lengths with the Triton kernels.

    `unit/test_masked_attention.py` has the pairs of all these with each other. Rows that add only
    their mask are `long`: `test_every_mask` and `test_every_function` have each mask.
    """
    masks, strategies, kinds, worlds, lengths, dtypes, _ = FACTORS
    # burst-untiled brings a kernel of its own, and float64 is not for Triton.
    strategies = [name for name in strategies if name != "burst-untiled"]
    dtypes = [dtype for dtype in dtypes if dtype != torch.float64]
    factors = (masks, strategies, kinds, worlds, lengths, dtypes, ["triton"])
    rows = list(all_pairs(factors, kernel=True))
    seen: set[Any] = set()
    short = []
    for row in rows:
        without_mask = {*row[1:]}
        if not without_mask <= seen:
            short.append(row)
        seen |= without_mask
    return first_of(rows, 0, *short)


@pytest.mark.parametrize("row", _rows(), ids=lambda row: " ".join(map(str, row)))
def test_the_covering_array(row: Row) -> None:
    assert_row(row)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *zip(FUNCTIONS, cycle(("burst", "all-to-all", "ring-kv")), strict=False),
        ("function of rows and heads", "ring-q"),
    ],
)
def test_every_function(name: str, strategy: str) -> None:
    sizes = Sizes(_TIMES * 20, _TIMES * 24, 2)
    mask, truth = FUNCTIONS[name].mask(sizes), truth_of(name, sizes, 2)
    assert truth is not None
    assert_right(2, Case(*sizes[:2], heads=2, batch=2, mask=mask, strategy=strategy), truth)


def test_hundreds_of_documents_in_a_shard() -> None:
    mask = Causal() & Documents([1, 2, 3] * 70)
    case = Case(420, heads=1, mask=mask, kind="contiguous")
    assert_right(2, case, cells_of(mask, Sizes(420, 420, 1)))


def _third(b: Any, h: Any, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return (q + kv) % 3 > 0


@dataclass(frozen=True)
class _Odd(Mask):
    """Keys at odd positions; without spans."""

    def relation(self, q: range, kv: range) -> Relation:
        return Relation.PARTIAL

    def allows(self, q_position: Any, kv_position: Any) -> Any:
        return (kv_position % 2 == 1) & (q_position >= 0)


def test_a_mask_without_spans() -> None:
    mask = _Odd() & Causal()
    assert_right(2, Case(40, heads=2, kv_heads=1, mask=mask), cells_of(mask, Sizes(40, 40, 1)))


def test_a_function_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some columns and some heads at a time, of heads in groups and batch rows that differ."""
    monkeypatch.setattr(parts, "_MOST_CELLS", 500)
    monkeypatch.setattr(parts, "_COLUMNS", 16)
    name, sizes = "function of rows and heads", Sizes(20, 24, 2)
    mask, truth = FUNCTIONS[name].mask(sizes), truth_of(name, sizes, 4)
    assert truth is not None
    case = Case(*sizes[:2], heads=4, kv_heads=2, batch=2, mask=mask, dtype=torch.bfloat16)
    assert_right(1, case, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_and_heads_in_groups(dtype: torch.dtype) -> None:
    sizes = Sizes(_TIMES * 40, _TIMES * 40, 1)
    truth = _truth("sinks", sizes)
    mask = MASKS["sinks"].mask(sizes)
    assert_right(2, Case(_TIMES * 40, heads=4, kv_heads=2, dtype=dtype, mask=mask), truth)


def test_more_spans_than_there_are_vectors_for() -> None:
    """Every other token by itself: some rows have 20 spans, some none."""
    tokens = torch.arange(40)
    table = ((tokens[:, None] + tokens) % 2 == 0) & (tokens[:, None] % 7 != 3)
    mask = BlockSparse(table, 1)
    case = Case(40, heads=1, mask=mask, kind="contiguous")
    assert_right(1, case, table)
    assert_right(2, case, table)


@pytest.mark.parametrize(("block", "kind"), [(1, "striped"), (3, "contiguous"), (8, "zigzag")])
def test_many_spans_that_differ_by_batch_row(block: int, kind: str) -> None:
    made = torch.Generator().manual_seed(block)
    length = 101 * _TIMES
    blocks = -(-length // block)
    table = torch.rand(2, blocks, blocks, generator=made) < 0.4
    table[1, ::5] = False
    table[0, :, : blocks // 2] = False  # a batch row with half as many spans
    truth = table.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :length, :length]
    case = Case(length, batch=2, heads=2, kv_heads=1, mask=BlockSparse(table, block), kind=kind)
    assert_right(2, case, truth)


def _of_lengths(*lengths: int) -> Documents:
    return Documents([_TIMES * length for length in lengths])


@pytest.mark.parametrize("strategy", ["burst", "direct", "ring-q"])
@pytest.mark.parametrize(
    "mask",
    [
        Causal() & SlidingWindow(_TIMES * 12) | First(3),
        _of_lengths(50, 20, 90, 96),
        BlockSparse([[(i * j) % 5 == 0 for j in range(8)] for i in range(8)], _TIMES * 32),
        Mask.from_function(_third, _of_lengths(50, 20, 90, 96), "third"),
    ],
    ids=["window", "documents", "blocks", "function"],
)
def test_blocks_that_come_in_part(
    mask: Mask, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not sent holds NaN; kernels load whole blocks of rows. Keys travel, then queries."""
    if _TIMES == 1:
        monkeypatch.setattr(sides, "ROWS_TOGETHER", 32)
    length = _TIMES * 256
    case = Case(
        length, heads=1, head_dim=16, batch=2, mask=mask, kind="contiguous", strategy=strategy
    )
    at = torch.arange(length)
    if isinstance(mask, Function):
        cells = mask.within.allows(at[:, None], at) & _third(None, None, at[:, None], at)
    else:
        cells = mask.allows(at[:, None], at)
    assert_right(2, case, cells)


_WINDOW = Causal() & SlidingWindow(9) | First(3)


@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("mask", [_WINDOW, Mask.from_function(_third, within=_WINDOW)])
def test_the_tables_of_a_call_are_in_its_memory(
    mask: Mask, slopes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept after a call is what its plans announce, over both ranks."""
    monkeypatch.setattr(parts, "_MOST_CELLS", 500)

    def run(ctx: burst_rt.Context) -> int:
        layout = ctx.layout(70 * _TIMES)
        q = torch.randn(1, layout.shard_len, 2, 16, device=ctx.device, requires_grad=True)
        options = OptionArguments(
            mask=mask, strategy="burst",
            alibi_slopes=torch.ones(2, device=ctx.device) if slopes else None,
        )  # fmt: skip
        burst_rt.burst_attention(q, q, q, layout=layout, **options).sum().backward()
        call = make_call(q, q, q, layout=layout, **options)
        plans = (call.forward_plan, call.backward_plan)
        return sum(plan.memory().tables for plan in plans)

    monkeypatch.setattr(tables, "_tables", tables._Tables())
    announced = sum(burst_rt.run_local(2, run, kernel="triton"))
    kept = [kept.size_bytes for _, kept in tables._tables.items()]
    assert announced == sum(kept) > 0


@pytest.mark.parametrize(
    ("length", "count", "mask"),
    [
        # Of each rank's rows a part is sent.
        (_TIMES * 304, _TIMES * 106, First(_TIMES * 106)),
        # Nobody knows what it leaves out: all is sent.
        (_TIMES * 152, 50, Mask.from_function(lambda *at: at[3] < 50)),
    ],
    ids=["first", "function"],
)
def test_striped_groups_whose_columns_do_not_ascend(
    length: int, count: int, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels count blocks from where each ascending part begins; what is not sent holds NaN."""
    if _TIMES == 1:
        monkeypatch.setattr(sides, "ROWS_TOGETHER", 32)
    case = Case(length, heads=2, mask=mask, kind="striped", strategy="hybrid:2")
    cells = (torch.arange(length) < count).expand(length, length)
    assert_right(4, case, cells)
