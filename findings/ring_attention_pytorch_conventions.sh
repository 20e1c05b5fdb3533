#!/usr/bin/env bash
# One would guess: ring_flash_attn(q, k, v, mask, causal=True) hides what the mask hides *and* what causality hides; and with grouped heads
#   query head h reads key head h // group, as in torch, flash-attn and transformers.
# In fact: under causal=True the padding mask is not looked at: hidden keys reach every later row. And query head h reads key head
#   h % kv_heads: weights of a Llama give other results, of the same shape.
# Who is hurt: who takes it as a reference for another implementation, or loads a grouped model's weights; padding in front of tokens.
# Versions: ring-attention-pytorch 0.5.20, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     causal=False: other keys under the mask change the output by 0.0e+00
#     causal=True: other keys under the mask change the output by 7.7e-01
#     4 heads over 2 key heads: off by 1.2e+00 from h // 2, by 4.3e-08 from h % 2
# Decided here: benchmarks/attention.py (`outside`) compares with it on equal numbers of heads and without padding, where both compute the same.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${torch[@]}" ring-attention-pytorch==0.5.20
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, off
from ring_attention_pytorch.ring_flash_attention import ring_flash_attn
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
q, (k, v) = torch.randn(1, 8, 4, 16), torch.randn(2, 1, 8, 2, 16)
shown = torch.ones(1, 8, dtype=torch.bool)
shown[:, :3] = False


def attend(k, v, **options):
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, **options)
    return out.transpose(1, 2)


other = k.clone()
other[:, :3] = torch.randn(1, 3, 2, 16)  # other keys, all of them hidden
changed = {}
for causal in False, True:
    out = [ring_flash_attn(q, keys, v, shown, causal, 8)[:, 3:] for keys in (k, other)]
    changed[causal] = off(out[1], out[0])
    print(f"causal={causal}: other keys under the mask change the output by {changed[causal]:.1e}")
out = ring_flash_attn(q, k, v, None, True, 8)
by_group = off(out, attend(k, v, enable_gqa=True))
by_turns = off(out, attend(k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)))
print(f"4 heads over 2 key heads: off by {by_group:.1e} from h // 2, by {by_turns:.1e} from h % 2")
expect(changed[False] == 0 and changed[True] > 1e-2, "the mask under causal")
expect(by_turns < 1e-5 < 1e-2 < by_group, "grouped heads")
EOF
"$python" "$work/program.py"
