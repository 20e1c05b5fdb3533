#!/usr/bin/env bash
# One would guess: cut-cross-entropy returns a float32 classifier's gradient in float32, so it was added up in float32, or at least as torch does
#   it: torch multiplies in 16 bits, adds in 32 and rounds once.
# In fact: the gradients of a classifier are added up in the type of the *states*: each block of rows reads the 16-bit sum, adds to it and rounds it. The
#   end is cast to float32. The error grows with the number of rows; torch's does not. No option changes that (filter_eps=None, taken
#   here, switches the skipping of small gradients off, which is documented).
# Who is hurt: who trains a head with float32 weights on many tokens a step. bfloat16, with 8 times coarser roundings, was not tried: the
#   interpreter computes wrongly in it.
# Versions: cut-cross-entropy 25.1.1, triton 3.7.1 (interpreted), torch 2.13.0 (CPU), numpy 2.4.6. Seen on 2026-11-28.
# Output:
#     512 rows: the gradient is torch.float32, off by 6.6e-04; torch's product in float16 by 3.5e-04
#     8192 rows: the gradient is torch.float32, off by 2.9e-03; torch's product in float16 by 3.7e-04
#     65536 rows: the gradient is torch.float32, off by 9.3e-03; torch's product in float16 by 3.7e-04
# Decided here: burst_rt/loss_kernels.py takes these kernels by name only (`kernel="cce"`); docs/training.md says how they add.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}" triton==3.7.1 cut-cross-entropy==25.1.1
cat > "$work/program.py" <<'EOF'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
from cut_cross_entropy.cce_backward import cce_backward_kernel
from finding import expect, off

CLASSES, CHANNELS = 128, 64
torch.manual_seed(0)
weight = (0.1 * torch.randn(CLASSES, CHANNELS)).half().float().requires_grad_()
found = []
for rows in 512, 8192, 65536:
    states = (0.5 + 0.5 * torch.randn(rows, CHANNELS)).half()
    labels = torch.randint(0, CLASSES // 2, (rows,))
    logits = (states.double() @ weight.detach().double().T).requires_grad_()
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    right = logits.grad.T @ states.double()
    lse = logits.detach().logsumexp(1).float()
    # The forward needs a function that the interpreter lacks; the backward needs its log-sum-exp only.
    gradient = cce_backward_kernel(torch.ones(1), states, weight, lse, None, None, None, labels)[1]
    by_torch = (logits.grad.half().T @ states).double()
    found.append((off(gradient.double(), right), off(by_torch, right)))
    print(f"{rows} rows: the gradient is {gradient.dtype}, off by {found[-1][0]:.1e}; torch's product in float16 by {found[-1][1]:.1e}")
    expect(gradient.dtype == torch.float32, "the type")
expect(found[-1][0] > 5 * found[0][0] and found[-1][0] > 5 * found[-1][1], "the error grows")
expect(max(torchs for _, torchs in found) < 1e-3, "torch's error")
EOF
"$python" "$work/program.py"
