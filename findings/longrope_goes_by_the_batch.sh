#!/usr/bin/env bash
# One would guess: a row's logits depend on its own tokens alone, and decoding with a cache gives the logits of the whole text.
# In fact: "longrope" (Phi-3; "dynamic" scaling likewise) takes one set of frequencies for a call, by the largest position in it. So
#   (1) a short row gets other logits when a row beyond original_max_position_embeddings is in its batch;
#   (2) the early tokens of a text have other logits once the text is longer; and
#   (3) a decoding loop with a cache parts from the whole text at that length, since old keys keep the old frequencies.
#   `generate` avoids (3) for Phi-3: it drops the cache there and runs the whole text again, a step as slow as the prompt.
# Who is hurt: servers that batch requests, loops of one's own, caches of prefixes, and whoever cuts a sequence over ranks: a rank whose
#   tokens end before the limit takes other frequencies than the others.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     a row of 10 tokens beside one of 20, limit 16: off by 5.3e-03
#     the first 10 of 20 tokens: off by 5.3e-03
#     token by token with a cache: 15 tokens 1.5e-07, 16 tokens 1.5e-07, 17 tokens 2.6e-03, 18 tokens 5.0e-03
# Decided here: burst_rt/hf/rotary.py shows rotary embeddings the largest position of all ranks; docs/generating.md says that
#   Phi-3 runs the whole text again; tests/small_models.py has a Phi-3 whose limit lies among its tokens.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, off
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM

torch.manual_seed(0)
model = Phi3ForCausalLM(Phi3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, original_max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
                     "original_max_position_embeddings": 16})).eval()
tokens = torch.randint(3, 64, (1, 20), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    alone = model(tokens[:, :10]).logits
    shown = torch.ones(2, 20, dtype=torch.long)
    shown[0, 10:] = 0
    padded = torch.nn.functional.pad(tokens[:, :10], (0, 10))
    batched = model(torch.cat([padded, tokens]), attention_mask=shown).logits[:1, :10]
    longer = model(tokens).logits[:, :10]
    cache, apart = DynamicCache(config=model.config), {}
    for n in range(1, 19):
        step = model(tokens[:, n - 1 : n], past_key_values=cache).logits[:, -1]
        apart[n] = off(step, model(tokens[:, :n]).logits[:, -1])
mate, prefix = off(batched, alone), off(longer, alone)
print(f"a row of 10 tokens beside one of 20, limit 16: off by {mate:.1e}")
print(f"the first 10 of 20 tokens: off by {prefix:.1e}")
print("token by token with a cache: " + ", ".join(f"{n} tokens {apart[n]:.1e}" for n in (15, 16, 17, 18)))
expect(mate > 1e-3 and prefix > 1e-3, "frequencies go by the row")
expect(apart[16] < 1e-5 < 1e-3 < apart[17], "decoding with a cache")
EOF
"$python" "$work/program.py"
