#!/usr/bin/env bash
# One would guess: a TorchFunctionMode around a step sees every torch function that the step calls, so it can replace attention in a plain model.
# In fact: it misses checkpointed layers. `loss.backward()` is itself a function that the mode is shown, and is taken away for: the second
#   forward, which the backward runs, is not seen. In a compiled program the checkpoint is an operator that the mode is shown, and its function is
#   traced without the mode: the first forward is not seen either. nn.MultiheadAttention hides its attention in the same way.
# Who is hurt: modes that replace or count functions: what they replaced in the forward is computed plainly in the backward, without a word.
# Versions: torch 2.13.0 (CPU). Seen on 2026-11-28.
# Output:
#     plain: 1 attention in the forward, 0 in the backward
#     checkpoint: 1 attention in the forward, 0 in the backward
#     checkpoint, torch.autograd._engine_run_backward: 1 attention in the forward, 1 in the backward
#     nn.MultiheadAttention: 0 attention in the forward, 0 in the backward
#     torch.compile: a mode makes attention 0; checkpoint in torch.compile: it does not
# Decided here: burst_rt/over_ranks.py puts the mode back for the bodies of backward, grad and multi_head_attention_forward, refuses the
#   compiled checkpoint by name, and marks results, so that a backward outside of the block raises.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}"
cat > "$work/program.py" <<'EOF2'
import torch
from finding import expect
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


class Count(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.scaled_dot_product_attention:
            Count.seen += 1
        return func(*args, **(kwargs or {}))


def attend(x):
    return functional.scaled_dot_product_attention(x, x, x).exp()


def checkpointed(x):
    return checkpoint(attend, x, use_reentrant=False)


def run(loss):
    loss.backward()


def engine(loss):
    _engine_run_backward((loss,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)


module = torch.nn.MultiheadAttention(8, 2)
for name, forward, backward, right in (
    ("plain", attend, run, (1, 0)),
    ("checkpoint", checkpointed, run, (1, 0)),
    ("checkpoint, torch.autograd._engine_run_backward", checkpointed, engine, (1, 1)),
    ("nn.MultiheadAttention", lambda x: module(x[0], x[0], x[0], need_weights=False)[0], run, (0, 0)),
):
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    Count.seen = 0
    with Count():
        loss = forward(x).sum()
        first = Count.seen
        backward(loss)
    print(f"{name}: {first} attention in the forward, {Count.seen - first} in the backward", flush=True)
    expect((first, Count.seen - first) == right, name)


class Zero(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 0 if func is functional.scaled_dot_product_attention else out


with Zero():
    found = [
        bool((torch.compile(function, backend="aot_eager", fullgraph=True)(x) == 1).all())
        for function in (attend, checkpointed)
    ]
words = ["a mode makes attention 0" if zero else "it does not" for zero in found]
print(f"torch.compile: {words[0]}; checkpoint in torch.compile: {words[1]}")
expect(found == [True, False], "compiled programs")
EOF2
"$python" "$work/program.py"
