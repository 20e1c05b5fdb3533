#!/usr/bin/env bash
# One would guess: preloading UCX's libraries, which gives an MPI built without CUDA the means to send device memory, changes nothing in
#   a Python that sends nothing. `signal.signal` returns the handler that was there, and takes it again later.
# In fact: UCX handles SIGHUP (it prints its own state), from before Python starts. `signal.getsignal(SIGHUP)` is None, which is neither
#   SIG_DFL nor SIG_IGN, and `signal.signal(SIGHUP, previous)` raises TypeError. A hangup no longer ends the process.
#   UCX_DEBUG_SIGNO=0 leaves the signal alone.
# Who is hurt: launchers and training loops that handle SIGHUP for a while and put the old handler back: they fail as they end, after the
#   work is done. Jobs that a terminal's hangup was to end go on.
# Versions: libucx-cu13 1.22.0, Python 3.11. Seen on 2026-11-28.
# Output:
#     without UCX: getsignal <Handlers.SIG_DFL: 0>; put back: done; SIGHUP: the process ends
#     with UCX: getsignal None; put back: TypeError; SIGHUP: the process goes on
#     with UCX, UCX_DEBUG_SIGNO=0: getsignal <Handlers.SIG_DFL: 0>; put back: done; SIGHUP: the process ends
# Decided here: launch/stopping.py gives such a signal its default back.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment libucx-cu13==1.22.0
cat > "$work/program.py" <<'EOF'
import signal

before = signal.getsignal(signal.SIGHUP)
previous = signal.signal(signal.SIGHUP, lambda *_: None)
try:
    signal.signal(signal.SIGHUP, previous)
    back = "done"
except TypeError:
    back = "TypeError"
print(f"getsignal {before!r}; put back: {back}", end="", flush=True)
EOF
cat > "$work/hangup.py" <<'EOF'
import os
import signal

os.kill(os.getpid(), signal.SIGHUP)
print("; SIGHUP: the process goes on", flush=True)
EOF
libraries=$("$bin/python" -c 'import libucx; print(libucx.__path__[0])')/lib
preloaded=$libraries/libucs.so.0:$libraries/libuct.so.0:$libraries/libucm.so.0:$libraries/libucp.so.0
try() {  # name, variables
    local name=$1; shift
    local said
    said=$(env "$@" "$bin/python" "$work/program.py" 2> /dev/null)
    said+=$(env "$@" "$bin/python" "$work/hangup.py" 2> /dev/null | grep -o '; SIGHUP: .*' || echo "; SIGHUP: the process ends")
    echo "$name: $said"
}
export UCX_LOG_LEVEL=fatal
out=$(
    try "without UCX" LD_PRELOAD=
    try "with UCX" LD_PRELOAD="$preloaded"
    try "with UCX, UCX_DEBUG_SIGNO=0" LD_PRELOAD="$preloaded" UCX_DEBUG_SIGNO=0
)
echo "$out"
if [ "$out" != "without UCX: getsignal <Handlers.SIG_DFL: 0>; put back: done; SIGHUP: the process ends
with UCX: getsignal None; put back: TypeError; SIGHUP: the process goes on
with UCX, UCX_DEBUG_SIGNO=0: getsignal <Handlers.SIG_DFL: 0>; put back: done; SIGHUP: the process ends" ]; then
    echo "changed: signals under a preloaded UCX" >&2
    exit 1
fi
