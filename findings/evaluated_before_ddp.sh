#!/usr/bin/env bash
# One would guess: Trainer.evaluate() computes numbers and changes nothing, so a baseline measured before train() leaves the training as it is.
# In fact: on several processes the first evaluate() or predict() marks the model as prepared (Accelerator.prepare_model with evaluation_mode=True),
#   without DDP. train() asks accelerate to prepare it, gets it back as it is, and never averages a gradient: each process trains a model of its
#   own on its own rows. Nothing is raised or logged; the logged loss is the mean over processes, and checkpoints are rank 0's.
# Who is hurt: who evaluates before training under DDP, for a baseline or for a metric that picks the best checkpoint.
# Versions: accelerate 1.15.0, transformers 5.23.0 (5.24.0 too), torch 2.13.0 (CPU, gloo). Seen on 2026-11-28.
# Output:
#     train(): DistributedDataParallel, gradient norms 1.1171 and 1.1171, weights equal
#     evaluate(), train(): LlamaForCausalLM, gradient norms 1.6533 and 1.4938, weights differ
#     predict(), train(): LlamaForCausalLM, gradient norms 1.6533 and 1.4938, weights differ
# Decided here: `train` of burst_rt/hf/trainer.py forgets what an evaluation prepared, so DDP wraps the model (docs/trainer.md, "What the numbers mean").
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import contextlib
import io
import os

import torch
import torch.distributed as dist
from finding import expect, over_gloo
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

rows = [{name: list(range(3 + 9 * i, 11 + 9 * i)) for name in ("input_ids", "labels")} for i in range(4)]


def collate(rows):
    return {name: torch.tensor([x[name] for x in rows]) for name in ("input_ids", "labels")}


def train(rank, world):
    # accelerate asks for these, and uses the group that is there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    for before in "", "evaluate", "predict":
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))
        args = TrainingArguments(
            os.environ["HF_HOME"], per_device_train_batch_size=2, max_steps=1, logging_steps=1, learning_rate=0.1, optim="sgd",
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", ddp_find_unused_parameters=False)
        trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows, data_collator=collate)
        with contextlib.redirect_stdout(io.StringIO()):
            if before:
                getattr(trainer, before)(rows)
            trainer.train()
        wrapped = type(trainer.model_wrapped).__name__
        norms, weights = [None] * world, [torch.empty_like(model.lm_head.weight) for _ in range(world)]
        dist.all_gather_object(norms, trainer.state.log_history[0]["grad_norm"])
        dist.all_gather(weights, model.lm_head.weight.detach())
        if rank == 0:
            equal = torch.equal(*weights)
            print(f"{before + '(), ' if before else ''}train(): {wrapped}, gradient norms {norms[0]:.4f} and {norms[1]:.4f}, "
                  f"weights {'equal' if equal else 'differ'}")
            expect(equal == (norms[0] == norms[1]) == (not before), "what is trained together")


if __name__ == "__main__":
    over_gloo(2, train)
EOF
"$python" "$work/program.py"
