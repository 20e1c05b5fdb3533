"""The model: a small byte-level language model, split over ranks, and how its weights move.

The model has the shape of Llama: RMSNorm, rotary positions, SwiGLU, grouped key/value heads.
`Decoder` is a plain torch module that knows nothing of ranks. It takes attention as a function and
positions as global positions, so the same module runs on a whole sequence or on any rank's part of
one. `ShardedModel` is any model over ranks, `ShardedDecoder` this one, by burst_rt's public parts,
as your own program would do it. Every rank holds all weights and makes the same updates; optimizer
state is not sharded, and keys and values are not cached.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.adamw import adamw

from burst_rt import average_gradients, burst_attention, checkpoint, cross_entropy, shard_batch
from burst_rt.context import Context
from burst_rt.launch.train.config import ModelConfig, TrainConfig
from burst_rt.rotary import rotate, rotations

__all__ = [
    "AdamW",
    "Attend",
    "AveragedGradients",
    "Decoder",
    "ShardedDecoder",
    "ShardedModel",
    "learning_rate",
]  # fmt: skip

# Takes q, k, v as [batch, tokens, heads, head_dim] (k and v may have fewer heads), returns the
# output in q's shape.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
# The tensors of AdamW's state: one of each for every parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Final learning rate as a part of its peak.
_FLOOR = 0.1


class Decoder(nn.Module):
    """Bytes in, a score for every possible next byte out."""

    def __init__(
        self, config: ModelConfig, *, seed: int, checkpoint_activations: bool = False
    ) -> None:
        """Build the model on the CPU in fp32; the same seed gives the same weights everywhere, so
        ranks need not exchange them. `checkpoint_activations`: whether the activations of each
        block but attention's outputs are computed again in the backward.
        """
        super().__init__()
        self.config = config
        self._checkpoint_activations = checkpoint_activations
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._initialise(seed)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor, attend: Attend) -> Tensor:
        """Scores [batch, tokens, vocab_size] for the byte after each of `tokens_BS` (int64).

        `positions_S` are the tokens' global positions (int64), in the order of the tokens; `attend`
        must be causal in them.
        """
        cos_SF, sin_SF = (
            part.float()
            for part in rotations(positions_S, self.config.head_dim, self.config.rope_theta)
        )
        x_BSD = self.embed(tokens_BS)
        for block in self.blocks:
            run = partial(checkpoint, block) if self._checkpoint_activations else block
            x_BSD = run(x_BSD, cos_SF, sin_SF, attend)
        scores: Tensor = self.head(self.norm(x_BSD))
        return scores

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            parameter.normal_(0.0, self._std(name, fan_in=parameter.shape[1]), generator=generator)

    def _std(self, name: str, *, fan_in: int) -> float:
        """Standard deviation of a matrix's first weights."""
        if name == "embed.weight":
            return 0.5
        # Matrices that add to the residual stream start smaller, so that the stream's variance does
        # not grow with the depth.
        writes_residual = name.endswith(("out.weight", "down.weight"))
        return 1 / math.sqrt(fan_in * (2 * self.config.layers if writes_residual else 1))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_SF: Tensor, sin_SF: Tensor, attend: Attend) -> Tensor:
        q_BSHE = self.query(x_BSD).unflatten(-1, (-1, self.head_dim))
        k_BSGE = self.key(x_BSD).unflatten(-1, (-1, self.head_dim))
        v_BSGE = self.value(x_BSD).unflatten(-1, (-1, self.head_dim))
        o_BSHE = attend(rotate(q_BSHE, cos_SF, sin_SF), rotate(k_BSGE, cos_SF, sin_SF), v_BSGE)
        y_BSD: Tensor = self.out(o_BSHE.flatten(-2))
        return y_BSD


class _FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.up = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.down = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD: Tensor = self.down(functional.silu(self.gate(x_BSD)) * self.up(x_BSD))
        return y_BSD


class _Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = _Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = _FeedForward(config)

    def forward(self, x_BSD: Tensor, cos_SF: Tensor, sin_SF: Tensor, attend: Attend) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SF, sin_SF, attend)
        y_BSD: Tensor = x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
        return y_BSD


class ShardedModel(nn.Module, ABC):
    """A model over the ranks of `context`; each rank holds all weights and a part of each
    sequence.
    """

    def __init__(self, module: nn.Module, context: Context, config: TrainConfig) -> None:
        """Lay sequences of `config.seq_len` tokens over the ranks. `module` has the weights."""
        super().__init__()
        self.module = module.to(context.device)
        self._context = context
        self._config = config
        self._layout = context.layout(config.seq_len, kind=config.layout)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor, group: Context) -> Tensor:
        """Mean cross-entropy (fp32 scalar, summed in fp64) of the tokens of all ranks of `group`,
        in nats, on every rank; gradients are as `burst_rt.cross_entropy` says.

        Takes whole sequences, int64, the same on every rank of the context. Labels are already
        shifted. Collective over `group`; blocks and raises as `burst_attention` does.
        """
        batch = {"input_ids": tokens_BS, "shift_labels": labels_BS}
        device = self._context.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=self._config.dtype == "bfloat16"):
            return self._loss(batch, group)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @abstractmethod
    def _loss(self, batch: dict[str, Tensor], group: Context) -> Tensor: ...


