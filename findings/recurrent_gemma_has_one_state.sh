#!/usr/bin/env bash
# One would guess: what a model keeps of a text is in its cache, so that two texts with a cache each do not meet, and beam search, which
#   reorders the rows of the cache, is the same with a cache as without one.
# In fact: RecurrentGemma keeps keys in the cache, and the states of recurrences and convolutions in its modules, whatever the cache is. A
#   second text takes the place of the first one's states, and nothing is said. Beam search reorders keys and not states: a row goes on
#   from another beam's state, and the score that is returned is not that of the text.
# Who is hurt: who serves several conversations with one model, or searches with beams (`use_cache=True` is the default).
# Versions: transformers 5.24.0, torch 2.13.0 (CPU). Seen on 2026-11-28.
# Output:
#     a text in two calls: 4e-07; with another text in between: 4e-01 (off from the whole text, as a part of the largest logit)
#     beam search of 20 texts: with a cache 14 have another score than their tokens have, without one 0
# Decided here: burst_rt.hf.Cache keeps the states itself, and reorders them (burst_rt/hf/states.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment torch==2.13.0 numpy==2.4.6 transformers==5.24.0
cat > "$work/program.py" <<'EOP'
import torch
from finding import expect, off
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

torch.manual_seed(0)
config = RecurrentGemmaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    block_types=["recurrent", "recurrent", "attention"], lru_width=32, attention_window_size=64, head_dim=8, pad_token_id=0,
    bos_token_id=1, eos_token_id=None,
)
model = RecurrentGemmaForCausalLM(config).eval()
NEW, texts = 12, torch.randint(3, 64, (20, 1, 20), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)
    text, other = texts[0], texts[1]
    whole, found = model(text, use_cache=False).logits[:, -1], []
    for between in (False, True):
        cache = DynamicCache(config=config)
        model(text[:, :-1], cache=cache, use_cache=True)
        if between:
            model(other, cache=DynamicCache(config=config), use_cache=True)
        found.append(off(model(text[:, -1:], cache=cache, use_cache=True).logits[:, -1], whole))
    print(f"a text in two calls: {found[0]:.0e}; with another text in between: {found[1]:.0e} "
          "(off from the whole text, as a part of the largest logit)", flush=True)
    wrong = []
    for use_cache in (True, False):
        wrong.append(0)
        for text in texts:
            best = model.generate(text, num_beams=4, max_new_tokens=NEW, do_sample=False, length_penalty=0.0, use_cache=use_cache,
                                  return_dict_in_generate=True, output_scores=True)
            logits = model(best.sequences, use_cache=False).logits.log_softmax(-1)[0, -NEW - 1 : -1]
            score = logits.gather(1, best.sequences[0, -NEW:, None]).sum()
            wrong[-1] += abs((best.sequences_scores[0] - score).item()) > 1e-3
    print(f"beam search of {len(texts)} texts: with a cache {wrong[0]} have another score than their tokens have, without one {wrong[1]}")
expect(found[0] < 1e-5, f"a text in two calls is off by {found[0]:.0e}")
expect(found[1] > 1e-3, "another text in between changes nothing")
expect(wrong[0] > 0, "beam search with a cache returns the scores of its texts")
expect(wrong[1] == 0, "beam search without a cache returns other scores")
EOP
"$python" "$work/program.py"
