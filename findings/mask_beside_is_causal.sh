#!/usr/bin/env bash
# One would guess: scaled_dot_product_attention raises where attn_mask and is_causal=True are both given, as its documentation says.
# In fact: on a CPU it applies both, without a word, as long as its fused kernel takes the call. With dropout, or with a mask that
#   requires gradients, the same call goes to the MATH backend, and raises.
# Who is hurt: who tests on CPUs what then fails elsewhere; who adds a learned bias or dropout to a layer that worked; who relies on
#   either of the two behaviours.
# Versions: torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     is_causal=True and a boolean mask: both applied
#     is_causal=True and the same, dropout_p=0.1: _scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True
#     is_causal=True and a float mask: both applied
#     is_causal=True and a float mask that requires gradients: _scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True
# Decided here: burst_rt/kernels/cpu.py gives the fused kernel a triangle or a mask and never both (`_hidden`): what it did with both is
#   nobody's promise.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect
from torch.nn.functional import scaled_dot_product_attention as attend

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
shown = torch.ones(6, 6, dtype=torch.bool)
shown[2:, 1] = False  # beside the triangle, one key is hidden from later queries
both = attend(q, k, v, attn_mask=shown.tril())
calls = {
    "a boolean mask": dict(attn_mask=shown),
    "the same, dropout_p=0.1": dict(attn_mask=shown, dropout_p=0.1),
    "a float mask": dict(attn_mask=torch.zeros(6, 6).masked_fill(~shown, -torch.inf)),
    "a float mask that requires gradients": dict(attn_mask=torch.zeros(6, 6, requires_grad=True)),
}
found = []
for name, options in calls.items():
    try:
        out = attend(q, k, v, is_causal=True, **options)
        found.append("both applied" if (out - both).abs().max() < 1e-5 else "something else")
        print(f"is_causal=True and {name}: {found[-1]}")
    except RuntimeError as error:
        found.append("raised")
        print(f"is_causal=True and {name}: {error}")
expect(found == ["both applied", "raised", "both applied", "raised"], f"{found}")
EOF
"$python" "$work/program.py"
