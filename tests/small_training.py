"""A small training run: a decoder with learned sinks, four sequences, and its steps' losses.

On one process without burst_rt (`alone`), and on ranks (`train`), however the model is spread over
them. The numbers of tokens divide by nothing, and tokens without a label are dealt unevenly, so
sums that belong to somebody else show. Gradients that are too large or too small show too: nothing
but AdamW hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import burst_rt
from burst_rt import Context
from burst_rt.launch.train.config import ModelConfig
from burst_rt.launch.train.model import Attend, Decoder
from burst_rt.rotary import rotations
from burst_rt.runtime.connections import Group

__all__ = [
    "DEVICE", "STEPS", "TOKENS", "MakeOptimizer", "Stage", "adamw", "alone", "make_decoder",
    "sequences", "sgd", "train", "train_by_rows",
]  # fmt: skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the ranks
STEPS = 12
TOKENS = 75
_SEQUENCES, _PROMPT = 4, 20
_CONFIG = ModelConfig(layers=2, dim=32, heads=4, kv_heads=2)

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
sgd: MakeOptimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw: MakeOptimizer = partial(torch.optim.AdamW, lr=0.01)


def make_decoder() -> Decoder:
    """The decoder as all processes begin with it."""
    decoder = Decoder(_CONFIG, seed=3)
    for block in decoder.blocks:
        # Sinks that take most of the weight: with gradients of twice the size losses are off by
        # 1e-3.
        attention = block.get_submodule("attention")
        attention.sinks = nn.Parameter(torch.full((_CONFIG.heads,), 4.0))
        attention.register_forward_pre_hook(_give_sinks)
    return decoder.to(DEVICE)


def _give_sinks(attention: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an attention's forward, the last of which attends."""
    *others, attend = args
    sinks = attention.sinks.to_local() if isinstance(attention.sinks, DTensor) else attention.sinks
    return (*others, partial(attend, sinks=sinks))


def sequences(part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Tokens and labels `[sequences, tokens]` of whole sequences; a prompt has no labels."""
    generator = torch.Generator().manual_seed(4)
    text = torch.randint(_CONFIG.vocab_size, (_SEQUENCES, TOKENS + 1), generator=generator)
    tokens, labels = text[:, :-1].to(DEVICE), text[:, 1:].to(DEVICE, copy=True)
    labels[:, :_PROMPT] = -100
    return tokens[part], labels[part]


@cache
def alone(make_optimizer: MakeOptimizer) -> list[float]:
    """The losses of one process, with torch's own attention and torch's own mean."""
    model = make_decoder().cpu()
    optimizer = make_optimizer(model.parameters())
    tokens, labels = (x.cpu() for x in sequences())
    losses = []
    for _ in range(STEPS):
        scores = model(tokens, torch.arange(TOKENS), _attend_alone)
        loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _attend_alone(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor, sinks: Tensor) -> Tensor:
    """A sink is one more key for every query: its score is the sink, its value is 0."""
    q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSGE, v_BSGE))
    k, v = (functional.pad(x, (0, 0, 1, 0)) for x in (k, v))
    later_HSS = torch.full((TOKENS, TOKENS), -torch.inf).triu(1).expand(len(sinks), -1, -1)
    bias_HST = torch.cat((sinks[:, None, None].expand(-1, TOKENS, 1), later_HSS), -1)
    attend = functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=bias_HST, enable_gqa=True).transpose(1, 2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ctx: Context,
    group: Group | None,
    part: slice = slice(None),
    steps: int = STEPS,
) -> list[float]:
    """The losses of `steps` steps on a part of the sequences, their tokens spread over `ctx`.

    group: the ranks that share all sequences and tokens.
    """
    layout = ctx.layout(TOKENS)
    attend = partial(burst_rt.burst_attention, causal=True, layout=layout)
    tokens, labels = (layout.shard(x) for x in sequences(part))
    found = []
    for _ in range(steps):
        scores = model(tokens, layout.positions(), attend)
        losses = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none")
        loss = burst_rt.mean_over_ranks(losses, labels.flatten() != -100, group=group)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_by_rows(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ctx: Context,
    group: Group,
    part: slice,
    dp: dist.ProcessGroup,
) -> list[float]:
    """`train`, each sequence a micro-batch. dp: the ranks that have the other sequences."""
    layout = ctx.layout(TOKENS)
    attend = partial(burst_rt.burst_attention, causal=True, layout=layout)
    tokens, labels = (layout.shard(x) for x in sequences(part))
    count = (sequences(part)[1] != -100).sum()
    dist.all_reduce(count, group=dp)
    found = []
    for _ in range(STEPS):
        total = 0.0
        for row in range(len(tokens)):
            scores = model(tokens[row, None], layout.positions(), attend)
            loss = burst_rt.cross_entropy(scores[0], labels[row], group=group, count=count)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found


class Stage(nn.Module):
    """One of `num_stages` stages of a decoder with a block a stage, for tokens at `positions_S`."""

    def __init__(
        self, decoder: Decoder, index: int, num_stages: int, positions_S: Tensor, attend: Attend
    ) -> None:
        super().__init__()
        first, last = index == 0, index == num_stages - 1
        self.embed = decoder.embed if first else nn.Identity()
        self.block = decoder.blocks[index]
        self.norm = decoder.norm if last else nn.Identity()
        self.head = decoder.head if last else nn.Identity()
        config = decoder.config
        self._turns = [
            part.float() for part in rotations(positions_S, config.head_dim, config.rope_theta)
        ]
        self._attend = attend

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.block(x, *self._turns, self._attend)
        scores: Tensor = self.head(self.norm(x))
        return scores
