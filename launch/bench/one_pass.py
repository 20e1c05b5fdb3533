"""A tile by which `burst-rt bench tune` compares the backward in one pass with that in two."""

from __future__ import annotations

import torch

from burst_rt.kernels import KERNELS, QKV, Gradients, Tile, Upstream
from burst_rt.kernels.triton.configs import Config
from burst_rt.kernels.triton.tuned import trial_of
from burst_rt.planning.masks import Causal, Documents

__all__ = ["sums_of"]

_TOKENS = 299  # no block divides it


def sums_of(
    device: torch.device, dtype: torch.dtype, config: Config, new_sums: str
) -> list[torch.Tensor]:
    """dq, dk and dv of a tile with grouped heads, batch rows of other documents, and a length that
    no block divides, added to sums that hold something. new_sums: see `Tile`.
    """
    generator = torch.Generator().manual_seed(0)

    def some(heads: int, *channels: int) -> torch.Tensor:
        return torch.randn(2, _TOKENS, heads, *channels, generator=generator, device="cpu").to(
            device
        )

    q, dout = (some(4, 128).to(dtype) for _ in range(2))
    k, v = (some(2, 128).to(dtype) for _ in range(2))
    lse, delta = (some(4).transpose(1, 2).contiguous() for _ in range(2))
    third = _TOKENS // 3
    rows = [[third, _TOKENS - third], [_TOKENS - 2 * third, third, third]]
    mask = Causal() & Documents(rows)
    whole = (range(_TOKENS),)
    tile = Tile(
        mask.pieces(*whole, *whole), whole, whole, mask, 128**-0.5, lambda: None, first=False,
        last=False, new_sums=new_sums,
    )  # fmt: skip
    sums = Gradients(*(x.float() for x in (q, k, v)))
    with trial_of("backward", config):
        KERNELS["triton"].backward(QKV(q, k, v), Upstream(dout, lse + 6.0, delta), tile, sums)
    return [x for x in sums if x is not None]
