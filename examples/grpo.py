"""Trains a policy by GRPO on answers that share their questions, over ranks, and compares.

Each question is computed once for all its answers: the answers of all questions are one row, a
forest of prefix trees. The same steps without burst_rt, sequence by sequence, check it.

    burst-rt run -n 4 examples/grpo.py
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import burst_rt.hf
from burst_rt import Causal, Context, average_gradients, init, mean_over_ranks, tree_row

WORDS, CLIP = 64, 0.2
Sequences = list[list[int]]


def make_policy() -> Any:
    """The same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def answers_of(prompts: Sequences) -> tuple[Sequences, list[int], list[float]]:
    """Four answers to each question, drawn: sequences, the questions' lengths, and advantages."""
    draw = torch.Generator().manual_seed(1)
    sequences: Sequences = []
    lengths: list[int] = []
    advantages: list[float] = []
    for prompt in prompts:
        sizes = torch.randint(5, 40, (4,), generator=draw).tolist()
        answers = [torch.randint(WORDS, (size,), generator=draw).tolist() for size in sizes]
        # A reward: how many of an answer's words are even.
        rewards = torch.tensor([sum(word % 2 == 0 for word in x) / len(x) for x in answers])
        sequences += [prompt + answer for answer in answers]
        lengths += [len(prompt)] * 4
        advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    return sequences, lengths, advantages


def losses_of(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """The loss of each token: the clipped ratio to the policy that answered, by the advantage."""
    ratio = (log_probs - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def log_probs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Those of the labels; of tokens without one, of word 0."""
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def train_tree(ctx: Context, prompts: Sequences, steps: int) -> list[float]:
    """The losses, over the ranks of ctx."""
    sequences, lengths, advantages = answers_of(prompts)
    labels = [[-100] * n + x[n:] for x, n in zip(sequences, lengths, strict=True)]
    # What predicts an answer is its own, as its advantage is: from the question's last token on.
    shared = [n - 1 for n in lengths]
    row = tree_row(sequences, labels, shared=shared)
    of_tokens = [
        [0.0] * n + [advantage] * (len(x) - n)
        for x, n, advantage in zip(sequences, shared, advantages, strict=True)
    ]
    if ctx.rank == 0:
        print(f"{sum(map(len, sequences))} tokens in a row of {row.input_ids.shape[1]}")
    policy = make_policy().to(ctx.device)
    policy.set_attn_implementation("burst_rt")
    burst_rt.hf.prepare(policy, ctx)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    layout = ctx.layout(row.input_ids.shape[1], "balanced", mask=Causal() & row.tree)
    targets, weights, scales = (
        layout.shard(x).to(ctx.device)
        for x in (row.shift_labels, row.loss_weights, row.spread(of_tokens))
    )
    old = None
    losses = []
    for _ in range(steps):
        logits = policy(**burst_rt.hf.shard(row.batch(), ctx, layout)).logits
        log_probs = log_probs_of(logits, targets)
        old = log_probs.detach() if old is None else old
        loss = mean_over_ranks(losses_of(log_probs, old, scales), weights, group=ctx)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(policy.parameters(), group=ctx)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_one_by_one(prompts: Sequences, steps: int) -> list[float]:
    """The losses in one process, without burst_rt."""
    sequences, lengths, advantages = answers_of(prompts)
    policy = make_policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    count = sum(len(x) - n for x, n in zip(sequences, lengths, strict=True))
    olds: list[Tensor] = []
    losses = []
    for _ in range(steps):
        total = torch.zeros(())
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            ids = torch.tensor([sequence])
            logits = policy(input_ids=ids).logits[:, length - 1 : -1]
            log_probs = log_probs_of(logits, ids[:, length:])
            if len(olds) == i:
                olds.append(log_probs.detach())
            total = total + losses_of(log_probs, olds[i], torch.tensor(advantages[i])).sum()
        loss = total / count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """The whole comparison, on every rank."""
    draw = torch.Generator().manual_seed(2)
    prompts = [torch.randint(WORDS, (size,), generator=draw).tolist() for size in (150, 90)]
    with init() as ctx:
        losses = train_tree(ctx, prompts, steps=5)
        for step, loss in enumerate(losses):
            if ctx.rank == 0:
                print(f"step {step}: loss {loss:.6f}")
        alone = ctx.first(lambda: train_one_by_one(prompts, steps=5))
        worst = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        if ctx.rank == 0:
            print(f"sequences one by one differ by {worst:.1e} at most")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
