#!/usr/bin/env bash
# One would guess: a mixture of experts whose config has output_router_logits=False (transformers' default) is fine-tuned by TRL's
#   SFTTrainer on the loss of its tokens, as by transformers' Trainer.
# In fact: SFTTrainer sets model.config.output_router_logits to True as it is made, whatever the user has set, wherever the config has a
#   router_aux_loss_coef that is not 0, and adds the balancing loss. SFTConfig(router_aux_loss_coef=0.0) is what turns it off.
# Who is hurt: who moves from Trainer to SFTTrainer and compares losses; libraries whose advice is to set the config's switch to False.
# Versions: trl 1.16.0, transformers 5.23.0, torch 2.13.0 (CPU). Seen on 2026-11-27.
# Output:
#     loss of the tokens: 4.1510
#     SFTConfig(): output_router_logits is True, first loss 4.1530
#     SFTConfig(router_aux_loss_coef=0.0): output_router_logits is False, first loss 4.1510
# Decided here: burst_rt/hf/balancing.py computes the balancing loss of all ranks' tokens, so either loss is right over ranks; docs/trainer.md, "What the
#   numbers mean", says which one a trainer adds. burst_rt/hf/attention.py names router_aux_loss_coef=0.0 where a model has no known balancing loss.
set -euo pipefail
source "$(dirname "$0")/common.sh"
environment "${transformers[@]}"
cat > "$work/program.py" <<'EOF'
import contextlib
import io
import os

import datasets
import torch
import trl
from finding import expect
from tokenizers import Tokenizer, models
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

datasets.disable_progress_bars()
words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": 3 + i for i in range(61)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="</s>")
tokens = list(range(3, 19))


def mixture():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        output_router_logits=False))


with torch.no_grad():
    of_tokens = mixture()(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.item()
print(f"loss of the tokens: {of_tokens:.4f}")
for options in {}, {"router_aux_loss_coef": 0.0}:
    model = mixture()
    args = trl.SFTConfig(
        os.environ["HF_HOME"], use_cpu=True, bf16=False, report_to="none", max_steps=1, logging_steps=1,
        disable_tqdm=True, save_strategy="no", gradient_checkpointing=False, **options)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = trl.SFTTrainer(model=model, args=args, processing_class=tokenizer,
                                 train_dataset=datasets.Dataset.from_list([{"input_ids": tokens}] * 4))
        switch = model.config.output_router_logits
        trainer.train()
    loss = trainer.state.log_history[0]["loss"]
    print(f"SFTConfig({', '.join(f'{k}={v}' for k, v in options.items())}): output_router_logits is {switch}, first loss {loss:.4f}")
    expect(switch == (not options), "the switch in the config")
    expect((abs(loss - of_tokens) > 1e-4) == (not options), "the loss")
EOF
"$python" "$work/program.py"
