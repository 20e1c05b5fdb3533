#!/usr/bin/env bash
# One would guess: TRITON_INTERPRET=1 computes what the compiled kernel would, up to rounding: it is how kernels are tested without a GPU.
# In fact: in bfloat16 it computes with the numbers' *bits*: tl.dot of the identity with a matrix of 2s gives 2.7e8 (as integers 16256 x 16384,
#   and no more), 1 + 2 is infinity, the sum of sixteen 1s is negative. Nothing is raised. Loads, stores and casts of bfloat16 are fine, but
#   that float32 -> bfloat16 drops bits where a GPU rounds: 1.0059 becomes 1.0. float16 is right.
# Who is hurt: who tests kernels on CPUs: bfloat16 seems broken in a kernel that is right, or a tolerance for "rounding" hides the truncation.
# Versions: triton 3.7.1, torch 2.13.0 (CPU), numpy 2.4.6. Seen on 2026-11-27.
# Output:
#     torch.float16: dot of the identity with 2s: 2; 1 + 2: 3; sum of sixteen 1s: 16
#     torch.bfloat16: dot of the identity with 2s: 2.663e+08; 1 + 2: inf; sum of sixteen 1s: -1.038e+34
#     1.0059 in bfloat16: triton's interpreter 1.0, torch 1.0078125
# Decided here: the kernels in burst_rt/kernels/triton have a constant META.INTERPRET, under which `load_block` makes float32 of what it loads; results are
#   stored in float32 and cast by torch.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}" triton==3.7.1
cat > "$work/program.py" <<'EOF'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl
from finding import expect


@triton.jit
def product(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def add(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i) + tl.load(b + i))


@triton.jit
def total(a, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(a + tl.arange(0, N)), 0))


@triton.jit
def cast(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(tl.bfloat16))


found = {}
for dtype in torch.float16, torch.bfloat16:
    square, out = torch.empty(16, 16), torch.empty(16, dtype=dtype)
    product[(1,)](torch.eye(16, dtype=dtype), torch.full((16, 16), 2.0, dtype=dtype), square, 16)
    ones = torch.ones(16, dtype=dtype)
    add[(1,)](ones, ones * 2, out, 16)
    three = out[0].item()
    total[(1,)](ones, out, 16)
    found[dtype] = square[0, 0].item(), three, out[0].item()
    print(f"{dtype}: dot of the identity with 2s: {found[dtype][0]:.4g}; 1 + 2: {three:.4g}; sum of sixteen 1s: {found[dtype][2]:.4g}")
x, out = torch.full((16,), 1.0059), torch.empty(16, dtype=torch.bfloat16)
cast[(1,)](x, out, 16)
print(f"1.0059 in bfloat16: triton's interpreter {out[0].item()}, torch {x.bfloat16()[0].item()}")
expect(found[torch.float16] == (2, 3, 16), "float16")
expect(all(a != b for a, b in zip(found[torch.bfloat16], (2, 3, 16))), "bfloat16 is computed")
expect(out[0] == 1 and x.bfloat16()[0] == 1.0078125, "the cast rounds")
EOF
"$python" "$work/program.py"
