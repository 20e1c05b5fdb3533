#!/usr/bin/env bash
# One would guess: a window of 4 is a window of 4 keys, or at least means one thing within one library.
# In fact: a query sees 4 keys in Mistral and Gemma 3 (its own and 3 before); 9 in T5Gemma's encoder (4 on each side); 5 in ModernBERT
#   (local_attention=4, halved, each side) and in a bidirectional Gemma 3, whose config rewrites sliding_window=4 into 3, of which
#   the own key is one; 5 in jax.nn.dot_product_attention with local_window_size=4 and is_causal (4 before its own), as in flash-attn.
# Who is hurt: who carries a window from one library, model or config to another. An error of one key shows in no loss.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU), jax 0.10.2. Seen on 2026-11-27.
# Output:
#     Mistral, sliding_window=4: 4 keys, from -3 to +0
#     Gemma 3, sliding_window=4: 4 keys, from -3 to +0
#     Gemma 3, bidirectional, sliding_window=4: 5 keys, from -2 to +2
#     T5Gemma's encoder, sliding_window=4: 9 keys, from -4 to +4
#     ModernBERT, local_attention=4: 5 keys, from -2 to +2
#     jax.nn.dot_product_attention, causal, local_window_size=4: 5 keys, from -4 to +0
# Decided here: burst_rt/hf/masks.py (`_window`, `_window_both_ways`), and the sentence on sliding_window in docs/masks.md.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
import transformers
from finding import expect

W, QUERY = 4, 10
tokens = torch.arange(20)[None] + 3
size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
            pad_token_id=0, bos_token_id=1, eos_token_id=2)
decoder = dict(num_key_value_heads=2, head_dim=8, sliding_window=W)
local = dict(layer_types=["sliding_attention"])


def seen(name, config, eager="eager", **options):
    config = getattr(transformers, f"{config}Config")(**options, attn_implementation=eager)
    model = getattr(transformers, type(config).__name__.replace("Config", "Model"))(config)
    model = model.encoder if name.startswith("T5Gemma") else model
    x = model.get_input_embeddings()(tokens).detach().requires_grad_()
    out = model(inputs_embeds=x).last_hidden_state[0, QUERY]
    (out * torch.arange(32.0)).sum().backward()
    keys = [j - QUERY for j in range(20) if x.grad[0, j].any()]
    print(f"{name}: {len(keys)} keys, from {keys[0]:+d} to {keys[-1]:+d}")
    return len(keys)


part = {**size, **decoder, **local}
found = [
    seen("Mistral, sliding_window=4", "Mistral", **size, **decoder),
    seen("Gemma 3, sliding_window=4", "Gemma3Text", **part),
    seen("Gemma 3, bidirectional, sliding_window=4", "Gemma3Text", **part, use_bidirectional_attention=True),
    seen("T5Gemma's encoder, sliding_window=4", "T5Gemma", encoder=part, decoder=dict(part)),
    seen("ModernBERT, local_attention=4", "ModernBert", **size, **local, local_attention=W, cls_token_id=1, sep_token_id=2),
]
expect(found == [4, 4, 5, 9, 5], f"keys of a window of 4: {found}")
EOF
"$python" "$work/program.py"
environment jax==0.10.2 numpy==2.4.6
cat > "$work/program.py" <<'EOF'
import jax
from finding import expect

q = k = v = jax.random.normal(jax.random.key(0), (1, 20, 1, 8))


def at_query(v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=4)[0, 10].sum()


keys = [j - 10 for j in range(20) if jax.grad(at_query)(v)[0, j].any()]
print(f"jax.nn.dot_product_attention, causal, local_window_size=4: {len(keys)} keys, from {keys[0]:+d} to {keys[-1]:+d}")
expect(len(keys) == 5, "JAX's window")
EOF
"$python" "$work/program.py"
