#!/usr/bin/env bash
# One would guess: transformers keeps the documents of a packed row apart by position_ids that restart, as its masking_utils says
#   that it finds packed sequences by them. A call with attn_implementation="eager" or "sdpa" then needs nothing else.
# In fact: it looks for documents only in a call without a mask *and without a cache*, and the default call of a decoder makes a
#   cache, in training mode too. So documents see those before them. They are apart with use_cache=False and no
#   attention_mask; a mask of ones joins them again. gpt-oss and Falcon never look, and join them whatever the call.
# Who is hurt: who packs rows in a loop of their own, and who takes such a call as the truth in a test. Nothing is raised.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     llama    default: 5e-01, use_cache=False: 1e-07, use_cache=False, a mask of ones: 5e-01
#     qwen3    default: 7e-01, use_cache=False: 0e+00, use_cache=False, a mask of ones: 7e-01
#     mistral  default: 5e-01, use_cache=False: 1e-07, use_cache=False, a mask of ones: 5e-01
#     gpt_oss  default: 4e-01, use_cache=False: 4e-01, use_cache=False, a mask of ones: 4e-01
#     falcon   default: 2e-01, use_cache=False: 2e-01, use_cache=False, a mask of ones: 2e-01
# Decided here: tests/small_models.py makes its models with use_cache=False, and runs the documents of gpt-oss and ModernBERT one
#   by one, to have a truth for packed rows; docs/transformers.md, "What a batch may hold", says how to
#   compare with one process.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, off
from transformers import AutoConfig, AutoModelForCausalLM

size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
own = {"gpt_oss": dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2)}
tokens = torch.arange(12)[None] + 3  # two documents of six tokens
positions = torch.arange(6).repeat(2)[None]
calls = {
    "default": {},
    "use_cache=False": dict(use_cache=False),
    "use_cache=False, a mask of ones": dict(use_cache=False, attention_mask=torch.ones_like(tokens)),
}
for name, apart in ("llama", 1), ("qwen3", 1), ("mistral", 1), ("gpt_oss", 0), ("falcon", 0):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **size, **own.get(name, {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        alone = model(tokens[:, 6:]).logits
        found = {each: off(model(tokens, position_ids=positions, **options).logits[:, 6:], alone)
                 for each, options in calls.items()}
    print(f"{name:8}", ", ".join(f"{each}: {x:.0e}" for each, x in found.items()))
    default, without_cache, masked = found.values()
    expect(default > 1e-3 and masked > 1e-3, f"{name} keeps documents apart")
    expect((without_cache < 1e-5) == bool(apart), f"{name} without a cache")
EOF
"$python" "$work/program.py"
