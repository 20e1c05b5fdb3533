"""The ranks' side of `burst-rt bench attention`: attention over ranks against torch.

Start it through that command.

Both sides of every comparison run in turn in one job, so that the machine's noise hits them alike.
The side of one process, with as many threads as there are ranks, is rank 0 while the other ranks
sleep. A time is the slowest rank's, from a common start.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

import burst_rt
from burst_rt import Causal, Context, Documents, Mask, Prefix, SlidingWindow
from burst_rt.kernels import PARTIALS
from burst_rt.launch.bench.plots import draw_bars
from burst_rt.launch.bench.report import Cell, median, publish
from burst_rt.launch.bench.timing import WorstIdle, progress, slowest_s, worst_idle

_M_MMAP_THRESHOLD = -3  # an option of mallopt, in glibc's malloc.h

Attend: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rows: TypeAlias = list[dict[str, Cell]]


class Bench:
    """One rank of the benchmark job. Every method that measures blocks for the other ranks."""

    def __init__(self, repeats: int, max_tokens: int) -> None:
        self.ctx = burst_rt.init(timeout_s=1200, stall_s=120)
        self.repeats = repeats
        self.max_tokens = max_tokens
        torch.manual_seed(0)

    def alone_s(self, fn: Callable[[], object]) -> float:
        """Seconds of `fn` on rank 0, with a thread for each rank, while the other ranks sleep."""
        torch.set_num_threads(self.ctx.world_size)
        try:
            return slowest_s(self.ctx, fn if self.ctx.rank == 0 else None)
        finally:
            torch.set_num_threads(1)

    def versus(
        self, ours: Callable[[], object], theirs: Callable[[], object], *, together: bool = False
    ) -> tuple[float, float, float, float]:
        """Median seconds of ours and of theirs, the medians' ratio, and the median of ratios.

        The two run in turn. Ratios are theirs / ours: of the two medians, and of each pair of runs.
        together: `theirs` is distributed as well, and runs on every rank.
        """
        their_s = partial(slowest_s, self.ctx) if together else self.alone_s
        slowest_s(self.ctx, ours), their_s(theirs)
        pairs = [(slowest_s(self.ctx, ours), their_s(theirs)) for _ in range(self.repeats)]
        our_s = median([ours for ours, _ in pairs])
        other_s = median([theirs for _, theirs in pairs])
        return our_s, other_s, other_s / our_s, median([b / a for a, b in pairs])

    def inputs(
        self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """q, k, v, dout: standard normal numbers, `[1, tokens, heads, head_dim]` of `dtype`."""
        return [torch.randn(1, tokens, heads, head_dim).to(dtype) for _ in range(4)]

    def ours(
        self,
        tokens: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        causal: bool = False,
        strategy: str = "auto",
        mask: Mask | None = None,
        softcap: float | None = None,
        ctx: Context | None = None,
    ) -> Callable[[], object]:
        """A function that runs forward and backward over the ranks. Under a mask in the layout that
        "auto" takes for it. ctx: a context of the same ranks with settings of its own.
        """
        kind = "auto" if mask else "zigzag" if causal else "contiguous"
        layout = (ctx or self.ctx).layout(tokens, kind, mask=mask)
        q, k, v, dout = self.inputs(layout.shard_len, heads, head_dim, dtype)
        for x in (q, k, v):
            x.requires_grad_()

        def run() -> None:
            out = burst_rt.burst_attention(
                q, k, v, causal=causal, mask=mask, layout=layout, strategy=strategy,
                softcap=softcap,
            )  # fmt: skip
            torch.autograd.grad(out, (q, k, v), dout)

        return run

    def torch_alone(
        self,
        tokens: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        causal: bool = False,
        mask: Mask | None = None,
    ) -> Callable[[], object]:
        """A function that runs forward and backward of torch's own attention in one process.

        A mask other than Causal becomes a dense matrix.
        """
        if self.ctx.rank:
            return lambda: None
        q, k, v, dout = (x.transpose(1, 2) for x in self.inputs(tokens, heads, head_dim, dtype))
        for x in (q, k, v):
            x.requires_grad_()

        causal = causal or mask == Causal()
        at = torch.arange(tokens)
        dense = mask.allows(at[:, None], at) if mask is not None and not causal else None

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
                found = self._speed(ctx, torch.bfloat16)
            rows.extend({"partials": partials, **row} for row in found)
        return rows

    def _speed(self, ctx: Context, dtype: torch.dtype) -> Rows:
        rows: Rows = []
        for tokens, heads in (
            (2048, 8),
            (4096, 8),
            (8192, 8),
            (16384, 8),
            (32768, self.ctx.world_size),
        ):
            for causal in (False, True):
                if tokens > self.max_tokens:
                    continue
                shape = (tokens, heads, 64, dtype, causal)
                ours, alone, ratio, paired = self.versus(
                    self.ours(*shape, ctx=ctx), self.torch_alone(*shape)
                )
                rows.append(
                    {
                        "tokens": tokens, "heads": heads, "mask": "causal" if causal else "full",
                        "ranks s": ours, "torch s": alone,
                        "speed against torch": ratio, "paired": paired,
                    }
                )  # fmt: skip
        return rows

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
        cuts = sorted(chance.sample(range(1, tokens), 19))
        lengths = [b - a for a, b in pairwise([0, *cuts, tokens])]
        capped = "causal, softcap 30"
        masks = {
            "causal": Causal(),
            "window 1,024": SlidingWindow(1023),
            "20 documents": Causal() & Documents(lengths),
            "prefix of half": Prefix(tokens // 2),
            capped: Causal(),
        }
        shape = (tokens, 2, 64, torch.float32)
        ours, theirs = {}, {}
        for name, mask in masks.items():
            ours[name] = self.ours(*shape, mask=mask, softcap=30.0 if name == capped else None)
            if name != capped:
                theirs[name] = self.torch_alone(*shape, mask=mask)
            slowest_s(self.ctx, ours[name])
        took: dict[str, list[float]] = {name: [] for name in masks}
        against: dict[str, list[float]] = {name: [] for name in theirs}
        for _ in range(self.repeats):
            for name in masks:
                took[name].append(slowest_s(self.ctx, ours[name]))
        # Torch's runs have a loop of their own: a dense mask evicts our memory from the processor's
        # caches.
        for _ in range(self.repeats):
            for name in theirs:
                torch_s = self.alone_s(theirs[name])
                against[name].append(torch_s / slowest_s(self.ctx, ours[name]))
        whole = range(tokens)
        cells = {}
        for name, mask in masks.items():
            cells[name] = sum(piece.num_cells for piece in mask.pieces(whole, whole))
        rows: Rows = []
        for name, seconds in took.items():
            relative = [
                (mine / cells[name]) / (causal / cells["causal"])
                for mine, causal in zip(seconds, took["causal"], strict=True)
            ]
            speed = median(against[name]) if name in against else None
            rows.append(
                {
                    "tokens": tokens, "mask": name, "cells seen": cells[name],
                    "ranks s": median(seconds),
                    "a cell, of causal's": median(relative),
                    "speed against torch, dense": speed,
                }
            )  # fmt: skip
        return rows

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
        layout = self.ctx.layout(tokens, "zigzag" if causal else "contiguous")
        q, k, v, dout = self.inputs(layout.shard_len, 4, 64, torch.float32)
        for x in (q, k, v):
            x.requires_grad_()
        found: dict[str, list[WorstIdle]] = {"forward": [], "backward": []}
        for _ in range(self.repeats + 1):
            out = burst_rt.burst_attention(q, k, v, causal=causal, layout=layout, strategy=strategy)
            for direction in found:
                if direction == "backward":
                    torch.autograd.grad(out, (q, k, v), dout)
                found[direction].append(worst_idle(self.ctx))
        rows: Rows = []
        for direction, runs in found.items():
            exposed_share = median([run.exposed for run in runs[1:]])
            skew_share = median([run.skew for run in runs[1:]])
            total_s = median([run.total_s for run in runs[1:]])
            rows.append(
                {
                    "tokens a rank": layout.shard_len, "mask": "causal" if causal else "full",
                    "strategy": strategy, "direction": direction,
                    "exposed %": 100 * exposed_share, "skew %": 100 * skew_share,
                    "total s": total_s,
                }
            )  # fmt: skip
        return rows

    def overhead(self) -> Rows:
        """What the runtime itself costs: a call on tiny tensors (8 tokens a rank, one head of 16).

        The plan is cached. Left out are the compute tasks, and the time that torch takes for a
        function of the same inputs that does nothing (its autograd engine, the sum of the output,
        gradients put where they belong).
        """
        layout = self.ctx.layout(8 * self.ctx.world_size)
        q, k, v = (torch.randn(1, layout.shard_len, 1, 16, requires_grad=True) for _ in range(3))

        def attend() -> torch.Tensor:
            return burst_rt.burst_attention(q, k, v, layout=layout)

        def nothing() -> torch.Tensor:
            out: torch.Tensor = _Nothing.apply(q, k, v)  # type: ignore[no-untyped-call]
            return out

        # For each call: its seconds, and how many of them were in compute tasks.
        times: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)

        def timed(what: str, direction: str, fn: Callable[[], object]) -> None:
            computed, start = self.ctx.stats().compute_s, time.perf_counter()
            fn()
            took = time.perf_counter() - start
            times[what, direction].append((took, self.ctx.stats().compute_s - computed))

        for _ in range(40 * self.repeats):
            for what, function in (("attend", attend), ("nothing", nothing)):
                losses: list[torch.Tensor] = []
                timed(what, "forward", lambda kept=losses, call=function: kept.append(call().sum()))  # type: ignore[misc]
                timed(what, "backward", losses[0].backward)
        rows: Rows = []
        for direction in ("forward", "backward"):
            took_s, compute_s = zip(*times["attend", direction], strict=True)
            torch_s = median([took for took, _ in times["nothing", direction]])
            runtime_s = (
                median([took - compute for took, compute in times["attend", direction]]) - torch_s
            )
            parts = {
                "median us": median(took_s),
                "best us": min(took_s),
                "compute tasks us": median(compute_s),
                "torch us": torch_s,
            }
            rows.append(
                {"call": direction}
                | {name: s * 1e6 for name, s in (parts | {"runtime us": runtime_s}).items()}
            )
        return rows

    def memory(self) -> Rows:
        """Peak memory of a call beyond its inputs and outputs, against the plan's own formula."""
        # Poisoning touches all memory that is taken, and so makes it resident.
        os.environ["BURST_RT_POISON"] = "1"
        with burst_rt.init(timeout_s=1200, stall_s=120) as ctx:
            del os.environ["BURST_RT_POISON"]
            rows: Rows = []
            for dtype in (torch.float32, torch.bfloat16):
                # A first call also fills MPI's own buffers, and brings in the pages of the code it
                # runs.
                _memory(ctx, 4096, dtype)
                for tokens in (8192, 16384, 32768, 65536):
                    if tokens <= self.max_tokens:
                        rows.extend(_memory(ctx, tokens, dtype))
        return rows

    def error(self) -> Rows:
        """Relative error (Frobenius) of out, dq, dk, dv against float64.

        The table also has the errors of torch's own attention on the same input.
        """
        rows: Rows = []
        tokens, heads, head_dim = 2048, 4, 64
        torch.manual_seed(1)
        full = self.inputs(tokens, heads, head_dim, torch.float32)
        for causal in (False, True):
            exact = _torch_attention([x.double() for x in full], causal)
            plain = _errors(_torch_attention(full, causal), exact)
            rows.append(
                {"ranks": "torch, one process", "mask": "causal" if causal else "full", **plain}
            )
            for world in (1, 2, 3, 4, 5, 8):
                ours = burst_rt.run_local(
                    world, partial(_local_attention, full=full, causal=causal)
                )[0]
                rows.append(
                    {
                        "ranks": str(world),
                        "mask": "causal" if causal else "full",
                        **_errors(ours, exact),
                    }
                )
        return rows

    def outside(self) -> Rows:
        """Forward + backward against ring-attention-pytorch over gloo, in the same job."""
        try:
            from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
        except ImportError:
            return [
                {
                    "package": "ring-attention-pytorch",
                    "result": "not installed: in the clone, pip install '.[dev]'",
                }
            ]
        self._start_gloo()
        rows: Rows = []
        for tokens in (4096, 8192):
            for causal in (False, True):
                layout = self.ctx.layout(tokens, "contiguous")
                q, k, v, dout = self.inputs(layout.shard_len, 8, 64, torch.float32)
                for x in (q, k, v):
                    x.requires_grad_()

                def theirs(
                    q: torch.Tensor = q,
                    k: torch.Tensor = k,
                    v: torch.Tensor = v,
                    dout: torch.Tensor = dout,
                    causal: bool = causal,
                ) -> None:
                    torch.autograd.grad(
                        ring_flash_attn(
                            q, k, v, causal=causal, bucket_size=512, ring_reduce_col=True
                        ),
                        (q, k, v),
                        dout,
                    )

                ours, other, ratio, _ = self.versus(
                    self.ours(tokens, 8, 64, torch.float32, causal), theirs, together=True
                )
                rows.append(
                    {
                        "tokens": tokens,
                        "mask": "causal" if causal else "full",
                        "burst_rt s": ours,
                        "ring-attention-pytorch s": other,
                        "times as fast": ratio,
                    }
                )
        return rows

    def _start_gloo(self) -> None:
        """Starts torch.distributed in addition to MPI; blocks until all ranks have joined.

        Rank 0 opens a store on a free port and tells the other ranks the port.
        """
        import torch.distributed as dist
        from torch._C._distributed_c10d import TCPStore

        store = (
            TCPStore("127.0.0.1", 0, self.ctx.world_size, is_master=True, wait_for_workers=False)
            if self.ctx.rank == 0
            else None
        )
        port = self.ctx.all_gather(store.port if store else 0)[0]
        if store is None:
            store = TCPStore("127.0.0.1", port, self.ctx.world_size, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=self.ctx.rank, world_size=self.ctx.world_size
        )


