#!/usr/bin/env bash
# One would guess: a query of NaN gives an output of NaN, whatever the kernel: nothing is masked.
# In fact: torch's fused CPU attention gives 0 where there are fewer keys than a vector of the processor holds (8 in float32 with AVX2, 16
#   with AVX-512), and NaN from there on. The MATH backend gives NaN for any number of keys. The kernel takes
#   such a row for one that sees no key.
# Who is hurt: who looks for a diverged model by NaN in outputs of short sequences, of cross-attention to a few tokens, or of the first
#   tokens of a decode.
# Versions: torch 2.13.0 (CPU). Seen on 2026-11-27, with ATEN_CPU_CAPABILITY default, avx2 and avx512.
# Output:
#     FLASH_ATTENTION: 1 keys: 0.0, 3 keys: 0.0, 64 keys: nan
#     MATH: 1 keys: nan, 3 keys: nan, 64 keys: nan
# Decided here: burst_rt/kernels/cpu.py (`_FEWEST_KEYS`, `_attend`) does parts of few keys by matrix products.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as attend

torch.manual_seed(0)
found = {}
for backend in SDPBackend.FLASH_ATTENTION, SDPBackend.MATH:
    for keys in 1, 3, 64:
        q, (k, v) = torch.full((1, 1, 1, 8), torch.nan), torch.randn(2, 1, 1, keys, 8)
        with sdpa_kernel(backend):
            found[backend.name, keys] = attend(q, k, v)[0, 0, 0, 0].abs().item()
    print(f"{backend.name}: " + ", ".join(f"{keys} keys: {x}" for (name, keys), x in found.items() if name == backend.name))
of_fused = [found["FLASH_ATTENTION", keys] for keys in (1, 3, 64)]
expect(of_fused[:2] == [0, 0] and of_fused[2] != of_fused[2], f"fused: {of_fused}")
expect(all(found["MATH", keys] != found["MATH", keys] for keys in (1, 3, 64)), "MATH")
EOF
"$python" "$work/program.py"
