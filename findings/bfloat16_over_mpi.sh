#!/usr/bin/env bash
# One would guess: Allreduce(SUM) of a bfloat16 torch tensor through mpi4py, which takes the tensor without a word, adds numbers, or is refused.
# In fact: MPI has no bfloat16, and mpi4py hands it over as bytes. Open MPI adds the *bytes*: 1 + 1 is 4.25e37; the float8 numbers 1 + 1
#   give 128; MAX and MIN compare bytes: the larger of 0.1 and -0.1 is -0.1. Without an error, alike on all ranks. MPICH refuses.
#   float16 is right on both.
# Who is hurt: who averages gradients in bfloat16 over MPI and has tested with float32, or with MPICH.
# Versions: mpi4py 4.1.2, torch 2.13.0 (CPU), Open MPI 5.0.11, MPICH 5.0.2. Seen on 2026-11-27.
# Output:
#     open_mpi: bfloat16 1 + 1: [4.25e+37], float8_e4m3fn 1 + 1: [128.0], float16 1 + 1: [2.0], MAX of bfloat16 0.1 and -0.1: [-0.1]
#     mpich: bfloat16 1 + 1: refused, float8_e4m3fn 1 + 1: refused, float16 1 + 1: [2.0], MAX of bfloat16 0.1 and -0.1: refused
# Decided here: transport/base.py (`allreduce_sum` takes float32, float64 and int64 only), burst_rt/runtime/gradients.py (16-bit gradients are summed in float32).
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/program.py" <<'EOF'
import sys

import torch
from finding import expect
from mpi4py import MPI

world = MPI.COMM_WORLD


def reduced(values, dtype, op=MPI.SUM):
    x = torch.tensor(values).to(dtype)
    everyones = torch.zeros(len(values)).to(dtype)
    try:
        world.Allreduce(x, everyones, op)
    except MPI.Exception:
        return "refused"
    return [round(n, 3) if abs(n) < 1e3 else float(f"{n:.2e}") for n in everyones.float().tolist()]


tenth = [0.1 if world.rank == 0 else -0.1]
found = {
    "bfloat16 1 + 1": reduced([1.0], torch.bfloat16),
    "float8_e4m3fn 1 + 1": reduced([1.0], torch.float8_e4m3fn),
    "float16 1 + 1": reduced([1.0], torch.float16),
    "MAX of bfloat16 0.1 and -0.1": reduced(tenth, torch.bfloat16, MPI.MAX),
}
if world.rank == 0:
    print(f"{sys.argv[0].split('/')[-1].removesuffix('.py')}: " + ", ".join(f"{name}: {x}" for name, x in found.items()))
    expect(found["float16 1 + 1"] == [2.0], "float16")
    if "open" in sys.argv[0]:
        expect(found["bfloat16 1 + 1"] not in ("refused", [2.0]), "Open MPI's sum of bfloat16")
        expect(found["MAX of bfloat16 0.1 and -0.1"] == [-0.1], "Open MPI's MAX of bfloat16")
    else:
        expect(found["bfloat16 1 + 1"] == "refused", "MPICH's sum of bfloat16")
EOF
cp "$work/program.py" "$work/open_mpi.py"
cp "$work/program.py" "$work/mpich.py"
environment "${open_mpi[@]}" torch==2.13.0
ranks 2 "$work/open_mpi.py"
environment "${mpich[@]}" torch==2.13.0
ranks 2 "$work/mpich.py"
