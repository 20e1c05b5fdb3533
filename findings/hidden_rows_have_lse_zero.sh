#!/usr/bin/env bash
# One would guess: the log-sum-exp that a fused attention kernel returns beside its output is the logarithm of the sum over the keys that a
#   row sees; of none, -inf, by which partial results merge.
# In fact: torch's fused CPU attention gives 0.0 for a row that sees no key: the value of a row with one key of score 0. The output is 0,
#   and looks right. Merged with another block by log-sum-exp, the row is then too small, with no NaN to show it.
# Who is hurt: who merges blocks of attention (rings, split keys, cascades) on CPUs, where a mask leaves a row out of a block.
# Versions: torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     row 2 in the block that it does not see: output 0.0, log-sum-exp 0.0
#     merged: row 2 off by 2.4e-02; with -inf in its place, all rows within 2e-07
# Decided here: burst_rt/kernels/cpu.py puts -inf where a row of a part sees nothing (its docstring lists this among the kernel's habits).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, off

torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 64, 16) for _ in range(3))
shown = torch.ones(64, 64, dtype=torch.bool)
shown[2, :32] = False  # row 2 sees the second half of the keys only
mask = torch.zeros(64, 64).masked_fill(~shown, -torch.inf)
parts = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
    q, k[:, :, part], v[:, :, part], attn_mask=mask[:, part]) for part in (slice(0, 32), slice(32, 64))]
whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shown)


def merged(lse):
    weights = torch.softmax(lse, 0)
    return sum(w[..., None] * out for w, (out, _) in zip(weights, parts))


lse = torch.stack([x for _, x in parts])
row = parts[0][0][0, 0, 2].abs().max().item(), parts[0][1][0, 0, 2].item()
print(f"row 2 in the block that it does not see: output {row[0]}, log-sum-exp {row[1]}")
wrong = off(merged(lse)[0, 0, 2], whole[0, 0, 2])
lse[0, 0, 0, 2] = -torch.inf
right = off(merged(lse), whole)
print(f"merged: row 2 off by {wrong:.1e}; with -inf in its place, all rows within {right:.0e}")
expect(row == (0.0, 0.0), "the log-sum-exp of a row that sees nothing")
expect(wrong > 1e-2 and right < 1e-5, "the merge")
EOF
"$python" "$work/program.py"
