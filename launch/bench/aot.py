"""What the Triton kernels take on chips that need not be there.

That is registers, spills, shared memory, tensor-core instructions and loads in flight; not speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from burst_rt.kernels.triton.aot import Compiled, Request, compile_all
from burst_rt.kernels.triton.configs import ARCHES, COMPRESSED, KINDS, Loads
from burst_rt.kernels.triton.tuned import TUNED
from burst_rt.launch.bench.report import Cell, publish

__all__ = ["main"]

_SPANS = {1: "yes", 2: "2 spans", 4: "4 spans", COMPRESSED: "many spans"}
_NOTE = (
    "a thread's registers (255 at most) and spills; a block's shared memory; products on the "
    "tensor cores in the machine code, and whether Hopper's take turns; groups of loads that go on "
    "where a loop waits for one"
)


def main(
    arches: Sequence[int],
    head_dims: Sequence[int],
    dtype: str,
    loads: Loads | None,
    out: Path | None,
    *,
    v_head_dim: int = 0,
    scores: tuple[str, ...] = (),
    width: int = 1,
    single: bool = True,
) -> None:
    """Compiles every kernel of the table, and prints what each takes.

    loads: the kind of loads instead of the table's own.
    v_head_dim, scores, width, single: as in `Request`; where lines of work have several runs,
    kernels that have no lines are left out. Takes about 1.5 s a kernel the first time.
    """
    requests = [
        Request(
            kind,
            arch,
            head_dim,
            masked,
            dtype,
            v_head_dim=v_head_dim,
            scores=scores,
            width=width,
            single=single,
            loads=loads,
        )
        for arch in arches
        for head_dim in head_dims
        for kind in (KINDS if single else TUNED)
        # Only these are compiled with and without a mask.
        for masked in ((False, True) if kind in TUNED else (False,))
    ]
    publish(
        ", ".join(filter(None, (f"kernels compiled ahead of time, {dtype}", *scores))),
        [_row(compiled) for compiled in compile_all(requests)],
        out,
        _NOTE,
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
