#!/usr/bin/env bash
# One would guess: the loss of a padded batch does not depend on the side of the padding, for a model with rotary embeddings: the attention
#   mask hides padding, labels of padding are -100, and only distances between tokens count.
# In fact: DataCollatorForLanguageModeling gives the first token of a row that is padded on the left a label that counts: after the shift it
#   is predicted from the last padding token, which attends to nothing that has a meaning. On the right the same token is a row's
#   first and is never predicted. The number of labels and the loss differ. With that label at -100 the sides agree.
# Who is hurt: who trains with the tokenizer that generates (padding on the left), and who compares losses between two implementations of
#   attention: what a row gets that sees nothing is not defined.
# Versions: transformers 5.23.0, tokenizers 0.23.3, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     padding on the right: labels of the second row [10, 11, 12, -100, -100, -100, -100], 8 count, loss 4.178496
#     padding on the left: labels of the second row [-100, -100, -100, -100, 10, 11, 12], 9 count, loss 4.176317
#     padding on the left, first label -100: labels of the second row [-100, -100, -100, -100, -100, 11, 12], 8 count, loss 4.178496
# Decided here: docs/transformers.md, "What a batch may hold": the label of such a row's first token should be -100; tests/small_models.py
#   (`make_batch`) sets it so.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import torch
from finding import expect
from tokenizers import Tokenizer, models
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<pad>": 0, **{f"w{i}": i for i in range(1, 64)}}, unk_token="<pad>"))
rows = [{"input_ids": [3, 4, 5, 6, 7, 8, 9]}, {"input_ids": [10, 11, 12]}]
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()
losses, counts = {}, {}
for name in "right", "left", "left, first label -100":
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side=name[:5].rstrip(","))
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    if name.endswith("-100"):
        batch["labels"][1, 4] = -100
    with torch.no_grad():
        losses[name] = model(**batch).loss.item()
    counts[name] = int((batch["labels"][:, 1:] != -100).sum())
    print(f"padding on the {name}: labels of the second row {batch['labels'][1].tolist()}, {counts[name]} count, loss {losses[name]:.6f}")
right, left, mended = losses.values()
expect(list(counts.values()) == [8, 9, 8] and abs(left - right) > 1e-4, "the label of the first token")
expect(abs(mended - right) < 1e-5, "with the label at -100")
EOF
"$python" "$work/program.py"
