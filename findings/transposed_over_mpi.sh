#!/usr/bin/env bash
# One would guess: mpi4py sends an array as it is indexed, or refuses one that is not in C order, as it refuses a[:, ::2].
# In fact: it takes a transposed array, or a torch tensor that is a whole transposed matrix, and sends its memory in the order in which it
#   lies. The receiver, whose buffer has the transposed shape, gets every value in another place. Shapes, types and byte counts all fit.
#   A slice with gaps is refused (BufferError).
# Who is hurt: who sends heads-first views of what a kernel has laid tokens-first, such as log-sum-exps [batch, heads, tokens].
# Versions: mpi4py 4.1.2 with Open MPI 5.0.11 and MPICH 5.0.2, numpy 2.4.6. Seen on 2026-11-27.
# Output:
#     Open MPI v5.0.11: sent [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], received [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
#     MPICH Version: 5.0.2: sent [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], received [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
# Decided here: transport/base.py takes buffers of contiguous bytes (`memoryview`, uint8), not arrays, so an order cannot get lost on the way; and
#   `Context.all_reduce` asks for a contiguous tensor (burst_rt/context.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/program.py" <<'EOF'
import numpy as np
from finding import expect
from mpi4py import MPI

world = MPI.COMM_WORLD
a = np.arange(6.0).reshape(2, 3)
if world.rank == 0:
    world.Send(a.T, 1)
    try:
        world.Send(a[:, ::2], 1)
        expect(False, "a slice with gaps is sent")
    except BufferError:
        pass
else:
    got = np.zeros((3, 2))
    world.Recv(got, 0)
    library = " ".join(MPI.Get_library_version().split(",")[0].split("\n")[0].split())
    print(f"{library}: sent {a.T.tolist()}, received {got.tolist()}")
    expect(not np.array_equal(got, a.T) and np.array_equal(got.ravel(), a.ravel()), "the order of a transposed array")
EOF
environment "${open_mpi[@]}"
ranks 2 "$work/program.py"
environment "${mpich[@]}"
ranks 2 "$work/program.py"