class _Nothing(torch.autograd.Function):
    """A function of three inputs with an output and three gradients that does no work."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _torch_attention(inputs: Sequence[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    q, k, v, dout = (x.detach().transpose(1, 2) for x in inputs)
    for x in (q, k, v):
        x.requires_grad_()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return [x.transpose(1, 2) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def _local_attention(
    ctx: burst_rt.Context, full: Sequence[torch.Tensor], causal: bool
) -> list[torch.Tensor]:
    layout = ctx.layout(full[0].shape[1])
    q, k, v, dout = (layout.shard(x) for x in full)
    for x in (q, k, v):
        x.requires_grad_()
    out = burst_rt.burst_attention(q, k, v, causal=causal, layout=layout)
    return [layout.unshard(x) for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))]


def _errors(got: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> dict[str, float]:
    names = ("out x 1e7", "dq x 1e7", "dk x 1e7", "dv x 1e7")
    return {
        name: float((a.double() - b).norm() / b.norm()) * 1e7
        for name, a, b in zip(names, got, exact, strict=True)
    }


def _memory(ctx: burst_rt.Context, tokens: int, dtype: torch.dtype) -> Rows:
    layout = ctx.layout(tokens, "contiguous")
    q, k, v, dout = (torch.randn(1, layout.shard_len, 4, 64).to(dtype) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    plans = burst_rt.explain(q, k, v, layout=layout, strategy="burst")
    assert plans.backward is not None
    held: list[torch.Tensor] = []

    def forward() -> None:
        out = burst_rt.burst_attention(q, k, v, layout=layout, strategy="burst")
        held.append(out)

    def backward() -> None:
        held.extend(torch.autograd.grad(held[0], (q, k, v), dout))

    # 16-bit gradients are cast from their sums at the very end, when slots and scratch are gone.
    # They are not part of the peak.
    gradients = 3 * q.nbytes if dtype == torch.float32 else 0
    rows: Rows = []
    for direction, plan, fn, outputs in (
        ("forward", plans.forward, forward, q.nbytes),
        ("backward", plans.backward, backward, gradients),
    ):
        measured = _peak_bytes(fn) - outputs
        planned = plan.memory()
        rows.append(
            {
                "tokens": tokens, "dtype": str(dtype).removeprefix("torch."),
                "direction": direction, "slots MiB": planned.slots / 2**20,
                "sums MiB": planned.sums / 2**20, "scratch MiB": planned.scratch / 2**20,
                "planned MiB": planned.total / 2**20,
                "measured MiB": measured / 2**20, "measured / planned": measured / planned.total,
            }
        )  # fmt: skip
    return rows


def _peak_bytes(fn: Callable[[], None]) -> int:
    """Number of bytes by which the resident set exceeds its size at the start, while `fn` runs.

    Needs Linux, whose high-water mark is reset and read.
    """
    libc = ctypes.CDLL(None)
    # Large blocks come from the system and go back to it at once, so that the resident set is what
    # is live, not what malloc keeps.
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_kib("VmRSS")
    fn()
    return (_status_kib("VmHWM") - before) * 1024


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise burst_rt.errors.ConfigError(
        f"/proc/self/status has no {field}: the memory benchmark needs Linux"
    )


TITLES = {
    "speed": "forward + backward, float32, against torch's fused attention in one process",
    "bf16": "forward + backward, bfloat16, against torch's fused attention in one process",
    "masks": "forward + backward under masks, 2 heads x 64, float32",
    "exposed": "exposed communication (worst rank)",
    "overhead": "a call on tiny tensors",
    "memory": "memory beyond inputs and outputs, 4 heads x 64, full, burst",
    "error": "relative error against float64, 2,048 tokens, 4 heads x 64, float32",
    "outside": "against ring-attention-pytorch (gloo)",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the parts asked for on all ranks; rank 0 prints, writes and draws."""
    parser = argparse.ArgumentParser(prog="burst_rt.launch.bench.attention")
    parser.add_argument("--part", action="append", choices=list(TITLES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=65536)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    bench = Bench(options.repeats, options.max_tokens)
    parts, first = options.part or list(TITLES), bench.ctx.rank == 0
    with progress(first, len(parts)) as step:
        for part in parts:
            step(part)
            rows: Rows = getattr(bench, part)()
            if first and not rows:
                print(f"{TITLES[part]}: nothing is as short as {options.max_tokens:,} tokens")
            elif first:
                title = f"{TITLES[part]}, {bench.ctx.world_size} ranks x 1 thread"
                publish(title, rows, options.out, f"medians of {options.repeats}, interleaved")
                if options.out and part in ("speed", "bf16"):
                    png = options.out.with_suffix(f".{part}.png")
                    draw_bars(
                        png,
                        rows,
                        ["ranks s", "torch s"],
                        label=lambda row: (
                            f"{row['tokens']:,} "
                            + " ".join(
                                str(row[name]) for name in ("mask", "partials") if name in row
                            )
                        ),
                        title=title,
                    )
    bench.ctx.close()


if __name__ == "__main__":
    main()
