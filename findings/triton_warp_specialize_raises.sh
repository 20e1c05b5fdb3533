#!/usr/bin/env bash
# One would guess: tl.range(..., warp_specialize=True) is a hint, as num_stages is: a chip or a loop that cannot follow it is compiled without.
# In fact: sm_80 ignores it and sm_100 follows it. sm_90 and sm_120 follow it in a loop whose operands come by tensor descriptors, and where they
#   come by pointers compiling fails: "PassManager::run failed", which does not say why. The same loop compiles without the hint.
#   tl.range's docstring has it that Blackwell only is supported, of which sm_120 is one, and simple loops of products, as this is.
# Who is hurt: kernels that carry the hint for Blackwell, or for descriptors, with a way by pointers for unaligned inputs: they fail on other
#   chips than they were tried on, at the first such call.
# Versions: triton 3.7.1. Compiled ahead; needs no GPU. Seen on 2026-11-28.
# Output:
#     sm_80: by pointers compiled without; by descriptors compiled without
#     sm_90: by pointers RuntimeError: PassManager::run failed; by descriptors specialised
#     sm_100: by pointers specialised; by descriptors specialised
#     sm_120: by pointers RuntimeError: PassManager::run failed; by descriptors specialised
# Decided here: no kernel gives this hint: burst_rt/kernels/triton/forward_hopper.py, in Gluon, divides the work among its warps itself.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${triton[@]}"
cat > "$work/program.py" <<'EOF'
import triton
import triton.language as tl
from finding import compiled, expect

TYPES = {"a": "*fp16", "b": "*fp16", "out": "*fp32", "length": "i32"}


@triton.jit
def product(a, b, out, length, M: tl.constexpr, K: tl.constexpr, DESCRIBED: tl.constexpr, SPECIALIZE: tl.constexpr):
    rows, inner = tl.arange(0, M), tl.arange(0, K)
    if DESCRIBED:
        to_a = tl.make_tensor_descriptor(a, [length, M], [M, 1], [K, M])
        to_b = tl.make_tensor_descriptor(b, [length, M], [M, 1], [K, M])
    total = tl.zeros((M, M), tl.float32)
    for at in tl.range(0, length, K, warp_specialize=SPECIALIZE):
        if DESCRIBED:
            x, y = to_a.load([at, 0]), to_b.load([at, 0])
        else:
            places = (at + inner)[:, None] * M + rows[None, :]
            x, y = tl.load(a + places), tl.load(b + places)
        total = tl.dot(tl.trans(x), y, total)
    tl.store(out + rows[:, None] * M + rows[None, :], total)


def outcome(chip, described, specialize):
    try:
        kernel = compiled(product, chip, TYPES, M=128, K=64, DESCRIBED=described, SPECIALIZE=specialize, num_warps=4, num_stages=3)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "specialised" if "ttg.warp_specialize" in kernel.asm["ttgir"] else "compiled without"


for chip in 80, 90, 100, 120:
    expect(outcome(chip, False, False) == "compiled without", f"sm_{chip} without the hint")
    found = [outcome(chip, described, True) for described in (False, True)]
    print(f"sm_{chip}: by pointers {found[0]}; by descriptors {found[1]}")
    right = {80: "compiled without", 100: "specialised"}.get(chip, "RuntimeError: PassManager::run failed")
    expect(found == [right, "compiled without" if chip == 80 else "specialised"], f"sm_{chip}")
EOF
"$python" "$work/program.py" 2> "$work/errors" || { tail -n 5 "$work/errors" >&2; exit 1; }
