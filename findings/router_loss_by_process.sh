#!/usr/bin/env bash
# One would guess: since Trainer's loss of a step is the mean over its labelled tokens, however they are spread over processes and
#   micro-batches, so is the loss of a mixture of experts that adds its balancing loss (output_router_logits=True).
# In fact: the tokens' loss is divided by num_items_in_batch, the tokens of the whole step; the balancing loss is a mean already, and is added
#   once for each micro-batch, and for each process, as Trainer multiplies the loss by the processes before DDP takes the mean. Its weight
#   against the tokens' loss grows with both.
# Who is hurt: who tunes router_aux_loss_coef on one process and trains on many, or changes gradient_accumulation_steps for want of memory.
# Versions: transformers 5.23.0 (5.24.0 too), accelerate 1.15.0, torch 2.13.0 (CPU, gloo). Seen on 2026-11-28.
# Output:
#     1 processes, 1 micro-batches: loss of the tokens 4.1593, with the balancing loss 6.1678
#     1 processes, 2 micro-batches: loss of the tokens 4.1593, with the balancing loss 8.1774
#     2 processes, 1 micro-batches: loss of the tokens 4.1593, with the balancing loss 8.1774
#     4 processes, 1 micro-batches: loss of the tokens 4.1593, with the balancing loss 12.2147
# Decided here: burst_rt/hf/trainer.py divides the balancing loss by the processes, so that it counts once for each micro-batch, as on one process;
#   docs/trainer.md, "What the numbers mean", says so, and that micro-batches add up as in Trainer.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import contextlib
import io
import os

import torch
from finding import expect, over_gloo
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

rows = [{name: list(range(3 + 9 * i, 11 + 9 * i)) for name in ("input_ids", "labels")} for i in range(4)]


def collate(rows):
    return {name: torch.tensor([x[name] for x in rows]) for name in ("input_ids", "labels")}


def train(rank, world):
    if world > 1:  # accelerate asks for these, and uses the group that is there
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    for parts in (1, 2) if world == 1 else (1,):
        losses = []
        for weight in 0.0, 1.0:
            torch.manual_seed(0)
            model = MixtralForCausalLM(MixtralConfig(
                vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, num_local_experts=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                output_router_logits=True, router_aux_loss_coef=weight))
            args = TrainingArguments(
                os.environ["HF_HOME"], per_device_train_batch_size=4 // world // parts, gradient_accumulation_steps=parts,
                max_steps=1, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
                ddp_find_unused_parameters=False)
            trainer = Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
            with contextlib.redirect_stdout(io.StringIO()):
                trainer.train()
            losses.append(trainer.state.log_history[0]["loss"])
        if rank == 0:
            tokens, both = losses
            print(f"{world} processes, {parts} micro-batches: loss of the tokens {tokens:.4f}, with the balancing loss {both:.4f}")
            expect(abs(tokens - 4.15) < 0.1, "the loss of the tokens")
            # Two of four experts a token, so a mean of about 2.
            expect(round((both - tokens) / 2) == world * parts, "how often the balancing loss counts")


if __name__ == "__main__":
    for world in 1, 2, 4:
        over_gloo(world, train)
EOF
"$python" "$work/program.py"
