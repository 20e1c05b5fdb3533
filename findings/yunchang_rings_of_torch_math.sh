#!/usr/bin/env bash
# One would guess: in yunchang (USP), attn_type=AttnType.TORCH_MATH is the slow and portable way to the same result: torch's own attention
#   a block, for machines without FlashAttention.
# In fact: it gives the right result on one rank only. torch's attention returns no log-sum-exp, and the wrapper hands on zeros in its
#   place ("LSE is not available, use zeros as fallback", yunchang/kernels/attention.py), by which a ring merges its blocks with
#   equal weights. No error. The first rank of a causal ring, which merges nothing, is right.
# Who is hurt: who tests a ring on CPUs, or on GPUs without FlashAttention, by this type.
# Versions: yunchang 0.6.4, torch 2.13.0 (CPU, gloo). Seen on 2026-11-27.
# Output:
#     1 ranks, causal=False: off by 3e-07
#     1 ranks, causal=True: off by 1e-07
#     2 ranks, causal=False: off by 4e-01, 5e-01
#     2 ranks, causal=True: off by 1e-07, 8e-01
# Decided here: the row on yunchang in docs/others.md; burst-rt bench takes ring-attention-pytorch, not yunchang, as its peer on CPUs
#   (benchmarks/attention.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}" yunchang==0.6.4
cat > "$work/program.py" <<'EOF'
import torch
import torch.distributed as dist
from finding import expect, off, over_gloo


def ring(rank, world):
    from yunchang.kernels import AttnType
    from yunchang.ring import ring_flash_attn_func

    torch.manual_seed(0)
    whole = torch.randn(3, 1, 16, 2, 16)
    heads_first = [x.transpose(1, 2) for x in whole]
    for causal in False, True:
        right = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)
        q, k, v = (x.chunk(world, 1)[rank].contiguous() for x in whole)
        out = ring_flash_attn_func(q, k, v, causal=causal, attn_type=AttnType.TORCH_MATH)
        mine = torch.tensor([off(out, right.chunk(world, 1)[rank])])
        everyones = [torch.zeros(1) for _ in range(world)]
        dist.all_gather(everyones, mine)
        found = [x.item() for x in everyones]
        if rank == 0:
            print(f"{world} ranks, causal={causal}: off by " + ", ".join(f"{x:.0e}" for x in found))
        expect(max(found) < 1e-5 if world == 1 else max(found) > 1e-1, f"{world} ranks")


if __name__ == "__main__":
    for world in 1, 2:
        over_gloo(world, ring)
EOF
"$python" "$work/program.py" 2> "$work/errors" || { tail -n 5 "$work/errors" >&2; exit 1; }
