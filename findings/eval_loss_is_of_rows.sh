#!/usr/bin/env bash
# One would guess: since Trainer's training loss is the mean over the labelled tokens of a step, however they are spread over
#   micro-batches, its eval_loss is the mean over the labelled tokens of the held-out set, and exp(eval_loss) the perplexity of a token.
# In fact: eval_loss is the mean of the batches' means, weighted by rows. It depends on per_device_eval_batch_size and on which rows share a batch.
# Who is hurt: who compares perplexities of prompts with few labelled tokens, or of packed rows, and who changes the size of a batch.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     training loss: 4.108517 with 8 rows a batch, 4.108517 with 4
#     eval_loss: 4.108517 with 8 rows a batch, 4.123357 with 4
# Decided here: the row `eval_loss` of the table in docs/trainer.md, and the example of a perplexity over all
#   labelled tokens in docs/transformers.md, "What a batch may hold".
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import contextlib
import io
import os

import torch
from finding import expect
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

prompts = [{"input_ids": [3 + i] * 8, "labels": [-100] * 7 + [5]} for i in range(4)]
texts = [{"input_ids": list(range(10, 18)), "labels": list(range(10, 18))} for i in range(4)]


def collate(rows):
    return {name: torch.tensor([x[name] for x in rows]) for name in ("input_ids", "labels")}


def loss(training, size):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
    args = TrainingArguments(
        os.environ["HF_HOME"], per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
        per_device_eval_batch_size=size, max_steps=1, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True,
        save_strategy="no", train_sampling_strategy="sequential")
    rows = prompts + texts
    trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
    with contextlib.redirect_stdout(io.StringIO()):
        if not training:
            return trainer.evaluate()["eval_loss"]
        trainer.train()
        return trainer.state.log_history[0]["loss"]


found = {(training, size): loss(training, size) for training in (True, False) for size in (8, 4)}
for training, name in (True, "training loss"), (False, "eval_loss"):
    print(f"{name}: {found[training, 8]:.6f} with 8 rows a batch, {found[training, 4]:.6f} with 4")
expect(abs(found[True, 8] - found[True, 4]) < 1e-5, "the training loss")
expect(abs(found[False, 8] - found[True, 8]) < 1e-5, "eval_loss of a single batch")
expect(abs(found[False, 8] - found[False, 4]) > 1e-3, "eval_loss goes by tokens")
EOF
"$python" "$work/program.py"