class ShardedDecoder(ShardedModel):
    """A decoder over the ranks of a context."""

    def _loss(self, batch: dict[str, Tensor], group: Context) -> Tensor:
        part = shard_batch(batch, self._context, self._layout)
        assert part.shift_labels is not None  # the batch has them
        scores_BSV = self.module(part.input_ids, part.position_ids[0], self._attend)
        return cross_entropy(scores_BSV, part.shift_labels, group=group)

    def _attend(self, q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor) -> Tensor:
        out_BSHE = burst_attention(
            q_BSHE, k_BSGE, v_BSGE,
            causal=True, layout=self._layout, strategy=self._config.strategy,
        )  # fmt: skip
        assert isinstance(out_BSHE, Tensor)  # lse was not asked for
        return out_BSHE


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Rate of step `step` (from 0): linear to `peak` over `warmup` steps, then half a cosine down
    to a tenth of it.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


class AdamW:
    """AdamW (0.9, 0.95) of a model whose gradients are there. Only matrices decay.

    torch's update, without `torch.optim.AdamW` around it: to make one loads torch's compiler, a
    second of CPU on every rank.
    """

    def __init__(self, model: nn.Module, *, weight_decay: float) -> None:
        parameters = dict(model.named_parameters())
        # Made now, not at the first step, so that every rank has tensors to receive a checkpoint
        # into.
        self.moments = {
            f"{moment}.{name}": torch.zeros_like(parameter, requires_grad=False)
            for name, parameter in parameters.items()
            for moment in _MOMENTS
        }
        self._num_steps = {name: torch.tensor(0.0, device="cpu") for name in parameters}
        matrices = {name: p for name, p in parameters.items() if p.dim() >= 2}
        others = {name: p for name, p in parameters.items() if p.dim() < 2}
        self._groups = ((matrices, weight_decay), (others, 0.0))

    def resume(self, step: int) -> set[str]:
        """Goes on after `step` steps, whose moments are there. Returns the names of the weights
        that these have moved.
        """
        for count in self._num_steps.values():
            count.fill_(step)
        return {name for name in self._num_steps if self.moments[f"exp_avg_sq.{name}"].any()}

    @torch.no_grad()
    def step(self, lr: float, trained: Collection[str]) -> None:
        """Moves these weights. Those that no token has reached, such as a vision tower's, stay."""
        for group, weight_decay in self._groups:
            parameters = {name: p for name, p in group.items() if name in trained}
            adamw(
                list(parameters.values()),
                [p.grad for p in parameters.values() if p.grad is not None],
                [self.moments[f"exp_avg.{name}"] for name in parameters],
                [self.moments[f"exp_avg_sq.{name}"] for name in parameters],
                max_exp_avg_sqs=[],
                state_steps=[self._num_steps[name] for name in parameters],
                amsgrad=False, beta1=0.9, beta2=0.95, lr=lr, weight_decay=weight_decay, eps=1e-8,
                maximize=False,
            )  # fmt: skip


class AveragedGradients:
    """The gradients of a model's parameters, each a view of one tensor, `flat`:
    `burst_rt.average_gradients` reduces it without a copy. Backward adds to it in place, so no
    gradient may be set to None.

    trained: the names of the parameters that have had a gradient on some rank.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        sizes = [p.numel() for p in named.values()]
        device = next(iter(named.values())).device
        whole = torch.zeros(sum(sizes) + len(sizes), dtype=torch.float32, device=device)
        # Behind the gradients: which parameters had one. It goes from rank to rank with them.
        self.flat, had = whole.split([sum(sizes), len(sizes)])
        self._had = nn.Parameter(torch.zeros(len(sizes), device=device))
        self._had.grad = had
        self._here: set[int] = set()
        for number, (p, part) in enumerate(
            zip(named.values(), self.flat.split(sizes), strict=True)
        ):
            p.grad = part.view_as(p)
            p.register_post_accumulate_grad_hook(partial(self._note, number))
        self._names, self._parameters = list(named), [*named.values(), self._had]
        self.trained: set[str] = set()

    def zero(self) -> None:
        """Before each step."""
        self.flat.zero_()
        self._here.clear()

    def average(self, group: Context) -> None:
        """`burst_rt.average_gradients`, after the backward."""
        assert self._had.grad is not None
        here = [float(number in self._here) for number in range(len(self._names))]
        self._had.grad.copy_(torch.tensor(here, device="cpu"))
        average_gradients(self._parameters, group=group)
        shares = zip(self._names, self._had.grad.tolist(), strict=True)
        self.trained.update(name for name, share in shares if share)

    def _note(self, number: int, _: Tensor) -> None:
        self._here.add(number)
