#!/usr/bin/env bash
# One would guess: an all-reduce with MAX over ranks of which one has NaN gives NaN, as torch.max does; or, as C's fmax, the largest number.
#   Either way it is one rule for all elements.
# In fact: it depends on the element's place and on the library. gloo, 2 ranks, rank 0 all NaN: the first half of the elements is NaN,
#   the second half rank 1's numbers; if rank 1 has the NaN, the halves are the other way round. Open MPI 5.0.11: the NaN of the
#   one rank is lost, that of the other is kept. MPICH 5.0.2: Allreduce and Reduce of the same values differ.
# Who is hurt: who looks for NaN, or for the largest gradient, scale or error of all ranks, by one all-reduce with MAX.
# Versions: torch 2.13.0 (CPU, gloo); mpi4py 4.1.2 with Open MPI 5.0.11 and MPICH 5.0.2. Seen on 2026-11-27.
# Output:
#     gloo, NaN on rank 0, 0 to 7 on the other: [nan, nan, nan, nan, 4.0, 5.0, 6.0, 7.0]
#     gloo, NaN on rank 1, 0 to 7 on the other: [0.0, 1.0, 2.0, 3.0, nan, nan, nan, nan]
#     Open MPI v5.0.11, MAX of [nan, 1] and [1, nan]: Allreduce [1.0, nan], Reduce [1.0, nan]
#     MPICH Version: 5.0.2, MAX of [nan, 1] and [1, nan]: Allreduce [1.0, 1.0], Reduce [1.0, nan]
# Decided here: burst_rt/hf/prepare.py (`_largest`): every rank gets all ranks' numbers, and takes the largest by itself, NaN included. What ranks
#   compare by a maximum are integers (transport/base.py, `allreduce_max`).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF'
import torch
import torch.distributed as dist
from finding import expect, over_gloo


def largest(rank, world):
    for odd in range(world):
        x = torch.full((8,), torch.nan) if rank == odd else torch.arange(8.0)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"gloo, NaN on rank {odd}, 0 to 7 on the other: {x.tolist()}")
        nan = x.isnan().tolist()
        expect(nan == [odd == 0] * 4 + [odd == 1] * 4, f"gloo's MAX: {x.tolist()}")


if __name__ == "__main__":
    over_gloo(2, largest)
EOF
"$python" "$work/program.py"
cat > "$work/program.py" <<'EOF'
import sys

import numpy as np
from finding import expect
from mpi4py import MPI

world = MPI.COMM_WORLD
x = np.array([np.nan, 1.0]) if world.rank == 0 else np.array([1.0, np.nan])
everyones, first = np.zeros(2), np.zeros(2)
world.Allreduce(x, everyones, MPI.MAX)
world.Reduce(x, first, MPI.MAX, root=0)
if world.rank == 0:
    library = " ".join(MPI.Get_library_version().split(",")[0].split("\n")[0].split())
    print(f"{library}, MAX of [nan, 1] and [1, nan]: Allreduce {everyones.tolist()}, Reduce {first.tolist()}")
    expect(0 < np.isnan(first).sum() < 2, "Reduce treats NaN alike on both ranks")
EOF
environment "${open_mpi[@]}"
ranks 2 "$work/program.py"
environment "${mpich[@]}"
ranks 2 "$work/program.py"
