"""What the Triton kernels take on chips that need not be there.

That is registers, spills, shared memory, tensor-core instructions and loads in flight; not speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.compiled import Compiled, Request, compile_all
from burst_rt.kernels.triton.configs import (
    ARCHES,
    COMPRESSED,
    KINDS,
    block_width,
    takes_producer,
)
from burst_rt.kernels.triton.tuned import TUNED
from burst_rt.launch.measure.options import DTYPE, HEAD_DIMS, OUT
from burst_rt.launch.measure.report import Cell, publish

__all__ = ["command"]

_SPANS = {1: "yes", 2: "2 spans", 4: "4 spans", COMPRESSED: "many spans"}
_NOTE = (
    "a thread's registers (255 at most) and spills; a block's shared memory; products on the "
    "tensor cores in the machine code, and whether Hopper's take turns; groups of loads that go on "
    "where a loop waits for one"
)


# Products of a block by kernel: those with the channels of q and k, and those with v's.
_PRODUCTS = {"forward": (1, 1), "dq": (2, 1), "dkdv": (2, 2), "backward": (3, 2)}
# Multiplications and additions of 16-bit numbers that a multiprocessor's tensor cores do in a clock
# (dense TFLOP/s of NVIDIA's data sheets, by 2 x multiprocessors x clock), by compute capability.
_MULTIPLIED = {80: 1024, 86: 512, 90: 2048, 100: 4096}
# Exponentials, and instructions of warps, that a multiprocessor starts in a clock (CUDA C++
# Programming Guide, throughput of native arithmetic instructions).
_EXPONENTIALS, _ISSUED = 16, 4
_LIMITS_NOTE = (
    "clocks of a multiprocessor for 1,000 cells: products on tensor cores at full rate; "
    "exponentials; instructions of the warps that multiply, each started once. Where they overlap "
    "without a gap, the largest is what a kernel takes; where nothing overlaps, products and "
    "instructions together"
)


@click.command()
@click.option(
    "--arch",
    "arches",
    multiple=True,
    type=click.Choice(["80", "86", "90", "100"]),
    default=("80", "90", "100"),
    show_default=True,
    help="Compute capability of the chip, without the dot; may be repeated.",
)
@HEAD_DIMS
@DTYPE
@click.option(
    "--loads",
    type=click.Choice(["pointers", "descriptors"]),
    help="How kernels load blocks; descriptors need Hopper or newer. [default: as in calls]",
)
@click.option(
    "--v-head-dim",
    type=click.IntRange(16, 256),
    help="Head size of v, where it has its own.",
)
@click.option(
    "--scores",
    type=click.Choice(["softcap", "alibi_slopes", "sinks"]),
    multiple=True,
    help="Options of the scores apart from scaling; may be given several times.",
)
@click.option(
    "--spans",
    type=click.Choice(["1", "2", "4", "many"]),
    help="For masks with so many spans of keys a query, and lines of work with several runs of "
    "blocks. [default: 1 span, and one run of a kind]",
)
@click.option(
    "--limits",
    is_flag=True,
    help="Print what bounds a kernel's loop instead: clocks of tensor cores, exponentials and "
    "instructions.",
)
@OUT
def command(
    arches: tuple[str, ...],
    head_dims: tuple[int, ...],
    v_head_dim: int | None,
    spans: str | None,
    limits: bool,
    out: Path | None,
    **options: Any,  # fields of `Request`, as click has checked them
) -> None:
    """Compile the Triton kernels for chips that this machine need not have: registers, spills,
    shared memory, tensor-core instructions. Takes about 1.5 s a kernel the first time.
    """
    width, single = COMPRESSED if spans == "many" else int(spans or 1), spans is None
    options |= {"v_head_dim": v_head_dim or 0, "width": width, "single": single}
    requests = [
        Request(kind, int(arch), head_dim, masked, **options)
        for arch in arches
        for head_dim in head_dims
        # Where lines of work have several runs, kernels that have no lines are left out.
        for kind in (KINDS if single else TUNED)
        if kind != "backward"  # without a producer it is two others
        # Only these are compiled with and without a mask.
        for masked in ((False, True) if kind in TUNED else (False,))
    ]
    if options["loads"] is None:
        requests += [
            request._replace(kind=kind, loads="producer")
            for kind in ("forward", "backward")
            for request in requests
            if request.kind == "forward" and _takes_producer(request._replace(kind=kind))
        ]
    title = ", ".join((f"kernels compiled ahead of time, {options['dtype']}", *options["scores"]))
    found = compile_all(requests)
    if limits:
        rows = [_limits_of(compiled) for compiled in found if compiled.request.kind in _PRODUCTS]
        publish(title, rows, out, _LIMITS_NOTE)
    else:
        publish(title, [_row(compiled) for compiled in found], out, _NOTE)


def _takes_producer(request: Request) -> bool:
    """Whether there is a kernel with a producer for this request: see `takes_producer`."""
    head_dims = (request.head_dim, request.v_head_dim or request.head_dim)
    return takes_producer(
        request.kind,
        request.arch,
        head_dims,
        4 if request.dtype == "fp32" else 2,
        width=request.width,
        plain="softcap" not in request.scores and "alibi_slopes" not in request.scores,
    )


def _row(compiled: Compiled) -> dict[str, Cell]:
    request, config, counts = compiled.request, compiled.config, compiled.instructions
    products = ", ".join(
        f"{counts[name]} {name}" for name in ("HMMA", "HGMMA", "tcgen05") if counts[name]
    )
    return {
        "kernel": request.kind,
        "arch": f"sm_{request.arch}",
        "head_dim": request.head_dim
        if not request.v_head_dim
        else f"{request.head_dim} / {request.v_head_dim}",
        "masked": _SPANS[request.width] if request.masked else "no",
        "block": f"{config.block_m} x {config.block_n}"
        if request.kind != "delta"
        else f"{config.block_m}",
        "warps": config.num_warps,
        "stages": config.num_stages,
        "loads": config.loads,
        "registers": compiled.registers,
        "spills": compiled.spills,
        "shared, KiB": f"{compiled.shared_bytes / 1024:.0f} of {ARCHES[request.arch] // 1024}",
        "tensor cores": products + ", serialized" * compiled.serialized or "none",
        "in flight": compiled.in_flight,
    }


def _limits_of(compiled: Compiled) -> dict[str, Cell]:
    """What bounds the loop of a kernel with 16-bit inputs, in clocks for 1,000 cells."""
    request, config = compiled.request, compiled.config
    of_q, of_v = _PRODUCTS[request.kind]
    channels = of_q * block_width(request.head_dim)
    channels += of_v * block_width(request.v_head_dim or request.head_dim)
    multiplied = channels / _MULTIPLIED[request.arch]
    if request.dtype == "fp32":  # no tensor core takes part
        multiplied = 0.0
    cells = config.block_m * config.block_n
    issued = (compiled.of_a_block or 0) * config.num_warps / _ISSUED / cells
    clocks = {
        "products": multiplied, "exponentials": 1 / _EXPONENTIALS, "instructions": issued or None
    }  # fmt: skip
    return {
        "kernel": request.kind,
        "arch": f"sm_{request.arch}",
        "head_dim": request.head_dim,
        "masked": _SPANS[request.width] if request.masked else "no",
        "block": f"{config.block_m} x {config.block_n}",
        "loads": config.loads,
        "instructions a block": compiled.of_a_block,
        **{name: None if clock is None else 1000 * clock for name, clock in clocks.items()},
        "largest": max((x or 0.0, name) for name, x in clocks.items())[1],
    }
