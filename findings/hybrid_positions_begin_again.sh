#!/usr/bin/env bash
# One would guess: where a call has a cache and no position_ids, transformers counts positions on from the tokens that are cached, in
#   hybrid models as in others.
# In fact: Bamba and MiniMax count from 0 again, in silence, and rotate all new queries and keys as if they were the first. Bamba does not
#   ask the cache; MiniMax asks for the length of layer 0, which keeps a state and no keys: 0. With position_ids, as `generate`
#   gives them, both are right.
# Who is hurt: who decodes with these models in a loop of their own.
# Versions: transformers 5.24.0, torch 2.13.0 (CPU). Seen on 2026-11-28.
# Output:
#     bamba       without position_ids 2e-01, with them 3e-07
#     minimax     without position_ids 3e-01, with them 3e-07
#     qwen3_next  without position_ids 7e-07, with them 7e-07
#   (off from the whole text without a cache, as a part of the largest logit)
# Decided here: burst_rt.hf.Cache gives every call the positions that it counts (burst_rt/hf/cached_call.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment torch==2.13.0 numpy==2.4.6 transformers==5.24.0
cat > "$work/program.py" <<'EOP'
import torch
from finding import expect, off
from transformers import AutoConfig, AutoModelForCausalLM

size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
types = ["linear_attention", "full_attention"]
own = {
    "bamba": dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=8, attn_layer_indices=[1]),
    "minimax": dict(layer_types=types, head_dim=8, block_size=16, num_local_experts=2),
    "qwen3_next": dict(layer_types=types, head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8,
                       linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                       shared_expert_intermediate_size=16),
}
tokens = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))
for name, options in own.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **size, **options), attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # first weights attend to all tokens alike
        whole = model(tokens, use_cache=False).logits[:, -1]
        for given in (False, True):
            cache = model(tokens[:, :12], use_cache=True).cache
            for at in range(12, 24):
                positions = dict(position_ids=torch.tensor([[at]])) if given else {}
                last = model(tokens[:, at : at + 1], cache=cache, use_cache=True, **positions).logits[:, -1]
            found.append(off(last, whole))
    print(f"{name:11} without position_ids {found[0]:.0e}, with them {found[1]:.0e}", flush=True)
    expect(found[1] < 1e-5, f"{name}: with position_ids it is off by {found[1]:.0e}")
    expect((found[0] > 1e-3) == (name != "qwen3_next"), f"{name}: without position_ids it is off by {found[0]:.0e}")
EOP
"$python" "$work/program.py"
