#!/usr/bin/env bash
# One would guess: the wheels of NCCL for CUDA 12 and for CUDA 13 have names of their own, so both may be installed, or pip says that they do not go together; and removing one leaves
#   the other.
# In fact: both write nvidia/nccl/lib/libnccl.so.2. The one installed last wins, without a word; `pip check` finds nothing wrong and `pip list` shows both. Removing the last one
#   removes the file, and the other is still listed.
# Who is hurt: an environment with a torch for CUDA 12 in which CuPy, or a project's extra, brings the wheel for CUDA 13 (or the reverse): torch then loads another NCCL than it was
#   built and tested with, of another CUDA. Other hosts of the job, where wheels came in another order, have another version.
# Versions: nvidia-nccl-cu12 2.27.5, nvidia-nccl-cu13 2.29.7; needs no GPU. Seen on 2026-11-30.
# Output:
#     nvidia-nccl-cu12 2.27.5: libnccl.so.2 is 2.27.5
#     nvidia-nccl-cu13 2.29.7 beside it: libnccl.so.2 is 2.29.7; pip check: No broken requirements found.
#     nvidia-nccl-cu13 removed: libnccl.so.2 is gone; pip list has nvidia-nccl-cu12
# Decided here: `burst-rt doctor` (launch/checks.py) warns where both are installed, and advises the extra that fits torch's CUDA.
set -euo pipefail
source "$(dirname "$0")/common.sh"
# Not `environment`: it is changed here, and others are not to find it so.
"${PYTHON:-python3}" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check "$@" 2> "$work/install" || { tail -n 5 "$work/install" >&2; exit 2; }; }
cat > "$work/program.py" <<'EOF'
import ctypes
import pathlib
import sysconfig

path = pathlib.Path(sysconfig.get_path("purelib"), "nvidia/nccl/lib/libnccl.so.2")
if path.exists():
    number = ctypes.c_int()
    ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    print(f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}")
else:
    print("gone")
EOF
found() { "$work/venv/bin/python" "$work/program.py"; }
expect() { [ "$1" = "$2" ] || { echo "changed: $3: $1" >&2; exit 1; }; }

pip install --quiet --no-deps nvidia-nccl-cu12==2.27.5
one=$(found)
echo "nvidia-nccl-cu12 2.27.5: libnccl.so.2 is $one"
pip install --quiet --no-deps nvidia-nccl-cu13==2.29.7
other=$(found) said=$(pip check)
echo "nvidia-nccl-cu13 2.29.7 beside it: libnccl.so.2 is $other; pip check: $said"
pip uninstall --quiet --yes nvidia-nccl-cu13
after=$(found) listed=$(pip list | grep -o '^nvidia-nccl[^ ]*')
echo "nvidia-nccl-cu13 removed: libnccl.so.2 is $after; pip list has $listed"
expect "$one" 2.27.5 "the first library"
expect "$other" 2.29.7 "the library of both"
expect "$said" "No broken requirements found." "what pip check says"
expect "$after $listed" "gone nvidia-nccl-cu12" "what is left"
