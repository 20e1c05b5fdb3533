#!/usr/bin/env bash
# One would guess: Gemma 3 and 4 in a packed row (position_ids that restart, no mask, use_cache=False) give each document what it gets by itself, with
#   images as without: the tokens of an image see each other in both directions, and those of text see what is before them.
# In fact: in layers with windows the function that says which tokens are of one image gets places within the document, and looks them up among the
#   places of the row. So from the second document on, the images are where those of the first are: tokens of an image do not see all of it,
#   and tokens of text see later ones, which they are to predict. The first document is right; so is every layer of full attention.
# Who is hurt: who packs rows with images to train Gemma: the loss falls by looking ahead. Nothing is raised.
# Versions: transformers 5.23.0 (5.24.0 too), torch 2.13.0 (CPU). Seen on 2026-11-28.
# Output:
#     Gemma 3, full_attention and full_attention: text off by 2e-07 and 4e-07, with images 2e-07 and 4e-07; a later token of text changes logits by 0e+00
#     Gemma 3, sliding_attention and full_attention: text off by 2e-07 and 3e-07, with images 2e-07 and 6e-01; a later token of text changes logits by 8e-01
#     Gemma 4, sliding_attention and full_attention: text off by 3e-07 and 5e-07, with images 5e-07 and 8e-01; a later token of text changes logits by 7e-01
# Decided here: burst_rt/hf computes the images of a packed row as the documents one by one; docs/transformers.md, "Images", says that one process
#   does not, and how to compare.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect, off
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma4Config, Gemma4ForConditionalGeneration

text = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, sliding_window=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
lengths = 12, 10
tokens = torch.arange(22)[None] + 10
positions = torch.cat([torch.arange(n) for n in lengths])[None]
of_text = torch.zeros_like(tokens)
of_images = of_text.clone()
of_images[:, 5:9] = of_images[:, 14:18] = 1  # places 5 to 8 of the first document, 2 to 5 of the second


def gemma(name, layers):
    torch.manual_seed(0)
    if name == "Gemma 3":
        config = Gemma3Config(text_config={**text, "layer_types": layers}, vision_config=vision)
        return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval(), "token_type_ids"
    more = dict(global_head_dim=8, hidden_size_per_layer_input=0, vocab_size_per_layer_input=64, num_kv_shared_layers=0,
                use_bidirectional_attention="vision", layer_types=layers)
    config = Gemma4Config(text_config={**text, **more}, vision_config={**vision, "num_key_value_heads": 2, "head_dim": 8},
                          image_token_id=3, video_token_id=4, audio_token_id=5)
    return Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager").eval(), "mm_token_type_ids"


for name, *layers in ("Gemma 3", "full_attention", "full_attention"), ("Gemma 3", "sliding_attention", "full_attention"), (
        "Gemma 4", "sliding_attention", "full_attention"):
    model, types_name = gemma(name, layers)

    def logits(tokens, types, **options):
        with torch.no_grad():
            return model(tokens, use_cache=False, **{types_name: types}, **options).logits

    found = {}
    for case, types in ("text", of_text), ("images", of_images):
        packed = logits(tokens, types, position_ids=positions).split(lengths, 1)
        alone = [logits(*each) for each in zip(tokens.split(lengths, 1), types.split(lengths, 1))]
        found[case] = [off(*each) for each in zip(packed, alone)]
    # Text at place 8 of the second document; how much the logits of the text at place 6 go by it.
    other = tokens.clone()
    other[0, 12 + 8] = 60
    ahead = off(logits(other, of_images, position_ids=positions)[:, 12 + 6], packed[1][:, 6])
    print(f"{name}, {' and '.join(layers)}: text off by {found['text'][0]:.0e} and {found['text'][1]:.0e}, "
          f"with images {found['images'][0]:.0e} and {found['images'][1]:.0e}; a later token of text changes logits by {ahead:.0e}")
    wrong = "sliding_attention" in layers
    expect(max(found["text"] + found["images"][:1]) < 1e-5, f"{name}: text, and the first document")
    expect((found["images"][1] > 1e-2) == (ahead > 1e-3) == wrong, f"{name}: the images of the second document")
EOF
"$python" "$work/program.py"
