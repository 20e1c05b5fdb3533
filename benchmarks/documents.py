"""Packed documents under layouts that cut them and one that keeps them whole.

`python -m benchmarks documents` starts ranks on this host; under mpirun on several hosts each rank
calls it. Batches of documents are drawn, lognormal in length. Attention, forward and backward, runs
under each layout in turn.
"""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import torch

import burst_rt
from benchmarks.options import size_option
from burst_rt import Causal, Documents, burst_attention
from burst_rt.job.launched import mpi_ranks
from burst_rt.launch.measure.options import OUT, RANKS, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import progress_bar, slowest_s

__all__ = ["command", "run_rank"]

_TODAY = ("zigzag", "contiguous", "balanced")
_KINDS = (*_TODAY, "whole")
_HEADS, _WIDTH = 8, 64
_MIB = 2**20


def _lengths(tokens: int, typical: int, sigma: float, draw: np.random.Generator) -> list[int]:
    """Documents of a batch: lognormal lengths of this median; the last is cut off."""
    lengths: list[int] = []
    while sum(lengths) < tokens:
        length = int(np.clip(draw.lognormal(np.log(typical), sigma), 1, tokens))
        lengths.append(min(length, tokens - sum(lengths)))
    return lengths


class _Side:
    """A batch under a layout."""

    def __init__(self, ctx: burst_rt.Context, lengths: list[int], kind: str) -> None:
        self._ctx, self._mask = ctx, Causal() & Documents(lengths)
        follows = {"mask": self._mask} if kind in ("balanced", "whole") else {}
        costs = {
            "heads": (_HEADS, _HEADS), "head_dim": _WIDTH, "dtype": torch.float32,
            "token_cells": 0.0,
        } if kind == "whole" else {}  # fmt: skip
        self._layout = ctx.layout(sum(lengths), kind, **follows, **costs)  # type: ignore[arg-type]
        shape = (1, self._layout.shard_len, _HEADS, _WIDTH)
        self._qkv = [torch.randn(shape, device=ctx.device, requires_grad=True) for _ in range(3)]
        self._dout = torch.randn(shape, device=ctx.device)
        self.times: list[float] = []
        self.sent = 0

    def run(self) -> None:
        """Times a step. Blocks for the other ranks."""
        before = self._ctx.runtime.transport.bytes_sent
        self.times.append(slowest_s(self._ctx, self._step))
        self.sent = self._ctx.runtime.transport.bytes_sent - before

    def _step(self) -> None:
        out = burst_attention(*self._qkv, layout=self._layout, mask=self._mask)
        assert isinstance(out, torch.Tensor)
        torch.autograd.grad(out, self._qkv, self._dout)


def run_rank(
    tokens: int, batches: int, typical: int, sigma: float, repeats: int, out: str | None
) -> None:
    """Measures on all ranks; rank 0 prints and writes. Blocks for the other ranks."""
    draw = np.random.default_rng(0)
    took: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    sent: dict[str, list[int]] = {kind: [] for kind in _KINDS}
    with burst_rt.init(timeout_s=600, stall_s=300) as ctx:
        with progress_bar(ctx.rank == 0, batches) as step:
            for number in range(batches):
                step(f"batch {number}")
                lengths = _lengths(tokens, typical, sigma, draw)
                sides = {kind: _Side(ctx, lengths, kind) for kind in _KINDS}
                for _ in range(repeats + 1):
                    for side in sides.values():
                        side.run()
                for kind, side in sides.items():
                    took[kind].append(median(side.times[1:]))
                    sent[kind].append(sum(ctx.all_gather(side.sent)))
        best = min(_TODAY, key=lambda kind: median(took[kind]))
        rows: list[dict[str, Cell]] = []
        for kind in _KINDS:
            gains = [today / time for today, time in zip(took[best], took[kind], strict=True)]
            rows.append(
                {
                    "layout": kind, "seconds": median(took[kind]),
                    f"{best} over it": median(gains), "least": min(gains), "most": max(gains),
                    "sent MiB": median(sent[kind]) / _MIB,
                }
            )  # fmt: skip
        if ctx.rank == 0:
            publish(
                f"{batches} batches of {tokens:,} tokens, documents of {typical:,} (median, sigma "
                f"{sigma:g}): attention, forward + backward; {ctx.world_size} ranks",
                rows,
                out,
                f"medians of batches, each the median of {repeats} in turn; bytes of all ranks",
            )


@click.command()
@RANKS
@size_option("--tokens", 4096, "Tokens of a batch")
@size_option("--batches", 40, "Batches that are drawn")
@size_option("--typical", 200, "Median length of a document")
@click.option("--sigma", default=1.2, show_default=True, help="Of the logarithm of lengths.")
@REPEATS
@OUT
def command(
    num_ranks: int, tokens: int, batches: int, typical: int, sigma: float, repeats: int,
    out: Path | None,
) -> None:  # fmt: skip
    """Packed documents, cut and whole."""
    if mpi_ranks() > 1:  # which somebody started
        run_rank(tokens, batches, typical, sigma, repeats, str(out) if out else None)
        return
    options = {
        "tokens": tokens, "batches": batches, "typical": typical, "sigma": sigma,
        "repeats": repeats, "out": out,
    }  # fmt: skip
    run_on_ranks(run_rank, num_ranks, options, threads=1)
