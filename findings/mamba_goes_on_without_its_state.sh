#!/usr/bin/env bash
# One would guess: a call with a cache goes on from the tokens that were cached, whether it has one new token or several: "as if the model
#   add state_input_ids + input_ids as context", as MambaModel.forward documents its cache.
# In fact: layers of Mamba-1 (Mamba, Falcon Mamba, Jamba) that get several tokens begin from the state 0 again, in silence: only the
#   convolution goes on. One token at a time is right. `generate(prefill_chunk_size=)` makes such calls.
# Who is hurt: who reads long prompts in chunks, or goes on with a conversation, with these models.
# Versions: transformers 5.24.0, torch 2.13.0 (CPU). Seen on 2026-11-28.
# Output:
#     mamba         one by one 5e-07, several tokens 4e-03
#     falcon_mamba  one by one 3e-07, several tokens 4e-02
#     jamba         one by one 3e-07, several tokens 3e-03; a prompt in chunks 3e-03
#   (off from the whole text without a cache, as a part of the largest logit)
# Decided here: burst_rt.hf.Cache runs its own recurrences on every token, by the state (burst_rt/hf/mixers.py); tests compare with each
#   row's whole text without a cache (tests/unit/test_hf_hybrids.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment torch==2.13.0 numpy==2.4.6 transformers==5.24.0
cat > "$work/program.py" <<'EOP'
import torch
from finding import expect, off
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

size = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
own = {
    "mamba": dict(state_size=8),
    "falcon_mamba": dict(state_size=8),
    "jamba": dict(num_attention_heads=4, num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
                  num_experts=2, num_experts_per_tok=1),
}
tokens = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))
for name, options in own.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **size, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # first weights are so small that states are, too
        whole = model(tokens, use_cache=False).logits[:, -1]
        found = {}
        for how, parts in (("one", [tokens[:, :12], *tokens[:, 12:].split(1, 1)]), ("several", tokens.split(12, 1))):
            cache = DynamicCache(config=model.config)
            for part in parts:
                last = model(part, cache=cache, use_cache=True).logits[:, -1]
            found[how] = off(last, whole)
        said = f"{name:13} one by one {found['one']:.0e}, several tokens {found['several']:.0e}"
        if name == "jamba":  # `generate` takes no chunks of models without attention
            generated = model.generate(tokens, max_new_tokens=1, do_sample=False, prefill_chunk_size=12, output_logits=True,
                                       return_dict_in_generate=True)
            chunks = off(generated.logits[0], whole)
            said += f"; a prompt in chunks {chunks:.0e}"
            expect(chunks > 1e-3, "chunks go on from the state")
    print(said, flush=True)
    expect(found["one"] < 1e-5, f"{name}: one token after another is off by {found['one']:.0e}")
    expect(found["several"] > 1e-3, f"{name}: several tokens go on from the state")
EOP
"$python" "$work/program.py"
