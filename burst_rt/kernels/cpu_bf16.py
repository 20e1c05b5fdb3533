"""torch's fused CPU attention in its own bfloat16, for CPUs that multiply bfloat16 in hardware.

The fused kernel keeps scores and the forward's sums in float32, rounds probabilities to bfloat16
and gives its result in bfloat16. Therefore it is taken in the same cases as the vendors' kernels
(`vendor.py`): if a single call does everything, or if partials="16bit" allows roundings in between.

Its backward adds up dq, dk and dv in bfloat16, 256 rows by 512 columns at a time. That is more than
one rounding even where one call does all the work, so the backward is refused unless
partials="16bit". Its parts are small, and their sum is float32.

Its exponentials of 16-bit inputs are quick and a little too small: measured with torch 2.13, a row
that sees one key has an lse 5.3e-5 below its score, and others are off by up to 6.3e-5. In out that
cancels.
"""

from __future__ import annotations

import torch

from burst_rt.kernels.base import QKV, Tile, Work
from burst_rt.kernels.conditions import cpu_capabilities
from burst_rt.kernels.cpu import CpuKernel
from burst_rt.kernels.cpu_calls import PartSize
from burst_rt.kernels.vendor import (
    calls_of_pieces,
    most_calls,
    refuses_partials,
    remarks_on_partials,
)
from burst_rt.planning.masks import Shape
from burst_rt.planning.problem import TileShape

__all__ = ["CpuBf16Kernel"]

# Names of the instructions in torch, on x86-64 and on ARM.
_NATIVE = ("amx_bf16", "avx512_bf16", "bf16")
# Maximum number of rows, and of columns, of a call of the backward.
_MOST = 1024


class CpuBf16Kernel(CpuKernel):
    """See `Kernel`. bfloat16 only; any mask, any head_dim; no softcap."""

    name = "cpu-bf16"

    def work_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """See `CpuKernel.work_dtype`: the inputs' own."""
        return dtype

    def refuses(self, work: Work) -> str | None:
        """See `Kernel.refuses`."""
        reason = super().refuses(work)
        if reason:
            return reason
        if work.dtype != torch.bfloat16:
            return f"the {self.name} kernel takes bfloat16, got {work.dtype}"
        if not any(cpu_capabilities().get(name) for name in _NATIVE):
            return f"the {self.name} kernel needs a CPU that has instructions for bfloat16"
        if work.scores.softcap:
            return f"the {self.name} kernel has no softcap"
        if not work.forward and work.partials == "exact":
            return (
                f"the {self.name} kernel's backward adds up gradients in bfloat16; "
                "burst_rt.init(partials='16bit') allows that"
            )
        return refuses_partials(self.name, work, most_calls(map(calls_of_pieces, work.tiles)))

    def remarks(self, work: Work) -> tuple[str, ...]:
        """See `Kernel.remarks`: how exact lse is, and whether partials are in 16 bits."""
        lse = ("lse is off by up to 7e-5",) if work.forward else ()
        return lse + remarks_on_partials(work, most_calls(map(calls_of_pieces, work.tiles)))

    def part_of(self, tile: Tile, qkv: QKV, *, forward: bool) -> PartSize:
        """See `CpuKernel.part_of`. Work that a single call can do is not taken apart.

        Neither are lower triangles in the backward, up to the rows of a call: small ones cost more
        in bfloat16 than they save. Bands go to the fused kernel, in strips: `bands.py` works in
        float32.
        """
        part = super().part_of(tile, qkv, forward=forward)._replace(strips=True)
        if not forward:
            q_len, kv_len = (min(most, _MOST) for most in (part.q_len, part.kv_len))
            return part._replace(q_len=q_len, kv_len=kv_len, largest=0)
        if (
            tile.first
            and tile.last
            and len(tile.pieces) == 1
            and tile.pieces[0].shape is not Shape.MASKED
        ):
            return part._replace(q_len=qkv.q.shape[1], kv_len=qkv.k.shape[1])
        return part

    def scratch_bytes(self, forward: bool, dtype: torch.dtype, tile: TileShape) -> int:
        """See `Kernel.scratch_bytes`. The forward's result grows with the tile."""
        out = tile.batch * tile.num_heads * tile.q_len * tile.head_dim * dtype.itemsize
        return super().scratch_bytes(forward, dtype, tile) + forward * out
