#!/usr/bin/env bash
# One would guess: where transformers keeps the documents of a packed row apart in softmax attention (position_ids that restart, no
#   cache, no mask; or cu_seq_lens as for flash-attn), it keeps them apart in the layers with a state, too, or refuses.
# In fact: without flash-linear-attention, mamba-ssm and causal-conv1d nothing keeps them apart there by position_ids: states and
#   convolutions go on from one document to the next, in silence. Qwen3-Next refuses cu_seq_lens_q and seq_idx. Jamba, LFM2 and
#   Mamba-2 take cu_seq_lens_q and mix the documents all the same.
# Who is hurt: who trains or evaluates hybrid models on packed rows on a machine without these packages (CPUs, tests, other GPUs),
#   and who takes such a run for the truth.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU). Seen on 2026-11-28.
# Output:
#     qwen3_next  position_ids: first 9e-08, second 3e-02; cu_seq_lens_q: ValueError
#     jamba       position_ids: first 9e-08, second 9e-04; cu_seq_lens_q: first 9e-08, second 9e-04
#     lfm2        position_ids: first 9e-08, second 7e-05; cu_seq_lens_q: first 9e-08, second 7e-05
#     mamba2      position_ids: first 7e-08, second 1e+00; cu_seq_lens_q: first 7e-08, second 1e+00
#   (off from each document by itself, as a part of the largest logit; Mamba-2 takes no position_ids)
# Decided here: burst_rt.recurrence begins anew at each document on any machine (docs/recurrences.md); tests compare hybrids with the
#   documents one by one (tests/small_hybrids.py).
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, off
from transformers import AutoConfig, AutoModelForCausalLM

size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False)
own = {
    "qwen3_next": dict(head_dim=8, linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
                       num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                       layer_types=["linear_attention", "full_attention"]),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, num_experts=2, num_experts_per_tok=1,
                  use_mamba_kernels=False),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=1, expand=2, chunk_size=8),
}
tokens = torch.arange(12)[None] + 3  # two documents of six tokens
positions = torch.arange(6).repeat(2)[None]
ends = torch.tensor([0, 6, 12], dtype=torch.int32)
calls = {
    "position_ids": dict(position_ids=positions),
    "cu_seq_lens_q": dict(position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=6, max_length_k=6),
}
for name in own:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**size, **own[name]}), attn_implementation="eager").eval()
    said = []
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in tokens.split(6, 1)], 1)
        for call, options in calls.items():
            if name == "mamba2":
                options = {k: x for k, x in options.items() if k != "position_ids"}  # it has none
            try:
                logits = model(tokens, **options).logits
            except Exception as error:  # noqa: BLE001
                said.append(f"{call}: {type(error).__name__}")
                continue
            first, second = (off(logits[:, at], alone[:, at]) for at in (slice(6), slice(6, 12)))
            said.append(f"{call}: first {first:.0e}, second {second:.0e}")
            expect(first < 1e-5, f"{name}, {call}: the first document differs")
            expect(second > 1e-5, f"{name}, {call}: documents are apart ({second:.0e})")
    print(f"{name:11}", "; ".join(said), flush=True)
EOF
"$python" "$work/program.py"
