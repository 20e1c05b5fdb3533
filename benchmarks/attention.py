"""What attention over ranks costs beside its tiles: overhead, memory; and another package's ring.

`burst-rt bench attention` has the parts that a user asks about.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import click
import torch

import burst_rt
from benchmarks.options import parts_option
from benchmarks.resident import peak_bytes
from burst_rt.launch.bench.attention import Bench, CallShape, Rows, inputs, run_parts
from burst_rt.launch.measure.options import MAX_TOKENS, OUT, RANKS, REPEATS
from burst_rt.launch.measure.ranks import run_on_ranks
from burst_rt.launch.measure.report import median
from burst_rt.launch.measure.timing import slowest_s, versus
from burst_rt.launch.where import machine_options

__all__ = ["command", "measure"]


class CostBench(Bench):
    """One rank of the job. Every method that measures blocks for the other ranks."""

    def overhead(self) -> Rows:
        """What the runtime itself costs: a call on tiny tensors (8 tokens a rank, one head of 16).

        The plan is cached. Left out are the compute tasks, and the time that torch takes for a
        function of the same inputs that does nothing (its autograd engine, the sum of the output,
        gradients put where they belong).
        """
        layout = self.ctx.layout(8 * self.ctx.world_size)
        q, k, v = (
            torch.randn(1, layout.shard_len, 1, 16, device=self.ctx.device, requires_grad=True)
            for _ in range(3)
        )

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

        def theirs(tensors: list[torch.Tensor], causal: bool) -> None:
            q, k, v, dout = tensors
            out = ring_flash_attn(q, k, v, causal=causal, bucket_size=512, ring_reduce_col=True)
            torch.autograd.grad(out, (q, k, v), dout)

        self._start_gloo()
        rows: Rows = []
        for tokens in (4096, 8192):
            for causal in (False, True):
                shape = CallShape(tokens, 8, causal=causal)
                layout = self.ctx.layout(tokens, "contiguous")
                tensors = inputs(shape, layout.shard_len, self.ctx.device)
                took = versus(
                    partial(slowest_s, self.ctx, self.ours(shape)),
                    partial(slowest_s, self.ctx, partial(theirs, tensors, causal)),
                    self.repeats,
                )
                rows.append(
                    {
                        "tokens": tokens,
                        "mask": "causal" if causal else "full",
                        "burst_rt s": took.first_s,
                        "ring-attention-pytorch s": took.second_s,
                        "times as fast": took.ratio,
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


def _memory(ctx: burst_rt.Context, tokens: int, dtype: torch.dtype) -> Rows:
    layout = ctx.layout(tokens, "contiguous")
    q, k, v, dout = inputs(CallShape(tokens, 4, dtype), layout.shard_len, ctx.device)
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
        measured = peak_bytes(fn) - outputs
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


TITLES = {
    "overhead": "a call on tiny tensors",
    "memory": "memory beyond inputs and outputs, 4 heads x 64, full, burst",
    "outside": "against ring-attention-pytorch (gloo)",
}


def measure(parts: list[str], repeats: int, max_tokens: int, out: str | None) -> None:
    """Runs the parts asked for, or all, on all ranks; rank 0 prints and writes."""
    run_parts(CostBench(repeats, max_tokens), {part: TITLES[part] for part in parts or TITLES}, out)


@click.command()
@RANKS
@parts_option(*TITLES)
@machine_options
@REPEATS
@MAX_TOKENS
@OUT
def command(num_ranks: int, **options: object) -> None:
    """Attention's overhead and memory on this machine, and ring-attention-pytorch beside it."""
    run_on_ranks(measure, num_ranks, options, threads=1)
