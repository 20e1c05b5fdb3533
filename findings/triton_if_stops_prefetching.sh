#!/usr/bin/env bash
# One would guess: Triton prefetches the loads of a loop (num_stages), however their index is made: an `if` that steps the index on costs an
#   instruction or two.
# In fact: where the index passes through an `if`, the loads are made asynchronous all the same, but each is waited for at once: nothing is
#   under way while the product is computed, and nothing is loaded before the loop. It keeps the shared memory of all stages. The same index by
#   tl.where, or from the loop's counter by // and %, is prefetched. No warning.
# Who is hurt: persistent kernels, grouped products and attention over heads or runs of blocks, which step an inner index by `if`.
# Versions: triton 3.7.1. Compiled ahead for sm_80 and sm_90; needs no GPU. Seen on 2026-11-28. What it costs in time was not measured.
# Output:
#     sm_80, index by if: 0 loads begin before the loop; in it waits: 2, loads left under way: 0; 65536 bytes of shared memory
#     sm_80, index by where: 4 loads begin before the loop; in it waits: 1, loads left under way: 2; 65536 bytes of shared memory
#     sm_80, index by counter: 4 loads begin before the loop; in it waits: 1, loads left under way: 2; 65536 bytes of shared memory
#     sm_90, index by if: 0 loads begin before the loop; in it waits: 2, loads left under way: 0; 98304 bytes of shared memory
#     sm_90, index by where: 4 loads begin before the loop; in it waits: 1, loads left under way: 2; 98304 bytes of shared memory
#     sm_90, index by counter: 4 loads begin before the loop; in it waits: 1, loads left under way: 2; 98304 bytes of shared memory
# Decided here: burst_rt/kernels/triton/dkdv.py derives head and row from the loop's counter, and tests/unit/test_aot.py asks that loads are under way.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${triton[@]}"
cat > "$work/program.py" <<'EOF'
import re

import triton
import triton.language as tl
from finding import compiled, expect

TYPES = {"a": "*fp16", "b": "*fp16", "out": "*fp32", "count": "i32", "turn": "i32"}


@triton.jit
def product(a, b, out, count, turn, M: tl.constexpr, K: tl.constexpr, INDEX: tl.constexpr):
    """The sum of products of blocks: `turn` blocks of a head, then those of the next head."""
    rows, inner = tl.arange(0, M), tl.arange(0, K)
    total = tl.zeros((M, M), tl.float32)
    block, head = 0, 0
    for i in tl.range(0, count):
        if INDEX == "counter":
            block, head = i % turn, i // turn
        at = head * 65536 + block * K
        x = tl.load(a + at + rows[:, None] * K + inner[None, :])
        y = tl.load(b + at * M + inner[:, None] * M + rows[None, :])
        total = tl.dot(x, y, total)
        if INDEX == "if":
            block += 1
            if block == turn:
                block = 0
                head += 1
        elif INDEX == "where":
            head = tl.where(block + 1 == turn, head + 1, head)
            block = tl.where(block + 1 == turn, 0, block + 1)
    tl.store(out + rows[:, None] * M + rows[None, :], total)


for chip in 80, 90:
    for index in "if", "where", "counter":
        kernel = compiled(product, chip, TYPES, M=128, K=64, INDEX=index, num_warps=4, num_stages=3)
        ttgir = kernel.asm["ttgir"]
        before, loop = ttgir.split("scf.for", 1)
        loop = loop.split("scf.yield", 1)[0]
        early = before.count("async_commit_group")
        # The largest number of loads that a wait leaves under way.
        ahead = max(int(n) for n in re.findall(r"async_wait .*num = (\d+)", loop))
        waits = len(re.findall(r"async_wait ", loop))
        print(
            f"sm_{chip}, index by {index}: {early} loads begin before the loop; in it waits: {waits}, loads left under way: {ahead}; "
            f"{kernel.metadata.shared} bytes of shared memory"
        )
        expect((early, ahead) == ((0, 0) if index == "if" else (4, 2)), f"sm_{chip}: {index}")
EOF
"$python" "$work/program.py"
