"""`burst-rt bench attention`: attention over MPI ranks against torch's in one process.

Both sides of every comparison run in turn in one job, so that the machine's noise hits them alike.
The side of one process, with as many threads as there are ranks, is rank 0 while the other ranks
sleep. A time is the slowest rank's, from a common start.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

import burst_rt
from burst_rt import Causal, Context, Documents, Mask, Prefix, SlidingWindow
from burst_rt.kernels import PARTIALS
from burst_rt.launch.measure.plots import draw_bars
from burst_rt.launch.measure.report import Cell, median, publish
from burst_rt.launch.measure.timing import (
    Versus,
    WorstIdle,
    alone_s,
    in_turn,
    progress_bar,
    slowest_s,
    versus,
    worst_idle,
)

__all__ = ["TITLES", "Bench", "CallShape", "Rows", "inputs", "measure_attention", "run_parts"]

Rows: TypeAlias = list[dict[str, Cell]]


class CallShape(NamedTuple):
    """One attention: forward and backward, batch 1."""

    tokens: int
    heads: int
    dtype: torch.dtype = torch.float32
    causal: bool = False
    mask: Mask | None = None
    softcap: float | None = None
    head_dim: int = 64

    @property
    def kind(self) -> str:
        """The layout over ranks; under a mask the one that "auto" takes for it."""
        return "auto" if self.mask else "zigzag" if self.causal else "contiguous"


def inputs(
    shape: CallShape, tokens: int, device: torch.device, generator: torch.Generator | None = None
) -> list[torch.Tensor]:
    """q, k, v, dout of standard normal numbers, drawn on the CPU; q, k, v want gradients.

    `[1, tokens, heads, head_dim]`.
    """
    size = (1, tokens, shape.heads, shape.head_dim)
    drawn = (torch.randn(size, generator=generator, device="cpu") for _ in range(4))
    tensors = [x.to(device, shape.dtype) for x in drawn]
    for x in tensors[:3]:
        x.requires_grad_()
    return tensors


class Bench:
    """One rank of the benchmark job. Every method that measures blocks for the other ranks."""

    def __init__(self, repeats: int, max_tokens: int) -> None:
        self.ctx = burst_rt.init(timeout_s=1200, stall_s=120)
        self.repeats = repeats
        self.max_tokens = max_tokens
        torch.manual_seed(0)

    def alone_s(self, fn: Callable[[], object]) -> float:
        """Seconds of `fn` on rank 0, with a thread for each rank, while the other ranks sleep."""
        return alone_s(self.ctx, fn, self.ctx.world_size)

    def ours(self, shape: CallShape, ctx: Context | None = None) -> Callable[[], object]:
        """A function that runs forward and backward over the ranks.

        ctx: a context of the same ranks with settings of its own.
        """
        layout = (ctx or self.ctx).layout(shape.tokens, shape.kind, mask=shape.mask)
        q, k, v, dout = inputs(shape, layout.shard_len, self.ctx.device)

        def run() -> None:
            out = burst_rt.burst_attention(
                q, k, v, causal=shape.causal, mask=shape.mask, layout=layout, softcap=shape.softcap
            )
            torch.autograd.grad(out, (q, k, v), dout)

        return run

    def torch_alone(self, shape: CallShape) -> Callable[[], object]:
        """A function that runs forward and backward of torch's own attention in one process.

        A mask other than Causal becomes a dense matrix.
        """
        if self.ctx.rank:
            return lambda: None
        given = inputs(shape, shape.tokens, self.ctx.device)
        q, k, v, dout = (x.detach().transpose(1, 2) for x in given)
        for x in (q, k, v):
            x.requires_grad_()
        causal = shape.causal or shape.mask == Causal()
        at, dense = torch.arange(shape.tokens, device="cpu"), None
        if shape.mask is not None and not causal:
            dense = shape.mask.allows(at[:, None], at).to(self.ctx.device)

        def run() -> None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=dense, is_causal=causal)
            torch.autograd.grad(out, (q, k, v), dout)

        return run

    def speed(self) -> Rows:
        """Forward + backward in float32 against torch's fused attention."""
        return self._speed(self.ctx, torch.float32)

    def bf16(self) -> Rows:
        """`speed` in bfloat16: with partial results in float32, and where these may be rounded."""
        rows: Rows = []
        for partials in PARTIALS:
            with burst_rt.init(timeout_s=1200, stall_s=120, partials=partials) as ctx:
                measured = self._speed(ctx, torch.bfloat16)
            rows.extend({"partials": partials, **row} for row in measured)
        return rows

    def _speed(self, ctx: Context, dtype: torch.dtype) -> Rows:
        sizes = [(2048, 8), (4096, 8), (8192, 8), (16384, 8), (32768, ctx.world_size)]
        head_dim = 64
        if ctx.device.type == "cuda":
            sizes, head_dim = [(2**at, 16) for at in range(14, 21)], 128
        rows: Rows = []
        for tokens, heads in sizes:
            for causal in (False, True):
                if tokens > self.max_tokens:
                    continue
                shape = CallShape(tokens, heads, dtype, causal, head_dim=head_dim)
                took = self.versus_torch(shape, ctx)
                rows.append(
                    {
                        "tokens": tokens, "heads": heads, "mask": "causal" if causal else "full",
                        "ranks s": took.first_s, "torch s": took.second_s,
                        "speed against torch": took.ratio, "paired": took.paired,
                    }
                )  # fmt: skip
        return rows

    def versus_torch(self, shape: CallShape, ctx: Context) -> Versus:
        """The ranks against torch's attention in one process."""
        ours, theirs = self.ours(shape, ctx), self.torch_alone(shape)
        return versus(
            partial(slowest_s, self.ctx, ours), partial(self.alone_s, theirs), self.repeats
        )

    def masks(self) -> Rows:
        """Forward + backward under masks, and causal with a softcap, which torch's fused attention
        does not have: time for each cell that is seen, relative to causal's.

        Layouts are those that "auto" takes. Then it measures again, in turn with torch's fused
        attention in one process under the mask as a dense matrix: 4 GiB of float32 at 32,768
        tokens.
        """
        rows: Rows = []
        for tokens in (16384, 32768):
            if tokens <= self.max_tokens:
                rows.extend(self._masks(tokens))
        return rows

    def _masks(self, tokens: int) -> Rows:
        chance = random.Random(0)
        ends = sorted(chance.sample(range(1, tokens), 19))
        lengths = [b - a for a, b in pairwise([0, *ends, tokens])]
        capped = "causal, softcap 30"
        masks = {
            "causal": Causal(),
            "window 1,024": SlidingWindow(1023),
            "20 documents": Causal() & Documents(lengths),
            "prefix of half": Prefix(tokens // 2),
            capped: Causal(),
        }
        shapes = {
            name: CallShape(tokens, 2, mask=mask, softcap=30.0 if name == capped else None)
            for name, mask in masks.items()
        }
        ours = {name: partial(slowest_s, self.ctx, self.ours(s)) for name, s in shapes.items()}
        took = in_turn(list(ours.values()), self.repeats)
        seconds = dict(zip(masks, zip(*took, strict=True), strict=True))
        # Torch's runs have a loop of their own: a dense mask evicts our memory from the processor's
        # caches.
        against: dict[str, list[float]] = {name: [] for name in masks if name != capped}
        theirs = {name: self.torch_alone(shapes[name]) for name in against}
        for _ in range(self.repeats):
            for name in against:
                torch_s = self.alone_s(theirs[name])
                against[name].append(torch_s / ours[name]())
        line = range(tokens)
        cells = {
            name: sum(piece.num_cells for piece in mask.pieces(line, line))
            for name, mask in masks.items()
        }
        return [
            {
                "tokens": tokens, "mask": name, "cells seen": cells[name],
                "ranks s": median(seconds[name]),
                "a cell, of causal's": median(
                    [
                        (mine / cells[name]) / (causal / cells["causal"])
                        for mine, causal in zip(seconds[name], seconds["causal"], strict=True)
                    ]
                ),
                "speed against torch, dense": median(against[name]) if name in against else None,
            }
            for name in masks
        ]  # fmt: skip

    def exposed(self) -> Rows:
        """Exposed communication of both directions, from all ranks' traces, which share a clock."""
        rows: Rows = []
        for tokens in (8192 * self.ctx.world_size, 16384 * self.ctx.world_size):
            for causal in (False, True):
                for strategy in ("ring-kv", "burst"):
                    if tokens <= self.max_tokens:
                        rows.extend(self._exposed(tokens, causal, strategy))
        return rows

    def _exposed(self, tokens: int, causal: bool, strategy: str) -> Rows:
        shape = CallShape(tokens, 4, causal=causal)
        layout = self.ctx.layout(tokens, shape.kind)
        q, k, v, dout = inputs(shape, layout.shard_len, self.ctx.device)
        idle: dict[str, list[WorstIdle]] = {"forward": [], "backward": []}
        self.ctx.stats()  # from here on, GPUs take times
        for _ in range(self.repeats + 1):
            out = burst_rt.burst_attention(q, k, v, causal=causal, layout=layout, strategy=strategy)
            for direction in idle:
                if direction == "backward":
                    torch.autograd.grad(out, (q, k, v), dout)
                idle[direction].append(worst_idle(self.ctx))
        return [
            {
                "tokens a rank": layout.shard_len, "mask": "causal" if causal else "full",
                "strategy": strategy, "direction": direction,
                "exposed %": 100 * median([run.exposed for run in runs[1:]]),
                "skew %": 100 * median([run.skew for run in runs[1:]]),
                "total s": median([run.total_s for run in runs[1:]]),
            }
            for direction, runs in idle.items()
        ]  # fmt: skip

    def error(self) -> Rows:
        """Relative error (Frobenius) of out, dq, dk, dv against float64, with each strategy.

        Every rank draws the same input and takes its share; so what is compared went over this
        job's transport. Each call is made twice. The table also has the errors of torch's own
        attention on the same input.
        """
        world = self.ctx.world_size
        heads = 4 if 4 % world == 0 else world  # what exchanges heads needs one for each rank
        rows: Rows = []
        for dtype, head_dim in ((torch.float32, 64), (torch.bfloat16, 128)):
            shape = CallShape(min(2048, self.max_tokens), heads, dtype, head_dim=head_dim)
            for causal in (False, True):
                alike = torch.Generator().manual_seed(1)
                given = inputs(shape, shape.tokens, self.ctx.device, alike)
                full = [x.detach() for x in given]
                exact = _torch_attention([x.double() for x in full], causal)
                mask = "causal" if causal else "full"
                about: dict[str, Cell] = {"dtype": f"{dtype}"[6:], "mask": mask}
                plain = _errors(_torch_attention(full, causal), exact)
                rows.append({"strategy": "torch, one process", **about, **plain, "bits": None})
                for strategy in _strategies(world):
                    ours, again = (_over_ranks(self.ctx, full, causal, strategy) for _ in range(2))
                    same = all(map(torch.equal, ours, again))
                    bits = "the same" if same else "others"
                    rows.append(
                        {"strategy": strategy, **about, **_errors(ours, exact), "bits": bits}
                    )
        return rows


def _strategies(world: int) -> list[str]:
    """Every strategy that can divide so many ranks."""
    few = next((n for n in range(2, world) if world % n == 0), world)
    within = [f"{name}:{few}" for name in ("two-level", "hybrid")] if few < world else []
    alike = ["ring-kv", "burst", "ring-q", "bidirectional", "direct", "all-to-all", "sliced"]
    return [*alike, *within] if world > 1 else ["ring-kv"]


def _torch_attention(inputs: Sequence[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    q, k, v, dout = (x.detach().transpose(1, 2) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [x.transpose(1, 2) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def _over_ranks(
    ctx: Context, full: Sequence[torch.Tensor], causal: bool, strategy: str
) -> list[torch.Tensor]:
    layout = ctx.layout(full[0].shape[1])
    q, k, v, dout = (layout.shard(x) for x in full)
    for x in (q, k, v):
        x.requires_grad_()
    out = burst_rt.burst_attention(q, k, v, causal=causal, layout=layout, strategy=strategy)
    return [layout.unshard(x) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def _errors(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> dict[str, float]:
    names = ("out x 1e7", "dq x 1e7", "dk x 1e7", "dv x 1e7")
    return {
        name: float((a.double() - b).norm() / b.norm()) * 1e7
        for name, a, b in zip(names, got, exact, strict=True)
    }


TITLES = {
    "speed": "forward + backward, float32, against torch's fused attention in one process",
    "bf16": "forward + backward, bfloat16, against torch's fused attention in one process",
    "masks": "forward + backward under masks, 2 heads x 64, float32",
    "exposed": "exposed communication (worst rank)",
    "error": "relative error against float64, up to 2,048 tokens",
}


def measure_attention(parts: Sequence[str], repeats: int, max_tokens: int, out: str | None) -> None:
    """Runs the parts asked for, or all, on all ranks; rank 0 prints, writes and draws."""
    bench = Bench(repeats, max_tokens)
    run_parts(bench, {part: TITLES[part] for part in parts or TITLES}, out)


def run_parts(bench: Bench, titles: dict[str, str], out: str | None) -> None:
    """Runs methods of a bench by their names, and publishes their rows by their titles."""
    first = bench.ctx.rank == 0
    with bench.ctx, progress_bar(first, len(titles)) as step:
        for part, title in titles.items():
            step(part)
            rows: Rows = getattr(bench, part)()
            if first and not rows:
                print(f"{title}: nothing is as short as {bench.max_tokens:,} tokens")
            elif first:
                each = "GPU" if bench.ctx.device.type == "cuda" else "thread"
                ranks = f"{bench.ctx.world_size} ranks x 1 {each}"
                _publish(part, f"{title}, {ranks}", rows, bench, out)


def _publish(part: str, title: str, rows: Rows, bench: Bench, out: str | None) -> None:
    note = "each call twice" if part == "error" else f"medians of {bench.repeats}, interleaved"
    publish(title, rows, out, note)
    if out and part in ("speed", "bf16"):
        draw_bars(
            Path(out).with_suffix(f".{part}.png"),
            rows,
            ["ranks s", "torch s"],
            label=lambda row: f"{row['tokens']:,} {row['mask']} {row.get('partials', '')}".strip(),
            title=title,
        )
