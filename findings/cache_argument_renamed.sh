#!/usr/bin/env bash
# One would guess: a minor release of transformers that renames an argument, and still takes the old name with a warning, breaks
#   nothing; and a call by the new name is an error in the release before.
# In fact: 5.24.0 calls the cache of a model `cache`. The old name is translated inside `forward`, so hooks see what the caller wrote:
#   `generate(past_key_values=...)` calls the model with `cache=`, and a hook that looks for past_key_values
#   finds no cache. A call by hand with the old name shows the model's own hook the old name, and its layers' hooks the new one.
#   Outputs answer to both names; a loop over their items finds `cache`.
#   In 5.23.0 model(tokens, cache=...) is taken in silence by **kwargs: the model fills a cache of its own, and the given one stays empty.
# Who is hurt: libraries that put hooks around models, wrap `forward`, or prepare the inputs of generate; who writes for 5.24 and runs on 5.23.
# Versions: transformers 5.23.0 and 5.24.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     5.23.0: generate                   hooks see: model past_key_values, layer past_key_values
#     5.23.0: model(past_key_values=)    hooks see: model past_key_values, layer past_key_values
#     5.23.0: model(cache=)              hooks see: model cache, layer past_key_values and cache
#     5.23.0: after model(cache=) it holds 0 of 8 tokens; output has logits, past_key_values
#     5.24.0: generate                   hooks see: model cache, layer cache
#     5.24.0: model(past_key_values=)    hooks see: model past_key_values, layer cache
#     5.24.0: model(cache=)              hooks see: model cache, layer cache
#     5.24.0: after model(cache=) it holds 8 of 8 tokens; output has logits, cache
# Decided here: burst_rt/hf/hooks.py finds its cache among a call's arguments by its type, burst_rt/hf/release.py knows both names and refuses
#   the one that a release swallows, and CI runs the tests of models with both releases (make other-transformers).
set -euo pipefail
source "$(dirname "$0")/common.sh"
cat > "$work/program.py" <<'EOF'
import sys

import torch
import transformers
from finding import expect
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)).eval()
seen = {}


def hook(name):
    def look(module, args, options):
        seen[name] = " and ".join(x for x in ("past_key_values", "cache") if x in options) or "none"
    return look


model.register_forward_pre_hook(hook("model"), with_kwargs=True)
model.model.layers[0].self_attn.register_forward_pre_hook(hook("layer"), with_kwargs=True)
tokens = torch.arange(8)[None] + 3
version, found = transformers.__version__, {}


def call(what, function):
    seen.clear()
    result = function()
    found[what] = dict(seen)
    print(f"{version}: {what:26} hooks see: model {seen['model']}, layer {seen['layer']}")
    return result


call("generate", lambda: model.generate(
    tokens, past_key_values=DynamicCache(config=model.config), max_new_tokens=2, do_sample=False))
output = call("model(past_key_values=)", lambda: model(tokens, past_key_values=DynamicCache(config=model.config)))
given = DynamicCache(config=model.config)
call("model(cache=)", lambda: model(tokens, cache=given))
length = given.get_seq_length()
print(f"{version}: after model(cache=) it holds {length} of 8 tokens; output has {', '.join(output)}")
if sys.argv[1] == "old":
    expect(found["generate"]["model"] == "past_key_values", "generate of 5.23")
    expect(length == 0, "5.23 takes cache=, or refuses it")
else:
    expect(found["generate"]["model"] == "cache", "generate of 5.24")
    expect(found["model(past_key_values=)"] == {"model": "past_key_values", "layer": "cache"}, "5.24's names")
    expect(output.past_key_values is output.cache and "past_key_values" not in list(output), "5.24's output")
    expect(length == 8, "5.24 takes cache=")
EOF
environment "${transformers[@]}"
"$python" "$work/program.py" old
environment torch==2.13.0 numpy==2.4.6 transformers==5.24.0
"$python" "$work/program.py" new
