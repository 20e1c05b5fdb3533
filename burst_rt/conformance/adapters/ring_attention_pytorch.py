"""ring-attention-pytorch's adapter, by its function `ring_flash_attn`.

Query head h reads key head h % kv_heads there, so heads are put in that order and back. Its
`max_lookback_seq_len` counts buckets and passes of the ring, and is no window. Ranks have equally
many tokens: its layers add padding at the end and hide it by the mask, and so does this.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

from burst_rt.conformance.cases import AttentionCase
from burst_rt.conformance.spread import attend_spread, only_takes, rank_places

Tensors = dict[str, torch.Tensor]


def attention(case: AttentionCase, tensors: Tensors) -> Tensors:
    """Consecutive tokens of each rank, with `mask` for padding and `softclamp_value`."""
    only_takes(case, "causal", "padding", "softcap", "kv_heads")
    world = dist.get_world_size()
    padded = -(-case.length // world) * world
    places = rank_places(padded)
    counts = torch.tensor(case.padding or (0,) * case.batch, device="cpu")[:, None]
    real = torch.arange(padded, device="cpu") < case.length - counts
    hides = bool(case.padding) or padded > case.length
    order = torch.arange(case.heads, device="cpu").reshape(case.kv_heads, -1).T.flatten()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: None) -> torch.Tensor:
        out: torch.Tensor = ring_flash_attn(
            q[:, :, order], k, v,
            mask=real[:, places].contiguous() if hides else None, causal=case.causal,
            bucket_size=len(places), ring_reduce_col=True, softclamp_qk_sim=bool(case.softcap),
            softclamp_value=case.softcap or 50.0,
        )  # fmt: skip
        return out[:, :, order.argsort()]

    return attend_spread(tensors, places, attend, padded)
