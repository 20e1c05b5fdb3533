#!/usr/bin/env bash
# One would guess: in a Triton loop, `column + arange` compared with bounds is one 32-bit compare for each element, since all of it is int32.
# In fact: where the loop's bounds are known to be multiples of its step (blocks * 64, step 64), LLVM knows that the counter cannot overflow and keeps
#   the 64-bit one, which addresses need. Each element's compare with int32 bounds is then a 64-bit one, which a GPU does in two
#   instructions (ISETP, ISETP.EX). With the same bound as a plain argument, or with `arange` compared with `bounds - column`, none is.
#   The TTGIR still shows int32.
# Who is hurt: masked attention, and whoever compares positions in the inner loop: the compares double, and the safer bound costs them.
# Versions: triton 3.7.1. Compiled ahead for sm_80, sm_90 and sm_100; needs no GPU. Seen on 2026-11-28. What it costs in time was not measured.
# Output:
#     sm_80, to `size`, column + arange with bounds: 0 of 19 compares in 64 bits, 0 ISETP.EX
#     sm_80, to `size * 64`, column + arange with bounds: 17 of 19 compares in 64 bits, 135 ISETP.EX
#     sm_80, to `size * 64`, arange with bounds - column: 1 of 19 compares in 64 bits, 1 ISETP.EX
#     sm_90, to `size`, column + arange with bounds: 0 of 19 compares in 64 bits, 0 ISETP.EX
#     sm_90, to `size * 64`, column + arange with bounds: 17 of 19 compares in 64 bits, 135 ISETP.EX
#     sm_90, to `size * 64`, arange with bounds - column: 1 of 19 compares in 64 bits, 1 ISETP.EX
#     sm_100, to `size`, column + arange with bounds: 0 of 19 compares in 64 bits, 0 ISETP.EX
#     sm_100, to `size * 64`, column + arange with bounds: 17 of 19 compares in 64 bits, 17 ISETP.EX
#     sm_100, to `size * 64`, arange with bounds - column: 1 of 19 compares in 64 bits, 1 ISETP.EX
# Decided here: nothing yet. `seen_of` in burst_rt/kernels/triton/work.py compares `column + arange`, so the cut blocks of forward and dq have such
#   compares (132 and 68 ISETP.EX with head_dim 128 on sm_90). dkdv, whose rows come from `i % num_blocks`, has none.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${triton[@]}"
cat > "$work/program.py" <<'EOF'
import re

import triton
import triton.language as tl
from finding import compiled, expect, instructions

TYPES = {"x": "*fp32", "low": "*i32", "high": "*i32", "out": "*fp32", "size": "i32"}


@triton.jit
def sums(x, low, high, out, size, M: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr, MOVED: tl.constexpr):
    """Sums of x over the columns [low, high) of each row."""
    rows, places = tl.arange(0, M), tl.arange(0, N)
    begins, ends = tl.load(low + rows)[:, None], tl.load(high + rows)[:, None]
    total = tl.zeros((M, N), tl.float32)
    stop = size * N if BLOCKS else size
    for column in range(0, stop, N):
        values = tl.load(x + column + places)[None, :]
        if MOVED:
            seen = (places[None, :] >= begins - column) & (places[None, :] < ends - column)
        else:
            seen = ((column + places)[None, :] >= begins) & ((column + places)[None, :] < ends)
        total += tl.where(seen, values, 0.0)
    tl.store(out + rows, tl.sum(total, 1))


def compares(chip, blocks, moved):
    """64-bit compares in the PTX, and their second halves in the SASS."""
    kernel = compiled(sums, chip, TYPES, M=16, N=64, BLOCKS=blocks, MOVED=moved, num_warps=4)
    found = re.findall(r"setp\.\w+\.([su]\d+)", kernel.asm["ptx"])
    halves = sum(line.find("ISETP") >= 0 and ".EX " in line for line in instructions(kernel))
    return sum(kind.endswith("64") for kind in found), len(found), halves


for chip in 80, 90, 100:
    for blocks, moved, form in (
        (False, False, "to `size`, column + arange with bounds"),
        (True, False, "to `size * 64`, column + arange with bounds"),
        (True, True, "to `size * 64`, arange with bounds - column"),
    ):
        wide, all_, halves = compares(chip, blocks, moved)
        print(f"sm_{chip}, {form}: {wide} of {all_} compares in 64 bits, {halves} ISETP.EX")
        # 8 elements a thread, two compares each; one more is of the loop.
        expect((wide >= 16) if blocks and not moved else wide <= 1, f"sm_{chip}: {form}")
        expect((halves >= 16) if blocks and not moved else halves <= 1, f"instructions of sm_{chip}: {form}")
EOF
"$python" "$work/program.py"
