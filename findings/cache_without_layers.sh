#!/usr/bin/env bash
# One would guess: a cache of one's own, a subclass of transformers.Cache that keeps keys and values by itself and has no layers of
#   transformers', goes on after a minor release as before: `generate` drops the tokens that get_seq_length() says are there.
# In fact: since 5.24.0 `generate` asks whether *all* layers of the cache are linear (recurrent states, from which it drops no tokens). A cache
#   without layers passes for one: all([]) is True. A second turn hands the model the whole text, behind what is cached: each
#   token of the first turn is there twice, at other positions, and nothing is said.
# Who is hurt: who writes caches over remote memory, over ranks or compressed, beside transformers' own layers.
# Versions: transformers 5.23.0 and 5.24.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     5.23.0: second turn of 13 tokens, 9 of them cached: the model is given 4, the cache then holds 13
#     5.24.0: second turn of 13 tokens, 9 of them cached: the model is given 13, the cache then holds 22
# Decided here: burst_rt.hf.Cache says by layer that none is linear (burst_rt/hf/cache.py, `is_linear`); tests/unit/test_hf_cache.py
#   has two turns, and runs with both releases (make other-transformers).
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/program.py" <<'PROGRAM'
import sys

import torch
import transformers
from finding import expect
from transformers import Cache, LlamaConfig, LlamaForCausalLM


class Own(Cache):
    """Keys and values of all layers in a dict."""

    is_compileable = is_croppable = False

    def __init__(self):
        super().__init__(layers=[])
        self.kept = {}

    def update(self, keys, values, layer, *_, **__):
        old = self.kept.get(layer)
        new = (keys, values) if old is None else tuple(torch.cat(x, 2) for x in zip(old, (keys, values)))
        self.kept[layer] = new
        return new

    def get_seq_length(self, layer_idx=0):
        return self.kept[layer_idx][0].shape[2] if layer_idx in self.kept else 0

    def get_mask_sizes(self, query_length, layer_idx):
        return self.get_seq_length(layer_idx) + query_length, 0


torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)).eval()
given = []
model.model.embed_tokens.register_forward_pre_hook(lambda module, args: given.append(args[0].shape[1]))
name = sys.argv[1]
cache = Own()
first = model.generate(torch.arange(8)[None] + 3, **{name: cache}, max_new_tokens=2, do_sample=False)
length = cache.get_seq_length()
text = torch.cat([first, torch.arange(3)[None] + 20], 1)
given.clear()
model.generate(text, **{name: cache}, max_new_tokens=1, do_sample=False)
held = cache.get_seq_length()
print(f"{transformers.__version__}: second turn of {text.shape[1]} tokens, {length} of them cached: "
      f"the model is given {given[0]}, the cache then holds {held}")
expect(length == 9, "what the first turn leaves in the cache")
expect((given[0], held) == ((4, 13) if name == "past_key_values" else (13, 22)), "what the second turn runs")
PROGRAM
environment "${transformers[@]}"
"$python" "$work/program.py" past_key_values
environment torch==2.13.0 numpy==2.4.6 transformers==5.24.0
"$python" "$work/program.py" cache
