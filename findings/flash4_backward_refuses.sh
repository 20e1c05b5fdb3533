#!/usr/bin/env bash
# One would guess: what FlashAttention-4's forward takes on a GPU, its backward takes there, too; or the forward says no where a gradient is wanted.
# In fact: on Hopper the forward takes keys and values of different head_dims for grouped heads (192 and 128, as latent attention has), and the backward refuses them; for as many key
#   heads as query heads it takes them. On Blackwell the forward takes a head_dim of 256, and the backward refuses it where lse has a gradient. Both raise
#   AssertionError once the forward has run.
# Who is hurt: training. A model passes its forward, and its first backward raises. Those who merge results by lse (rings, sinks, split keys) meet the second one, since lse's
#   gradient is how they tell the backward of the other parts.
# Versions: flash-attn-4 4.0.0b36, nvidia-cutlass-dsl 4.8.1, torch 2.13.0. Kernels are compiled for tensors without memory; needs no GPU. Seen on 2026-11-30.
# Output:
#     sm_90, head_dims 192 and 128, 4 query heads of 4 key heads: forward compiles, backward compiles
#     sm_90, head_dims 192 and 128, 4 query heads of 1 key heads: forward compiles, backward raises AssertionError: GQA backward requires head_dim == head_dim_v
#     sm_100, head_dims 256 and 256, 4 query heads of 4 key heads: forward compiles, backward raises AssertionError: SM100 backward with head_dim=256 does not support dlse
# Decided here: burst_rt/kernels/flash4.py refuses such backwards before anything runs, and takes only head_dims that `make test-flash-4` has compiled in both directions.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${flash_4[@]}"
export FLASH_ATTENTION_NUM_SMS=132
cat > "$work/program.py" <<'EOF'
import os
import sys

import torch
from finding import expect
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensorMode

torch.cuda.current_device = lambda: 0  # all that is asked of a GPU
chip, dim, of_v, heads, kv_heads, expected = os.environ["FLASH_ATTENTION_ARCH"], *map(int, sys.argv[1:5]), sys.argv[5]


def said(function, *args, **options):
    try:
        return "compiles", function(*args, **options)
    except AssertionError as error:
        return f"raises AssertionError: {error}", None


with FakeTensorMode():
    q, k, v, out = (
        torch.empty(1, 1024, count, size, dtype=torch.bfloat16, device="cuda")
        for count, size in ((heads, dim), (kv_heads, dim), (kv_heads, of_v), (heads, of_v))
    )
    forward, results = said(_flash_attn_fwd, q, k, v, causal=True, return_lse=True)
    lse = results[1]
    backward, _ = said(_flash_attn_bwd, q, k, v, out, out, lse, causal=True, deterministic=True, dlse=torch.empty_like(lse))
print(f"{chip}, head_dims {dim} and {of_v}, {heads} query heads of {kv_heads} key heads: forward {forward}, backward {backward}")
expect(forward == "compiles", "the forward")
expect(expected in backward, "the backward")
EOF
on() {
    FLASH_ATTENTION_ARCH=$1 CUTE_DSL_ARCH=$1a "$python" -W ignore "$work/program.py" "${@:2}" 2> "$work/err" || { tail -n 5 "$work/err" >&2; exit 1; }
}
on sm_90 192 128 4 4 compiles
on sm_90 192 128 4 1 'requires head_dim == head_dim_v'
on sm_100 256 256 4 4 'does not support dlse'
