"""Decodes over ranks that are threads: caches spread by blocks, what is seen, the truth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from spec import reference

from burst_rt import Context
from burst_rt.kernels import QKV, ScoreOptions, sum_dtype
from burst_rt.kernels.decode import SeenColumns
from burst_rt.planning.masks.spans import END, Spans
from burst_rt.runtime.agreement import Contract
from burst_rt.serving.decode_plan import plan_decode
from burst_rt.serving.decode_run import run_decode

__all__ = ["CASES", "Case", "decode", "own_columns", "run_one", "spans_of"]

_BLOCK = 4  # tokens that stand together on a rank


@dataclass(frozen=True)
class Case:
    """A decode: what is cached of each sequence, and the last `num_queries` of it as queries."""

    lengths: tuple[int, ...]
    num_queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: torch.dtype = torch.float32
    padding: tuple[int, ...] = ()  # of each sequence, on the left
    window: int | None = None
    ends: int = 0  # with a window, so many tokens of the beginning are seen too
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, and k and v of all positions."""
        generator = torch.Generator().manual_seed(7)
        batch, most = len(self.lengths), max(self.lengths)
        q, k, v = (
            torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for shape in (
                (batch, self.num_queries, self.heads, self.head_dim),
                (batch, most, self.kv_heads, self.head_dim),
                (batch, most, self.kv_heads, self.v_head_dim),
            )
        )
        return q, k, v

    def score_options(self) -> ScoreOptions:
        generator = torch.Generator().manual_seed(8)
        sinks = torch.randn(self.heads, generator=generator, dtype=torch.float64)
        wide = sum_dtype(self.dtype)
        return ScoreOptions(softcap=self.softcap, sinks=sinks.to(wide) if self.sinks else None)

    def cells(self) -> torch.Tensor:
        """Bool `[batch, queries, positions]`: what is seen."""
        at = torch.arange(max(self.lengths))
        rows = []
        for number, length in enumerate(self.lengths):
            first = self.padding[number] if self.padding else 0
            for query in range(length - self.num_queries, length):
                seen = (at <= query) & (at >= first)
                if self.window is not None:
                    seen &= (at > query - self.window) | (at < first + self.ends)
                rows.append(seen)
        return torch.stack(rows).view(len(self.lengths), self.num_queries, -1)

    def truth(self) -> torch.Tensor:
        q, k, v = self.tensors()
        dout = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
        score_options = self.score_options()
        return reference(
            q, k, v, dout, mask=self.cells(), scale=self.scale, softcap=self.softcap,
            sinks=score_options.sinks,
        ).out  # fmt: skip


def own_columns(num: int, rank: int, world: int) -> torch.Tensor:
    """The positions whose keys a rank has."""
    at = torch.arange(num)
    return at[at // _BLOCK % world == rank]


def spans_of(cells: torch.Tensor) -> Spans:
    """The spans of seen columns: bool `[batch, queries, columns]`."""
    rows = []
    for row in cells.flatten(0, 1).tolist():
        edges = np.flatnonzero(np.diff(np.array([False, *row, False]).astype(np.int8)))
        rows.append(edges.reshape(-1, 2))
    width = max(1, *map(len, rows))
    table = np.full((len(rows), width, 2), END, np.int64)
    for number, row in enumerate(rows):
        table[number, : len(row)] = row
    table = table.reshape(*cells.shape[:2], width, 2)
    return Spans(table[..., 0], table[..., 1])


def decode(ctx: Context, case: Case) -> torch.Tensor:
    """The decode on one rank."""
    q, k, v = case.tensors()
    own, cells = own_columns(k.shape[1], ctx.rank, ctx.world_size), case.cells()
    seen = cells[:, :, own].any(1)
    hull = (seen.cumsum(1) > 0) & (seen.flip(1).cumsum(1).flip(1) > 0)
    caches = []
    for x in (k, v):
        # A cache has room for more than is there, and nothing need ever have been written to it.
        cache = torch.full((x.shape[0], len(own) + 3, *x.shape[2:]), torch.nan, dtype=x.dtype)
        cache[:, : len(own)] = x[:, own].masked_fill(~hull[..., None, None], torch.nan)
        caches.append(cache[:, : len(own)])
    what_is_seen = SeenColumns(spans_of(cells[:, :, own]), len(own))
    return run_one(ctx, QKV(q, *caches), what_is_seen, k.shape[1], case.score_options(), case.scale)


def run_one(
    ctx: Context,
    qkv: QKV,
    seen: SeenColumns,
    keys: int,
    score_options: ScoreOptions,
    scale: float | None = None,
) -> torch.Tensor:
    """Plans a decode, and runs it."""
    plan = plan_decode(
        ctx.attention, qkv.q.shape, qkv.k.shape[2], qkv.v.shape[3], qkv.q.dtype, keys=keys,
        scores=score_options.flags,
    )  # fmt: skip
    contract = Contract({"call": "a decode"})
    return run_decode(
        ctx.attention, contract, plan, qkv, seen, scale=scale, score_options=score_options
    )


CASES = {
    "one token": Case((37,)),
    "a first token": Case((1,)),
    "many heads a group": Case((50,), heads=6, kv_heads=1),
    "as many kv heads": Case((50,), heads=3, kv_heads=3),
    "several tokens": Case((41,), num_queries=5),
    "sixteen tokens": Case((16,), num_queries=16),
    "lengths differ": Case((40, 1, 23), num_queries=1),
    "lengths differ, several tokens": Case((40, 9, 23), num_queries=3),
    "left padding": Case((30, 30, 30), padding=(0, 11, 29), num_queries=2),
    "rows that see nothing": Case((30, 30), padding=(0, 30), num_queries=2),
    "a window": Case((70,), window=9),
    "a window and the beginning": Case((70, 33), window=9, ends=5, num_queries=4),
    "sinks": Case((37, 20), sinks=True),
    "sinks alone": Case((30, 30), padding=(3, 30), sinks=True),
    "softcap": Case((37, 20), softcap=1.5, num_queries=2),
    "everything": Case((70, 33), window=9, ends=5, num_queries=4, softcap=2.0, sinks=True),
    "v of another size": Case((37, 20), head_dim=24, v_head_dim=16),
    "a scale": Case((37,), scale=0.7),
}
