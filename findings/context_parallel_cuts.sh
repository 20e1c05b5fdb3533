#!/usr/bin/env bash
# One would guess: torch's context_parallel() cuts a sequence in one way: in zigzag, as its balanced causal ring needs, or contiguously.
# In fact: where 2 x ranks divides the length it is zigzag (rank 0 has the first and the last of 2W chunks); any other length is cut
#   contiguously, without a word and without a switch, and causal work is no longer even.
# Who is hurt: who hands rotary angles, labels or documents to ranks by one of the two rules; who measures one length and trains on others.
# Versions: torch 2.13.0 (CPU, gloo). Seen on 2026-11-27.
# Output:
#     16 tokens over 2 ranks, rank 0 has [0, 1, 2, 3, 12, 13, 14, 15]
#     18 tokens over 2 ranks, rank 0 has [0, 1, 2, 3, 4, 5, 6, 7, 8]
#     20 tokens over 2 ranks, rank 0 has [0, 1, 2, 3, 4, 15, 16, 17, 18, 19]
#     22 tokens over 2 ranks, rank 0 has [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
# Decided here: docs/others.md, "Coming from one of them": the zigzag of `ctx.layout(n)` is the same for any n, as 2W need not divide it; a
#   layout is an object that says who has what (`layout.positions()`).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, over_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel


def cut(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    for length in 16, 18, 20, 22:
        positions = torch.arange(float(length))[None]
        with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[1]):
            mine = [int(x) for x in positions[0]]
        if rank == 0:
            print(f"{length} tokens over {world} ranks, rank 0 has {mine}")
            contiguous = mine == list(range(length // world))
            expect(contiguous == bool(length % (2 * world)), f"the cut of {length} tokens")


if __name__ == "__main__":
    over_gloo(2, cut)
EOF
"$python" "$work/program.py"
