"""yunchang's adapter: `LongContextAttention`, a plain ring.

With FlashAttention on GPUs; on CPUs by `AttnType.TORCH_MATH`, which has no backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from yunchang import LongContextAttention, set_seq_parallel_pg
from yunchang.globals import HAS_FLASH_ATTN
from yunchang.kernels import AttnType

from burst_rt.conformance.cases import AttentionCase, NotOffered
from burst_rt.conformance.spread import attend_spread, only_takes, rank_places

DEVICE = "cuda" if HAS_FLASH_ATTN else "cpu"

Tensors = dict[str, torch.Tensor]


def attention(case: AttentionCase, tensors: Tensors) -> Tensors:
    """Consecutive tokens of each rank, with `window_size`, `softcap` and `softmax_scale`."""
    only_takes(case, "causal", "window", "softcap", "scale", "kv_heads")
    rank, world = dist.get_rank(), dist.get_world_size()
    if case.length % world:
        raise NotOffered("ranks have equally many tokens")
    set_seq_parallel_pg(1, world, rank, world)
    layer = LongContextAttention(
        ring_impl_type="basic", attn_type=AttnType.FA if HAS_FLASH_ATTN else AttnType.TORCH_MATH
    )

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: None) -> torch.Tensor:
        out: torch.Tensor = layer(
            q, k, v, causal=case.causal, softmax_scale=case.scale, softcap=case.softcap or 0.0,
            window_size=(case.window - 1, 0) if case.window else (-1, -1),
        )  # fmt: skip
        return out

    return attend_spread(tensors, rank_places(case.length), attend)
