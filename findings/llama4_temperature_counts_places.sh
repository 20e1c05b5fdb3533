#!/usr/bin/env bash
# One would guess: where transformers keeps packed documents apart (position_ids that restart, no cache), a document of Llama 4 gets the
#   logits that it gets alone: rotary angles, chunks and masks all go by position_ids.
# In fact: its layers without rotary embeddings scale queries by a temperature that grows with the position, and they count
#   positions in the row by themselves. A document behind others is scaled as if it went on from them.
#   With attn_temperature_tuning=False packed and alone agree.
# Who is hurt: who packs long rows (the temperature begins to grow at floor_scale, 8,192 tokens; here 4), and any library that cuts a
#   sequence over ranks and hands over position_ids.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     attn_temperature_tuning=True: packed differs from alone by 2.3e-04
#     attn_temperature_tuning=False: packed differs from alone by 2.5e-07
# Decided here: burst_rt/hf/temperature.py scales Llama 4's queries by the places that they have; burst_rt/hf/lengths.py has other models
#   compared with one process beyond such a number, too; tests/small_models.py runs the documents one by one to have a truth.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, off
from transformers import Llama4ForCausalLM, Llama4TextConfig

tokens = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))
positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
found = {}
for tuned in True, False:
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=8,
        floor_scale=4, attn_temperature_tuning=tuned, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )).eval()
    with torch.no_grad():
        alone = model(tokens[:, 10:], use_cache=False).logits
        packed = model(tokens, position_ids=positions, use_cache=False).logits[:, 10:]
    found[tuned] = off(packed, alone)
    print(f"attn_temperature_tuning={tuned}: packed differs from alone by {found[tuned]:.1e}")
expect(found[True] > 1e-4, "the temperature goes by position_ids")
expect(found[False] < 1e-5, "Llama 4 without a temperature")
EOF
"$python" "$work/program.py"
