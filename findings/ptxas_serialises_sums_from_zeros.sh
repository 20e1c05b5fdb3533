#!/usr/bin/env bash
# One would guess: an accumulator that starts from tl.zeros is the plain form of a sum of products, and the best that a compiler can be given.
# In fact: where a loop has several products (a backward of attention) and all their operands come by tensor descriptors, ptxas serialises Hopper's
#   wgmma: it waits for each instruction before it begins the next, 24 waits instead of 3. The same zeros, made by loads whose mask is
#   false and which the compiler cannot know to be false, keep it from that, as operands by pointers do. ptxas says so in a remark (C7515),
#   which Triton does not show, unless TRITON_DUMP_PTXAS_LOG=1. The source and the TTGIR do not tell.
# Who is hurt: backward kernels of attention on H100s, when they move from pointers to descriptors.
# Versions: triton 3.7.1, with ptxas 12.8.93 in its package. Compiled ahead for sm_90; needs no GPU. Seen on 2026-11-28. What it costs in time was not
#   measured.
# Output:
#     operands by descriptors, sums from tl.zeros: 24 wgmma instructions, 24 waits for them
#     operands by descriptors, sums from loads that do not happen: 24 wgmma instructions, 3 waits for them
#     operands by pointers, sums from tl.zeros: 24 wgmma instructions, 3 waits for them
#     operands by pointers, sums from loads that do not happen: 24 wgmma instructions, 3 waits for them
#     wgmma.mma_async instructions are serialized due to non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage
# Decided here: `zeros_for_sums` in burst_rt/kernels/triton/blocks.py makes zeros by such loads, and tests/unit/test_aot.py asks that no kernel of the
#   table has serialised products.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${triton[@]}"
cat > "$work/program.py" <<'EOF'
import triton
import triton.language as tl
from finding import compiled, expect, instructions

TYPES = dict.fromkeys(("q", "k", "v", "d"), "*fp16") | dict.fromkeys(("lse", "delta", "dk", "dv"), "*fp32") | {"length": "i32"}


@triton.jit
def gradients(q, k, v, d, lse, delta, dk, dv, length, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, ZEROS: tl.constexpr, DESCRIBED: tl.constexpr):
    """dk and dv of attention, for one block of N keys."""
    rows, keys, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    to = keys[:, None] * D + inner[None, :]
    if DESCRIBED:
        all_q = tl.make_tensor_descriptor(q, [length, D], [D, 1], [M, D])
        all_d = tl.make_tensor_descriptor(d, [length, D], [D, 1], [M, D])
        b_k = tl.make_tensor_descriptor(k, [length, D], [D, 1], [N, D]).load([0, 0])
        b_v = tl.make_tensor_descriptor(v, [length, D], [D, 1], [N, D]).load([0, 0])
    else:
        b_k, b_v = tl.load(k + to), tl.load(v + to)
    if ZEROS:
        b_dk = tl.zeros((N, D), tl.float32)
        b_dv = tl.zeros((N, D), tl.float32)
    else:
        never = (keys < 0 * length)[:, None]
        b_dk = tl.load(dk + to, mask=never, other=0.0)
        b_dv = tl.load(dv + to, mask=never, other=0.0)
    for i in tl.range(length // M):
        if DESCRIBED:
            b_q, b_d = all_q.load([i * M, 0]), all_d.load([i * M, 0])
        else:
            at = (i * M + rows)[:, None] * D + inner[None, :]
            b_q, b_d = tl.load(q + at), tl.load(d + at)
        s = tl.dot(b_k, tl.trans(b_q))
        p = tl.exp2(s - tl.load(lse + i * M + rows)[None, :])
        b_dv = tl.dot(p.to(tl.float16), b_d, b_dv)
        dp = tl.dot(b_v, tl.trans(b_d)) - tl.load(delta + i * M + rows)[None, :]
        b_dk = tl.dot((p * dp).to(tl.float16), b_q, b_dk)
    tl.store(dk + to, b_dk)
    tl.store(dv + to, b_dv)


for described in True, False:
    for zeros in True, False:
        kernel = compiled(gradients, 90, TYPES, M=128, N=64, D=64, ZEROS=zeros, DESCRIBED=described, num_warps=4, num_stages=2)
        code = instructions(kernel)
        products = sum(line.startswith("HGMMA.") for line in code)
        waits = sum("WARPGROUP.DEPBAR" in line for line in code)
        print(
            f"operands by {'descriptors' if described else 'pointers'}, sums from {'tl.zeros' if zeros else 'loads that do not happen'}: "
            f"{products} wgmma instructions, {waits} waits for them",
            flush=True,
        )
        expect(products == 24 and waits == (24 if described and zeros else 3), f"described {described}, zeros {zeros}")
EOF
TRITON_DUMP_PTXAS_LOG=1 "$python" "$work/program.py" > "$work/log"
grep "^operands" "$work/log"
grep --only-matching "wgmma.mma_async .* pipeline stage" "$work/log"
