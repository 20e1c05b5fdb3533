#!/usr/bin/env bash
# One would guess: what a kernel's instructions are, and so the bits it computes, is up to the kernel and the compiler; an option that it never named changes nothing.
# In fact: where a launch does not say `enable_fp_fusion`, Triton 3.9 fuses products with sums, warns once in each process (an error under `-W error`), and announces that
#   3.10 will not fuse. The variable TRITON_DEFAULT_FP_FUSION has what comes today: x * a - b is then two instructions and rounded twice, so other bits come out, and the
#   scores of attention, exp2(x * scale - max), take an instruction more each. Triton 3.8 does not know the variable.
# Who is hurt: kernels of attention, norms and losses that say nothing of it: slower, and different in the last bits, by an upgrade; and tests with warnings as errors.
# Versions: triton 3.8.0 and 3.9.0. Compiled ahead for sm_90; needs no GPU. Seen on 2026-11-29. What it costs in time was not measured.
# Output:
#     triton 3.8.0, nothing said: 128 fused, 0 products, 0 sums; it warns: no
#     triton 3.9.0, nothing said: 128 fused, 0 products, 0 sums; it warns: yes
#     triton 3.9.0, TRITON_DEFAULT_FP_FUSION=0: 0 fused, 128 products, 128 sums; it warns: no
#     triton 3.9.0, TRITON_DEFAULT_FP_FUSION=0, but the kernel's options say True: 128 fused, 0 products, 0 sums; it warns: no
# Decided here: every launch of this project's kernels says that products and sums are fused (`options_of` in burst_rt/kernels/triton/launch.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/program.py" <<'EOF'
import re
import sys
import warnings

import triton
import triton.language as tl
from finding import expect, instructions
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def weights(p_x, p_out, scale, top, COUNT: tl.constexpr):
    """exp2 of scaled scores, less their largest."""
    at = tl.arange(0, COUNT)
    tl.store(p_out + at, tl.exp2(tl.load(p_x + at) * scale - top))


aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
types = {"p_x": "*fp32", "p_out": "*fp32", "scale": "fp32", "top": "fp32", "COUNT": "constexpr"}
source = ASTSource(fn=weights, signature=types, constexprs={"COUNT": 128 * 128}, attrs=aligned)
said = {"enable_fp_fusion": True} if "True" in sys.argv[1] else {}
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **said})
names = [re.sub(r"^@!?U?P\d+ ", "", line).split()[0] for line in instructions(built)]
fused, products, sums = (sum(name.split(".")[0] == kind for name in names) for kind in ("FFMA", "FMUL", "FADD"))
warned = any("fusion" in str(warning.message) for warning in heard)
print(
    f"triton {triton.__version__}, {sys.argv[1]}: {fused} fused, {products} products, {sums} sums; it warns: {'yes' if warned else 'no'}",
    flush=True,
)
apart = sys.argv[1].endswith("=0")
expect((fused, products, sums) == ((0, 128, 128) if apart else (128, 0, 0)), (fused, products, sums))
expect(warned == (triton.__version__ == "3.9.0" and sys.argv[1] == "nothing said"), f"warned: {warned}")
EOF
environment triton==3.8.0 numpy==2.4.6
"$python" "$work/program.py" "nothing said"
environment triton==3.9.0 numpy==2.4.6
"$python" "$work/program.py" "nothing said"
export TRITON_DEFAULT_FP_FUSION=0
"$python" "$work/program.py" "TRITON_DEFAULT_FP_FUSION=0"
"$python" "$work/program.py" "TRITON_DEFAULT_FP_FUSION=0, but the kernel's options say True"
