#!/usr/bin/env bash
# One would guess: torch's fused attention on a CPU sums in float32, whatever its inputs' type, and returns a float32 lse. So lse is exact but for float32's roundings, 1e-7 or so: a row that
#   sees one key has that key's score.
# In fact: with 16-bit inputs the sums are of quick exponentials. A row that sees one key has an lse that is 5.3e-5 below its score; others are off by as much. With the same values as
#   float32 it is exact. out does not show it, because the factor cancels.
# Who is hurt: who merges partial results by their lse (rings, paged caches, split keys), compares lse with another library's, or has a loss of lse: 450 times float32's rounding, and to one
#   side in the first rows of a causal mask.
# Versions: torch 2.13.0, the same in its builds for CPUs and for CUDA 13; a CPU with AVX-512, without which the operator takes other instructions. Seen on 2026-12-01.
# Output:
#     torch 2.13.0, causal, 64 tokens
#     torch.float32: lse of the first row off by 0.0e+00 to 2.8e-08, of all by at most 3.8e-07
#     torch.float16: lse of the first row off by -5.3e-05 to -5.3e-05, of all by at most 5.8e-05
#     torch.bfloat16: lse of the first row off by -5.3e-05 to -5.3e-05, of all by at most 5.8e-05
# Decided here: the kernel `cpu-bf16` says so in `explain` (burst_rt/kernels/cpu_bf16.py); exact rings cast to float32 first (burst_rt/kernels/cpu.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment torch==2.13.0 numpy==2.4.6
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect

if torch.backends.cpu.get_cpu_capability() != "AVX512":
    print("this CPU has no AVX-512")
    raise SystemExit(2)
attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
torch.manual_seed(0)
inputs = [torch.randn(1, 4, 64, 64).bfloat16() for _ in range(3)]
q, k, v = (x.double() for x in inputs)
scores = (q @ k.mT / 8).masked_fill(~torch.ones(64, 64, dtype=torch.bool).tril(), -torch.inf)
true, out = scores.logsumexp(-1), scores.softmax(-1) @ v
print(f"torch {torch.__version__.partition('+')[0]}, causal, 64 tokens")
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    found, lse = attend(*(x.to(dtype) for x in inputs), 0.0, True, scale=1 / 8)
    off = lse.double() - true
    first, largest = off[0, :, 0], off.abs().max().item()
    print(f"{dtype}: lse of the first row off by {first.min():.1e} to {first.max():.1e}, of all by at most {largest:.1e}")
    expect(torch.allclose(found.double(), out, atol=0.03), "out")
    if dtype == torch.float32:
        expect(largest < 1e-6, f"lse of float32 is off by {largest}")
    else:
        expect(bool((first < -5e-5).all() and (first > -5.7e-5).all()), f"the first rows' lse is off by {first}")
EOF
"$python" "$work/program.py"
