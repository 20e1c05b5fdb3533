"""What the Triton kernels take on chips that need not be there.

That is registers, spills, shared memory, tensor-core instructions and loads in flight; not speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.compiled import Compiled, Request, compile_all
from burst_rt.kernels.triton.configs import ARCHES, COMPRESSED, KINDS, takes_producer
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
@OUT
def command(
    arches: tuple[str, ...],
    head_dims: tuple[int, ...],
    v_head_dim: int | None,
    spans: str | None,
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
    publish(
        ", ".join((f"kernels compiled ahead of time, {options['dtype']}", *options["scores"])),
        [_row(compiled) for compiled in compile_all(requests)],
        out,
        _NOTE,
    )


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
