#!/usr/bin/env bash
# One would guess: a function that only calls transformers' ForCausalLMLoss, registered in its place (to log, to time, to hook in), changes
#   no number.
# In fact: Trainer divides the summed loss by the labels of the step, and counts them without each row's first, which is never predicted,
#   only where LOSS_MAPPING holds the *very object* ForCausalLMLoss. For a wrapper it counts all, and the loss and every
#   gradient shrink: here by 32 / 36. With a padded or masked first label there is no difference, which hides it.
# Who is hurt: who registers a loss of their own in LOSS_MAPPING that shifts labels as transformers' does.
# Versions: transformers 5.23.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     by hand 4.118526, Trainer 4.118526, Trainer with a wrapped loss 3.660912 = 0.8889 times that (32 / 36 = 0.8889)
# Decided here: burst_rt/hf/loss.py (`register_losses`) puts its loss under the name ForCausalLMLoss in transformers.trainer too, so that
#   Trainer's question is answered yes.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import contextlib
import functools
import io
import os

import torch
from finding import expect
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

prompts = [{"input_ids": [3 + i] * 8, "labels": [-100] * 7 + [5]} for i in range(4)]  # one label each
texts = [{"input_ids": list(range(10 + i, 18 + i)), "labels": list(range(10 + i, 18 + i))} for i in range(4)]  # eight


def collate(rows):
    return {name: torch.tensor([x[name] for x in rows]) for name in ("input_ids", "labels")}


def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def first_loss():
    args = TrainingArguments(os.environ["HF_HOME"], per_device_train_batch_size=8, max_steps=1, logging_steps=1,
                             use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
    trainer = Trainer(model=model(), args=args, train_dataset=prompts + texts, data_collator=collate)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer.state.log_history[0]["loss"]


@functools.wraps(ForCausalLMLoss)
def wrapper(*args, **options):
    return ForCausalLMLoss(*args, **options)


by_hand = model()(**collate(prompts + texts)).loss.item()
own = first_loss()
LOSS_MAPPING["ForCausalLM"] = wrapper
wrapped = first_loss()
print(f"by hand {by_hand:.6f}, Trainer {own:.6f}, Trainer with a wrapped loss {wrapped:.6f} = {wrapped / own:.4f} times that (32 / 36 = {32 / 36:.4f})")
expect(abs(own - by_hand) < 1e-5, "Trainer's own loss")
expect(abs(wrapped / own - 32 / 36) < 1e-4, "a wrapped loss is counted as transformers' own")
EOF
"$python" "$work/program.py"
