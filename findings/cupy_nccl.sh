#!/usr/bin/env bash
# One would guess: cupy.cuda.nccl raises NcclError where NCCL returns an error, and its unique id keeps one type.
# In fact: NcclError is made by a table of seven results, so results 7 (in progress) and beyond raise KeyError from within, which an `except
#   NcclError` lets pass. And get_unique_id() is a tuple of 128 ints in CuPy 13 and `bytes` in CuPy 14: code that packs
#   it (array("b", id), struct, numpy) needs a case for each.
# Who is hurt: who ends jobs cleanly on NCCL errors; who ships ids between ranks over sockets or MPI.
# Versions: cupy-cuda13x 14.2.0 with nvidia-nccl-cu13 2.29.7, cupy-cuda12x 13.6.0 with nvidia-nccl-cu12 2.29.7; needs no GPU. Seen on 2026-11-27.
# Output:
#     CuPy 14.2.0: the id is bytes of 128; NcclError of results 1 to 8: NcclError, NcclError, NcclError, NcclError, NcclError, NcclError, KeyError, KeyError
#     CuPy 13.6.0: the id is tuple of 128; NcclError of results 1 to 8: NcclError, NcclError, NcclError, NcclError, NcclError, NcclError, KeyError, KeyError
# Decided here: transport/nccl.py (`_ERRORS`, `get_unique_id`), and the pin cupy-cuda13x 14.2.0 in constraints.txt.
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/program.py" <<'EOF'
import sys

import cupy
from cupy.cuda import nccl
from finding import expect


def made(result):
    try:
        return type(nccl.NcclError(result)).__name__
    except KeyError:
        return "KeyError"


unique = nccl.get_unique_id()
errors = [made(result) for result in range(1, 9)]
print(f"CuPy {cupy.__version__}: the id is {type(unique).__name__} of {len(unique)}; NcclError of results 1 to 8: {', '.join(errors)}")
expect(type(unique).__name__ == sys.argv[1], "the type of a unique id")
expect(errors == ["NcclError"] * 6 + ["KeyError"] * 2, "errors")
EOF
environment cupy-cuda13x==14.2.0 nvidia-nccl-cu13==2.29.7 numpy==2.4.6
"$python" "$work/program.py" bytes
environment cupy-cuda12x==13.6.0 nvidia-nccl-cu12==2.29.7 numpy==2.2.6
"$python" "$work/program.py" tuple
