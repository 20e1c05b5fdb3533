"""TRL's GRPOTrainer whose log-probabilities are computed over all ranks, as one row of trees.

Each process answers its own questions, as TRL deals them out. For the policy's log-probabilities
all processes' sequences become one row, in which what they share is computed once; its tokens go
over the ranks. Losses, gradients and weights are those of TRL alone.

    torchrun --nproc-per-node 2 examples/grpo_trl.py
"""

import functools
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor

import burst_rt.hf
from burst_rt import Causal, Context, init, sum_over_ranks, tree_row


class TreeGRPOTrainer(trl.GRPOTrainer):  # type: ignore[misc]  # Any
    """context: the ranks of all processes. Tried with TRL 1.16, text and dense models."""

    def __init__(self, *args: Any, context: Context, **options: Any) -> None:
        super().__init__(*args, **options)
        self._context = context
        burst_rt.hf.prepare(self.model, context)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int,
        batch_size: int | None = None, compute_entropy: bool = False, **others: Any,
    ) -> tuple[Tensor, Tensor | None, None]:  # fmt: skip
        """Of this process's rows `[rows, logits_to_keep]`, by a call of all processes."""
        given = [name for name, value in others.items() if value not in (None, False)]
        if given:
            raise ValueError(f"expected text and a dense model, got {given}")
        own = [
            ids[shown == 1].tolist() for ids, shown in zip(input_ids, attention_mask, strict=True)
        ]
        of_ranks: list[list[list[int]]] = self._context.all_gather(own)
        row = tree_row([sequence for each in of_ranks for sequence in each])
        tokens = row.input_ids.shape[1]
        layout = self._context.layout(tokens, "balanced", mask=Causal() & row.tree)
        part = burst_rt.hf.shard(row.batch(), self._context, layout)
        self.model.set_attn_implementation("burst_rt")
        with self.accelerator.autocast():
            outputs = model(**part, fused_lm_head=True)
        self.model.set_attn_implementation("sdpa")  # each process generates by itself
        # Every process gets every token's numbers; the backward sums what became of them.
        found = torch.stack([outputs.log_probs[0], outputs.entropy[0]])
        whole = found.new_zeros(2, tokens).index_copy(1, layout.positions(), found)
        whole = sum_over_ranks(whole, group=self._context)
        # A token's numbers are at the token before it.
        first = sum(map(len, of_ranks[: self._context.rank]))
        shown = attention_mask[:, -logits_to_keep:] == 1
        kept = found.new_zeros(2, *shown.shape)
        for i, (where, count) in enumerate(zip(row.places[first:], shown.sum(1), strict=False)):
            kept[:, i, shown[i]] = whole[:, where[len(where) - 1 - count : -1].to(whole.device)]
        return kept[0], kept[1] if compute_entropy else None, None


def make_model() -> tuple[Any, Any]:
    """A small model of 62 words, and its tokenizer."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *map(str, range(62))])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>", eos_token="<eos>",
    )  # fmt: skip
    transformers.set_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), tokenizer


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """How many of an answer's words are even."""
    return [sum(word % 2 == 0 for word in answer) / len(answer) for answer in completion_ids]


def losses_of(make: Any, folder: str) -> tuple[list[float], Tensor]:
    """The losses of some steps, and the weights after them."""
    model, tokenizer = make_model()
    draw = torch.Generator().manual_seed(0)
    questions = torch.randint(62, (8, 30), generator=draw).tolist()
    trainer = make(
        model=model, processing_class=tokenizer, reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [" ".join(map(str, x)) for x in questions]}),
        args=trl.GRPOConfig(
            folder, per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
            max_steps=4, num_iterations=2, learning_rate=1e-2, seed=3, bf16=False,
            use_cpu=not torch.cuda.is_available(), logging_steps=1, report_to="none",
            save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return losses, torch.cat([x.detach().flatten().cpu() for x in model.parameters()])


def main(folder: str) -> None:
    """A comparison with TRL alone."""
    alone, expected = losses_of(trl.GRPOTrainer, folder)
    with init() as ctx:
        trees, found = losses_of(functools.partial(TreeGRPOTrainer, context=ctx), folder)
    if dist.get_rank() == 0:
        print(f"losses {trees}, of TRL alone {alone}")
        print(f"weights differ by {float((found - expected).abs().max()):.1e} at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/grpo")
