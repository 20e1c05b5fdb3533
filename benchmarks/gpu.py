"""`python -m benchmarks gpu`: tile kernels against torch's own, and the runtime against one kernel.

All sides of a comparison run in turn on one GPU and are timed with events of the device; medians
are reported. A part reports only what it has measured; a part that cannot run raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import click
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import burst_rt
from benchmarks.masks import document_lengths
from burst_rt.errors import ConfigError
from burst_rt.kernels import KERNELS, QKV, Gradients, Results, State, Tile, Upstream, Work
from burst_rt.kernels.base import write_from_sums
from burst_rt.kernels.speed import issue_timed
from burst_rt.kernels.triton.configs import Config, arch_of, default_config, takes_producer
from burst_rt.kernels.triton.tuned import config_of, trial_of
from burst_rt.launch.measure.options import MAX_TOKENS, OUT
from burst_rt.launch.measure.report import Cell, median, publish, save
from burst_rt.launch.measure.timing import worst_idle
from burst_rt.planning.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    Mask,
    SlidingWindow,
)
from burst_rt.scheduler import Span

__all__ = ["PARTS", "command"]

Row = dict[str, Cell]

_BLOCK = 128  # rows and columns of a block of the block mask
# Seconds below which runs are timed several in a row, and their number.
_SHORT_S, _IN_A_ROW = 5e-3, 8

_BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
# Number of query heads by head_dim: both have the same number of channels.
_HEADS = {64: 32, 128: 16}


class Tensors(NamedTuple):
    """Inputs of a whole sequence, and the gradient of its output; all `[1, tokens, heads, d]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


class _Whole:
    """One whole-sequence problem: inputs, and what each side of a comparison does with them."""

    def __init__(
        self, tokens: int, head_dim: int, causal: bool, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.causal, self.tokens, self.head_dim = causal, tokens, head_dim
        self.heads = _HEADS[head_dim]
        shape = (1, tokens, self.heads, head_dim)
        self.q, self.k, self.v, self.dout = (
            torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4)
        )

    def flops(self, forward: bool) -> float:
        """The operations of two products forward or five backward; half of them if causal."""
        cells = self.tokens * (self.tokens + 1) / 2 if self.causal else self.tokens**2
        return (4 if forward else 10) * cells * self.heads * self.head_dim

    def torch_side(self, name: str) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward and backward of one of torch's own kernels."""
        q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (self.q, self.k, self.v))
        dout = self.dout.transpose(1, 2)

        def forward() -> torch.Tensor:
            backend: AbstractContextManager[None] = sdpa_kernel(_BACKENDS[name])
            with backend:
                return torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=self.causal
                )

        out = forward()

        def silent_forward() -> object:
            with torch.no_grad():
                return forward()

        return silent_forward, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def tile_side(
        self, name: str, config: Config | None = None
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """Forward and backward of a tile kernel; the whole sequence is one tile.

        config: what a Triton forward runs with; None: what calls take. With a producer, the
        backward is that in one pass, and gradients are made of its sums.
        """
        kernel = KERNELS[name]
        mask: Mask = Causal() if self.causal else Full()
        whole = (range(self.tokens),)
        pieces = mask.pieces(*whole, *whole)
        tile = Tile(
            pieces, whole, whole, mask, self.head_dim**-0.5, lambda: None, first=True, last=True
        )
        rows = torch.empty(2, 1, self.heads, self.tokens, device="cuda")
        m, l, lse = (torch.empty_like(rows[0]) for _ in range(3))  # noqa: E741
        state = State(torch.empty(self.q.shape, device="cuda"), m, l, torch.empty_like(self.q), lse)
        qkv = QKV(self.q, self.k, self.v)
        one_pass = config is not None and config.loads == "producer"
        grads = Gradients(*map(torch.empty_like, qkv))
        back_tile = tile._replace(first=not one_pass, last=not one_pass)
        back_config = default_config("backward", 90, self.head_dim, 2, producer=one_pass)

        def forward() -> None:
            with nullcontext() if config is None else trial_of("forward", config):
                kernel.forward(qkv, tile, state)

        def add(into: Gradients) -> None:
            kernel.backward(qkv, Upstream(self.dout, rows[0], rows[1]), back_tile, into)

        def backward() -> None:
            kernel.delta(Results(state.out, state.lse, self.dout, None), rows)
            with nullcontext() if config is None else trial_of("backward", back_config):
                write_from_sums(grads, add) if one_pass else add(grads)

        forward()
        return forward, backward

    def has_flash_4(self) -> bool:
        """Whether FlashAttention-4 is installed, and takes the problem."""
        device = self.q.device
        work = Work(device, self.q.dtype, self.head_dim, Full(), partials="16bit")
        return KERNELS["flash-4"].refuses(work) is None

    def forward_configs(self) -> dict[str, Config]:
        """What the Triton kernel's forwards run with, by name: without a producer, and with one.

        Each is the one tuned on this machine, or the table's. Where no call can have a producer,
        there is one forward.
        """
        head_dim, input_bytes = self.head_dim, self.q.itemsize
        arch = arch_of(torch.cuda.get_device_capability())
        tuned = config_of("forward", self.q.device, head_dim, self.q.dtype)
        producers = {"triton": False}
        if takes_producer("forward", arch, (head_dim, head_dim), input_bytes):
            producers["hopper"] = True
        return {
            name: tuned
            if tuned is not None and (tuned.loads == "producer") == producer
            else default_config("forward", arch, head_dim, input_bytes, producer=producer)
            for name, producer in producers.items()
        }


def kernels(repeats: int, max_tokens: int) -> Iterator[Row]:
    """TFLOP/s of every kernel, forward and backward, in bfloat16.

    "triton": forward.py, and the backward in two passes. "hopper": forward_hopper.py, which calls
    take instead where it is there, unless `burst-rt bench tune` found the other one faster; and
    backward_hopper.py, which they take only if it found that one faster. "flash-4": where its
    package is installed.
    """
    for head_dim in (128, 64):
        for tokens in (4096, 8192, 16384, 32768, 65536):
            for causal in (False, True):
                if tokens > max_tokens:
                    continue
                whole = _Whole(tokens, head_dim, causal)
                others = {name: whole.torch_side(name) for name in _BACKENDS}
                if whole.has_flash_4():
                    others["flash-4"] = whole.tile_side("flash-4")
                sides = others | {
                    name: whole.tile_side("triton", config)
                    for name, config in whole.forward_configs().items()
                }
                for direction in (0, 1):
                    runs = {name: side[direction] for name, side in sides.items()}
                    seconds = _interleaved(runs, repeats)
                    speed = {
                        name: whole.flops(direction == 0) / s / 1e12 for name, s in seconds.items()
                    }
                    best = max(speed[name] for name in others)
                    ours = {name: speed.get(name) for name in ("triton", "hopper")}
                    yield {
                        "head_dim": head_dim, "tokens": tokens,
                        "mask": "causal" if causal else "full",
                        "direction": ("forward", "backward")[direction],
                        **{f"{name} TFLOP/s": speed.get(name) for name in (*_BACKENDS, "flash-4")},
                        **{f"{name} TFLOP/s": x for name, x in ours.items()},
                        **{f"{name} / best": x and x / best for name, x in ours.items()},
                    }  # fmt: skip


def ring(repeats: int, max_tokens: int) -> Iterator[Row]:
    """The runtime, with four ranks as threads on one GPU, against its kernel on the whole sequence.

    Also says the largest gap between two tiles.
    """
    for tokens in (32768, 65536):
        for causal in (False, True):
            if tokens <= max_tokens:
                yield from _ring(tokens, causal, repeats)


def _ring(tokens: int, causal: bool, repeats: int, world_size: int = 4) -> list[Row]:
    whole = _Whole(tokens, 128, causal)
    alone = whole.tile_side("triton")
    gaps: list[float] = []

    def rank(ctx: burst_rt.Context) -> list[tuple[float, float]]:
        layout = ctx.layout(tokens, "zigzag")
        q, k, v = (layout.shard(x).requires_grad_() for x in (whole.q, whole.k, whole.v))
        dout = layout.shard(whole.dout)
        times = []
        ctx.stats()  # from here on, GPUs take times
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            ctx.runtime.agree({"call": "all are here"})
            start = time.perf_counter()
            out = burst_rt.burst_attention(q, k, v, causal=causal, layout=layout)
            torch.cuda.synchronize()
            middle = time.perf_counter()
            torch.autograd.grad(out, (q, k, v), dout)
            torch.cuda.synchronize()
            times.append((middle - start, time.perf_counter() - middle))
        if ctx.rank == 0:
            _, driver = ctx.runtime.last_run or (None, None)
            assert driver is not None  # something has run, on streams of its own
            driver.settle(60)
            gaps.extend(_gaps(list(driver.trace)))
        return times[1:]

    ranks = burst_rt.run_local(world_size, rank, device="cuda", kernel="triton")
    rows: list[Row] = []
    rounds = list(zip(*ranks, strict=True))
    for direction, name in enumerate(("forward", "backward")):
        one = _interleaved({"one": alone[direction]}, repeats)["one"]
        together = median([_slowest_s(times, direction) for times in rounds])
        rows.append(
            {
                "tokens": tokens, "ranks": world_size, "mask": "causal" if causal else "full",
                "direction": name,
                "one kernel ms": 1e3 * one, "ranks ms": 1e3 * together, "speed": one / together,
                "largest gap us": 1e6 * max(gaps) if gaps and direction else None,
            }
        )  # fmt: skip
    return rows


def _slowest_s(ranks: Sequence[tuple[float, float]], direction: int) -> float:
    return max(times[direction] for times in ranks)


def _gaps(spans: Sequence[Span]) -> list[float]:
    """Idle seconds between one task of the compute stream and the next."""
    tiles = sorted((s for s in spans if s.lane == "compute"), key=lambda span: span.started_s)
    return [max(0.0, b.started_s - a.ended_s) for a, b in pairwise(tiles)]


def staged(repeats: int, max_tokens: int) -> Iterator[Row]:
    """Exposed time of staged copies and messages, from the traces of all ranks; blocks for them.

    Runs inside an MPI job whose ranks share a GPU.
    """
    with burst_rt.init(device="cuda", transport="staged", kernel="triton") as ctx:
        for tokens in (16384, 32768, 65536):
            if tokens > max_tokens:
                continue
            layout = ctx.layout(tokens, "zigzag")
            q, k, v = (
                torch.randn(1, layout.shard_len, 16, 128, device=ctx.device, dtype=torch.bfloat16)
                for _ in range(3)
            )
            runs = []
            ctx.stats()  # from here on, GPUs take times
            for _ in range(repeats + 1):
                burst_rt.burst_attention(q, k, v, layout=layout)
                runs.append(worst_idle(ctx))
            if ctx.rank == 0:
                exposed_share = median([run.exposed for run in runs[1:]])
                total_s = median([run.total_s for run in runs[1:]])
                yield {
                    "tokens": tokens, "ranks": ctx.world_size, "exposed %": 100 * exposed_share,
                    "total ms": 1e3 * total_s,
                }  # fmt: skip


def masks(repeats: int, max_tokens: int) -> Iterator[Row]:
    """Whole calls in a world of one, and FlashAttention (torch's operators) where it has the mask.

    A cell is one that the mask shows.
    """
    tokens = min(32768, max_tokens)
    lengths = document_lengths(tokens)
    kinds: dict[str, Mask] = {
        "full": Full(),
        "causal": Causal(),
        "window 4,096": SlidingWindow(4095),
        "window 1,024": SlidingWindow(1023),
        "causal documents": Causal() & Documents(lengths),
        "5 % of blocks": BlockSparse(_some_blocks(tokens // _BLOCK), _BLOCK),
        "causal, softcap 30": Causal(),
    }
    shape = (1, tokens, _HEADS[128], 128)
    tensors = Tensors(
        *(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in Tensors._fields)
    )
    with burst_rt.init(device="cuda", kernel="triton") as ctx:
        sides = {
            name: _call_side(ctx, tensors, mask, 30.0 if "softcap" in name else None)
            for name, mask in kinds.items()
        } | {
            "flash causal": _flash_side(tensors, None, None),
            "flash window 4,096": _flash_side(tensors, 4095, None),
            "flash window 1,024": _flash_side(tensors, 1023, None),
            "flash causal documents": _flash_side(tensors, None, lengths),
        }
        times = [
            _interleaved({name: side[direction] for name, side in sides.items()}, repeats)
            for direction in (0, 1)
        ]
    line = range(tokens)
    cells = {
        name: sum(piece.num_cells for piece in mask.pieces(line, line))
        for name, mask in kinds.items()
    }
    for name in kinds:
        row: Row = {"tokens": tokens, "mask": name, "cells seen": cells[name]}
        for direction, took_s in zip(("forward", "backward"), times, strict=True):
            per_cell = took_s[name] / cells[name] / (took_s["causal"] / cells["causal"])
            flash_s = took_s.get(f"flash {name}")
            row |= {
                f"{direction} ms": 1e3 * took_s[name],
                f"{direction}, a cell, of causal's": per_cell,
                f"flash, {direction} ms": None if flash_s is None else 1e3 * flash_s,
            }
        yield row


def _some_blocks(number: int) -> torch.Tensor:
    return torch.rand(number, number, generator=torch.Generator().manual_seed(0)) < 0.05


def _call_side(
    ctx: burst_rt.Context, tensors: Tensors, mask: Mask, softcap: float | None
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward of whole calls."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    layout = ctx.layout(q.shape[1])

    def call() -> torch.Tensor:
        return burst_rt.burst_attention(q, k, v, mask=mask, layout=layout, softcap=softcap)

    def silent_call() -> object:
        with torch.no_grad():
            return call()

    out = call()
    return silent_call, lambda: torch.autograd.grad(out, (q, k, v), tensors.dout, retain_graph=True)


def _flash_side(
    tensors: Tensors, left: int | None, lengths: Sequence[int] | None
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward of torch's operators: causal, under a window, within documents."""
    aten, ends = torch.ops.aten, None
    q, k, v, dout = tensors if lengths is None else (x[0] for x in tensors)
    if lengths is not None:
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    longest = max(lengths or [tensors.q.shape[1]])
    about = (ends, ends, longest, longest, 0.0, True)
    window = {} if left is None else {"window_size_left": left, "window_size_right": 0}

    def forward() -> Sequence[torch.Tensor]:
        found: Sequence[torch.Tensor] = aten._flash_attention_forward(
            q, k, v, *about, False, **window
        )
        return found

    out, lse, state, unused, _ = forward()
    return forward, lambda: aten._flash_attention_backward(
        dout, q, k, v, out, lse, *about, state, unused, **window
    )


def _interleaved(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each side, by device events. Sides run in turn, after a warm-up round.

    Short runs are timed several in a row.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats + 1):
        for name, run in sides.items():
            in_a_row = _IN_A_ROW if times[name] and times[name][-1] < _SHORT_S else 1
            times[name].append(issue_timed(run, in_a_row).seconds())
    return {name: median(found[1:]) for name, found in times.items()}


PARTS = {"kernels": kernels, "masks": masks, "ring": ring, "staged": staged}
_TITLES = {
    "kernels": "tile kernels, bfloat16, TFLOP/s",
    "masks": "whole calls under masks, bfloat16, 16 heads of 128",
    "ring": "four ranks on one GPU against one kernel, bfloat16, head_dim 128",
    "staged": "staged transfers between ranks on one GPU",
}


@click.command()
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(list(PARTS)),
    default=("kernels", "masks", "ring"),
    show_default=True,
    help="Only this part; may be repeated.",
)
@click.option(
    "--repeats",
    default=10,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each side; medians are reported.",
)
@MAX_TOKENS
@OUT
def command(parts: tuple[str, ...], repeats: int, max_tokens: int, out: Path | None) -> None:
    """On one NVIDIA GPU: tile kernels against cuDNN and FlashAttention, whole calls under masks,
    four ranks against one kernel.

    `--part staged` is for ranks of a job: burst-rt run -n 2 -m benchmarks gpu --part staged
    """
    if not torch.cuda.is_available():
        raise ConfigError("gpu: torch sees no CUDA device; see `burst-rt doctor`")
    for part in parts:
        rows: list[Row] = []
        for row in PARTS[part](repeats, max_tokens):
            rows.append(row)
            # Save after every row: a part that is cut short leaves what it has measured.
            save(_TITLES[part], rows, out)
        if rows:
            publish(
                _TITLES[part],
                rows,
                out,
                f"medians of {repeats}, interleaved; {torch.cuda.get_device_name()}",
            )
