#!/usr/bin/env bash
# One would guess: torch's two ways into DLPack differ in form alone. `from_dlpack(x)` and `from_dlpack(to_dlpack(x))` give the same numbers, or both refuse.
# In fact: torch keeps signs aside, as a bit of the tensor. `x.conj()` turns no number, nor does `x.conj().imag`, which is real. The capsule of to_dlpack says nothing of either bit, so the
#   numbers arrive with the other sign. `from_dlpack(x)` refuses a conjugated tensor, but takes the real one, with the wrong sign, too; so does numpy's.
# Who is hurt: who hands imaginary parts or conjugated tensors from torch to CuPy, numpy or JAX without a copy: spectra of convolutions over long sequences, rotary positions by complex
#   numbers turned back. `resolve_conj()` and `resolve_neg()` before it put the signs into memory.
# Versions: torch 2.13.0, numpy 2.4.6; the same in `torch.utils.dlpack`. Needs no GPU. Seen on 2026-12-01.
# Output:
#     torch 2.13.0, numpy 2.4.6
#     (1-2j), by a capsule: (1+2j); by from_dlpack: BufferError
#     imag -2.0, by a capsule: 2.0; by from_dlpack: 2.0; by numpy's: 2.0
#     after resolve_conj and resolve_neg: (1-2j) and -2.0
# Decided here: burst_rt hands nothing on by DLPack, and `unshard` resolves both bits before it reads memory (attention/sharding.py). Emulated GPUs (tests/emulated) put the bits on again.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'EOF'
import numpy
import torch
from finding import expect
from torch.utils.dlpack import from_dlpack, to_dlpack


def through(take, x):
    try:
        return take(x).item()
    except BufferError:
        return "BufferError"


def by_capsule(x):
    return from_dlpack(to_dlpack(x))


turned = torch.tensor([1 + 2j]).conj()
imag = turned.imag
print(f"torch {torch.__version__.partition('+')[0]}, numpy {numpy.__version__}")
found = [through(take, turned) for take in (by_capsule, torch.from_dlpack)]
print(f"{turned.item()}, by a capsule: {found[0]}; by from_dlpack: {found[1]}")
expect(turned.item() == 1 - 2j and found == [1 + 2j, "BufferError"], f"a conjugated tensor arrives as {found}")
found = [through(take, imag) for take in (by_capsule, torch.from_dlpack, numpy.from_dlpack)]
print(f"imag {imag.item()}, by a capsule: {found[0]}; by from_dlpack: {found[1]}; by numpy's: {found[2]}")
expect(imag.item() == -2 and found == [2, 2, 2], f"a negated tensor arrives as {found}")
right = by_capsule(turned.resolve_conj()).item(), by_capsule(imag.resolve_neg()).item()
print(f"after resolve_conj and resolve_neg: {right[0]} and {right[1]}")
expect(right == (1 - 2j, -2), f"resolved tensors arrive as {right}")
EOF
"$python" "$work/program.py"
