"""Fine-tunes a model of transformers on long documents, with FSDP2.

    torchrun --nproc-per-node 4 examples/finetune.py MODEL TEXTS OUT --context 2

MODEL is what `from_pretrained` takes, TEXTS a folder of documents (*.txt), and OUT a folder for the
tuned model. Here 2 ranks share a sequence, and there are 2 such pairs, each with its own sequences.
Parameters, gradients and the optimizer's state are sharded over all 4 ranks. The next command is
for two hosts with 8 GPUs each, where all 16 GPUs share a sequence of a million tokens:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        examples/finetune.py MODEL TEXTS OUT --context 16 --tokens 1000000

docs/transformers.md explains the lines that would be missing or different in another script.
"""

import argparse
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    get_cosine_schedule_with_warmup,
)

import burst_rt
import burst_rt.hf


def packed_rows(folder: Path, tokenizer: Any, most: int) -> Iterator[list[dict[str, list[int]]]]:
    """Documents in rows of at most so many tokens; longer ones in pieces."""
    row: list[dict[str, list[int]]] = []
    room = most
    for path in sorted(folder.glob("*.txt")):
        tokens = tokenizer(path.read_text(encoding="utf-8"))["input_ids"] + [tokenizer.eos_token_id]
        for start in range(0, len(tokens), most):
            piece = tokens[start : start + most]
            if len(piece) > room:
                yield row
                row, room = [], most
            row.append({"input_ids": piece})
            room -= len(piece)
    if row:
        yield row


def main() -> None:
    """Trains. Rank 0 prints each step's loss and norm of gradients, and writes the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--context", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--tokens", type=int, default=131072, help="of a sequence, at most")
    parser.add_argument("--accumulate", type=int, default=1, help="sequences in a step, of a rank")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", default="bfloat16", help="what layers compute in")
    options = parser.parse_args()

    dist.init_process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_data, left = divmod(dist.get_world_size(), options.context)
    if left:
        parser.error(f"--context: must divide the {dist.get_world_size()} ranks")
    shape = (num_data, options.context)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "context"))
    everyone = mesh["data", "context"]._flatten("everyone")

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    found = packed_rows(options.texts, tokenizer, options.tokens)
    # A rank has at least one token.
    rows = [row for row in found if sum(len(x["input_ids"]) for x in row) >= options.context]
    of_step = num_data * options.accumulate
    if len(rows) < of_step:
        parser.error(f"texts: {len(rows)} rows of {options.tokens} tokens, {of_step} for a step")
    collate = DataCollatorWithFlattening()  # documents in one row, each with positions from 0

    with burst_rt.init(group=mesh["context"]) as ctx:
        # The weights that are trained are float32; layers get copies in --dtype.
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.float32, attn_implementation="burst_rt"
        )
        burst_rt.hf.prepare(model, ctx)
        # Activations are computed again in the backward, but for attention's.
        keep = partial(create_selective_checkpoint_contexts, burst_rt.keep_attention)
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": keep})
        precision = MixedPrecisionPolicy(getattr(torch, options.dtype), reduce_dtype=torch.float32)
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=everyone, mp_policy=precision)
        fully_shard(model, mesh=everyone, mp_policy=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
        steps = options.epochs * (len(rows) // of_step)
        schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)

        model.train()
        for epoch in range(options.epochs):
            order = random.Random(epoch).sample(rows, len(rows))  # the same on all ranks
            for step in range(len(rows) // of_step):
                batches = [collate(row) for row in order[step * of_step :][:of_step]]
                labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
                mean = 0.0  # over all labels of the step
                for batch in batches[mesh.get_local_rank("data") :: num_data]:
                    batch["num_items_in_batch"] = labels
                    part = burst_rt.hf.shard(batch, ctx, group=everyone)
                    loss = model(**part, use_cache=False).loss
                    loss.backward()
                    mean += loss.item()
                norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                norm = norm.full_tensor().item()  # FSDP2's gradients are spread over the ranks
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if dist.get_rank() == 0:
                    print(f"epoch {epoch}, step {step}: loss {mean:.6f}, norm {norm:.6f}")

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=whole)
        if dist.get_rank() == 0:
            model.save_pretrained(options.out, state_dict=weights)
            tokenizer.save_pretrained(options.out)
    # A thread of gloo that frees the tensors of its last collective while Python ends aborts the
    # process; a barrier has none.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
