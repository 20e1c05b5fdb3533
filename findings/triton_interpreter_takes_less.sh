#!/usr/bin/env bash
# One would guess: a kernel that compiles also runs under TRITON_INTERPRET=1: the interpreter may be slow, but takes the same language.
# In fact: the functions of libdevice (tanh, log1p) give None there, and what uses the result raises "cannot convert None of type <class 'NoneType'> to
#   tensor", which does not name the function. And an argument that is a Python float stays one, so `scale.to(tl.float32)` raises AttributeError,
#   while an int is a tensor and has `.to`. tl.cast(scale, tl.float32) works in both.
# Who is hurt: who tests kernels on CPUs: kernels with GELU by tanh or with softcaps raise there, other packages' too.
# Versions: triton 3.7.1, torch 2.13.0 (CPU), numpy 2.4.6. Seen on 2026-11-28.
# Output:
#     all four compile for sm_90, with a float and with an int
#     interpreted, tanh with 0.5: InterpreterError: TypeError("cannot convert None of type <class 'NoneType'> to tensor")
#     interpreted, log1p with 0.5: InterpreterError: TypeError("cannot convert None of type <class 'NoneType'> to tensor")
#     interpreted, to with 0.5: InterpreterError: AttributeError("'float' object has no attribute 'to'")
#     interpreted, to with 2: 2
#     interpreted, cast with 0.5: 0.5
# Decided here: burst_rt/kernels/triton/scores.py has a tanh of its own, and the kernels convert arguments by tl.cast.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}" triton==3.7.1
cat > "$work/program.py" <<'EOF'
import os

import triton
import triton.language as tl
from finding import compiled, expect
from triton.language.extra import libdevice

TYPES = {"x": "*fp32", "out": "*fp32"}


@triton.jit
def tanh(x, out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, libdevice.tanh(tl.load(x + i) * scale))


@triton.jit
def log1p(x, out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, libdevice.log1p(tl.load(x + i) * scale))


@triton.jit
def to(x, out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * scale.to(tl.float32))


@triton.jit
def cast(x, out, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * tl.cast(scale, tl.float32))


def interpreted(kernel, scale):
    x, out = torch.ones(16), torch.empty(16)
    try:
        kernel[(1,)](x, out, scale, 16)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{out[0].item():g}"


if "TRITON_INTERPRET" not in os.environ:
    for kernel in tanh, log1p, to, cast:
        for scale in "fp32", "i32":
            compiled(kernel, 90, TYPES | {"scale": scale}, N=16)
    print("all four compile for sm_90, with a float and with an int")
else:
    import torch

    none = "cannot convert None of type <class 'NoneType'> to tensor"
    for kernel, scale, part in (
        (tanh, 0.5, none),
        (log1p, 0.5, none),
        (to, 0.5, "'float' object has no attribute 'to'"),
        (to, 2, "2"),
        (cast, 0.5, "0.5"),
    ):
        found = interpreted(kernel, scale)
        print(f"interpreted, {kernel.fn.__name__} with {scale}: {found}")
        expect(part in found, kernel.fn.__name__)
EOF
"$python" "$work/program.py"
TRITON_INTERPRET=1 "$python" "$work/program.py"
