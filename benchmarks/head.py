"""`python -m benchmarks head`: the loss of a large vocabulary with and without logits.

A linear head and its loss, forward + backward, in this process: `cross_entropy` of logits,
`linear_cross_entropy`, and with `--others` what torch and Apple's cut-cross-entropy have for CPUs.
Sides run in turn. A peak is what a side takes beyond hidden, weight and labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import torch
from torch.nn import functional

import burst_rt
from benchmarks.options import TOKENS, parts_option
from benchmarks.resident import peak_bytes
from burst_rt.launch.measure.options import DTYPE, OUT, REPEATS
from burst_rt.launch.measure.report import Cell, median, publish

__all__ = ["command"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_Side = Callable[[], torch.Tensor]


@click.command()
@parts_option("time", "memory")
@TOKENS
@click.option("--classes", default=151_936, show_default=True, help="Words of the vocabulary.")
@click.option("--width", default=1024, show_default=True, help="Width of the hidden states.")
@DTYPE
@click.option("--others", is_flag=True, help="Also the losses of other packages.")
@click.option("--without-logits", is_flag=True, help="Leave out the side that has the logits.")
@REPEATS
@OUT
def command(
    parts: tuple[str, ...],
    tokens: tuple[int, ...],
    classes: int,
    width: int,
    dtype: str,
    others: bool,
    without_logits: bool,
    repeats: int,
    out: Path | None,
) -> None:
    """A linear head with its loss, forward + backward, by logits and without, on this CPU."""
    rows: list[dict[str, Cell]] = []
    with burst_rt.init(device="cpu") as ctx:
        for length in tokens or (2048, 4096):
            inputs = _inputs(length, classes, width, _DTYPES[dtype])
            sides = _sides(ctx, *inputs, others)
            if without_logits:
                del sides["logits"]
            took: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
            if "time" in parts or not parts:
                for _ in range(repeats):
                    for name, side in sides.items():
                        took[name].append(_timed(side, inputs[:2]))
            for name, side in sides.items():
                row: dict[str, Cell] = {"tokens": length, "side": name}
                if took[name]:
                    row |= {
                        "s": median([wall for wall, _ in took[name]]),
                        "of logits'": _ratio(took, name, 0),
                        "CPU s": median([cpu for _, cpu in took[name]]),
                        "of logits' CPU": _ratio(took, name, 1),
                    }
                if "memory" in parts or not parts:
                    row["peak MiB"] = peak_bytes(partial(_step, side, inputs[:2])) / 2**20
                rows.append(row)
    note = f"medians of {repeats}, in turn; {torch.get_num_threads()} threads"
    publish(f"a head of {classes:,} x {width:,}, {dtype}", rows, out, note)


def _inputs(
    tokens: int, classes: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(count, width, generator=generator).to(dtype) for count in (tokens, classes)
    )
    weight /= width**0.5
    labels = torch.randint(classes, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def _sides(
    ctx: burst_rt.Context,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    others: bool,
) -> dict[str, _Side]:
    sides: dict[str, _Side] = {
        "logits": lambda: burst_rt.cross_entropy(
            functional.linear(hidden, weight), labels, group=ctx
        ),
        "linear_cross_entropy": lambda: burst_rt.linear_cross_entropy(
            hidden, weight, labels, group=ctx
        ),
    }
    if others:
        import cut_cross_entropy
        from torch.nn import LinearCrossEntropyOptions

        options = LinearCrossEntropyOptions()
        sides["torch"] = lambda: functional.linear_cross_entropy(
            hidden, weight, labels, options=options
        )
        sides["cut-cross-entropy, torch_compile"] = lambda: cut_cross_entropy.linear_cross_entropy(
            hidden, weight, labels, impl="torch_compile"
        )
    return sides


def _step(side: _Side, inputs: tuple[torch.Tensor, ...]) -> None:
    torch.autograd.grad(side(), inputs)


def _timed(side: _Side, inputs: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Seconds, and seconds of all threads on the CPU, which others on this machine change less."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    _step(side, inputs)
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def _ratio(took: dict[str, list[tuple[float, float]]], name: str, clock: int) -> float | None:
    """The median of the pairs'; None without the side of logits."""
    if "logits" not in took:
        return None
    pairs = zip(took[name], took["logits"], strict=True)
    return median([one[clock] / other[clock] for one, other in pairs])
