#!/usr/bin/env bash
# One would guess: under autocast, liger_cross_entropy gives the float32 loss that F.cross_entropy gives: it is a replacement for it.
# In fact: autocast does nothing to it. It keeps each row's loss in the logits' type, and for reduction="mean" *after* dividing it by the number of
#   rows: in float16 the small losses of many rows round to 0, or to steps of 6e-8 times the rows, before they are added. A mean loss of
#   9.3e-5 over 4,096 rows becomes 1.0e-6. With reduction="sum" the loss is inf where the total exceeds 65,504. Gradients are right all the same.
#   Its fused function, liger_fused_linear_cross_entropy, keeps the rows' losses in float32.
# Who is hurt: training and evaluation in float16 with many rows: a loss that falls to nothing, or is logged as inf, beside gradients that are right.
# Versions: liger-kernel 0.8.5, triton 3.7.1 (interpreted), torch 2.13.0 (CPU), numpy 2.4.6. Seen on 2026-11-28. bfloat16 was not tried: the
#   interpreter computes wrongly in it.
# Output:
#     mean of 4096 rows, 9.317e-05: torch 9.317e-05 in float32, liger 1.013e-06 in float16, liger fused 9.311e-05 in float32
#     sum of 4096 rows, 9.712e+04: torch 9.712e+04 in float32, liger inf in float16, liger fused 9.712e+04 in float32
#     gradients differ by 0e+00
# Decided here: burst_rt/loss_kernels.py starts Liger's kernel itself, with reduction "none" and losses in float32, and adds them up in float64.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}" triton==3.7.1 liger-kernel==0.8.5 packaging==25.0
cat > "$work/program.py" <<'EOF'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import torch.nn.functional as F
from finding import expect, off
from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy

ROWS, CLASSES = 4096, 16
torch.manual_seed(0)
labels = torch.randint(0, CLASSES, (ROWS,))
at_label = F.one_hot(labels, CLASSES)


def show(loss):
    return f"{loss.item():.4g} in {str(loss.dtype).removeprefix('torch.')}"


for reduction, margin in ("mean", 12), ("sum", -21):
    # The label's logit is above the others, or below them.
    x = (margin * at_label + 0.1 * torch.randn(ROWS, CLASSES)).half()
    right = F.cross_entropy(x.double(), labels, reduction=reduction)
    with torch.autocast("cpu", torch.float16):
        torchs = F.cross_entropy(x, labels, reduction=reduction)
        ligers = liger_cross_entropy(x.clone(), labels, reduction=reduction)
    fused = liger_fused_linear_cross_entropy(x, torch.eye(CLASSES).half(), labels, reduction=reduction)
    print(f"{reduction} of {ROWS} rows, {right.item():.4g}: torch {show(torchs)}, liger {show(ligers)}, liger fused {show(fused)}")
    expect(ligers.dtype == torch.float16, "the type of liger's loss")
    expect(ligers < right / 10 if reduction == "mean" else ligers.isinf(), f"liger's {reduction}")
    expect(off(torchs.double(), right) < 1e-3 and off(fused.double(), right) < 1e-3, f"the {reduction} of torch and liger fused")

x, gradients = torch.randn(256, CLASSES).half(), []
for function in liger_cross_entropy, F.cross_entropy:
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        # Times 1, because liger writes the gradients over its input.
        function(leaf * 1, labels[:256]).backward()
    gradients.append(leaf.grad.double())
print(f"gradients differ by {off(*gradients):.0e}")
expect(off(*gradients) < 1e-2, "gradients")
EOF
"$python" "$work/program.py"
