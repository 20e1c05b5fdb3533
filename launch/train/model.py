"""A small byte-level language model in the shape of Llama: RMSNorm, rotary positions, SwiGLU,
grouped key/value heads.

For: the main job and its tests. Plain torch modules, nothing of MPI: the attention comes in as a
function, and positions come in as global positions, so the same module runs on a whole sequence or
on any rank's part of one.
Not for: serving (no cache of keys and values), or speed records.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from burst_rt.launch.train.config import ModelConfig
from burst_rt.rotary import rotate, rotations

__all__ = ["Attend", "Decoder"]

# Takes q, k, v as [batch, tokens, heads, head_dim] (k and v may have fewer heads), returns the
# output in q's shape.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Decoder(nn.Module):
    """Bytes in, a score for every possible next byte out."""

    def __init__(self, config: ModelConfig, *, seed: int) -> None:
        """Build the model on the CPU in fp32; the same seed gives the same weights everywhere, so
        ranks need not exchange them.
        """
        super().__init__()
        self.config = config
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
            x_BSD = block(x_BSD, cos_SF, sin_SF, attend)
        scores: Tensor = self.head(self.norm(x_BSD))
        return scores

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

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
        # What adds to the residual stream starts smaller, so that its variance does not grow with
        # the depth.
        writes_residual = name.endswith(("out.weight", "down.weight"))
        return 1 / math.sqrt(fan_in * (2 * self.config.layers if writes_residual else 1))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BSD: Tensor, cos_SF: Tensor, sin_SF: Tensor, attend: Attend) -> Tensor:
        q_BSHE = self.query(x_BSD).unflatten(-1, (self.heads, self.head_dim))
        k_BSGE = self.key(x_BSD).unflatten(-1, (self.kv_heads, self.head_dim))
        v_BSGE = self.value(x_BSD).unflatten(-1, (self.kv_heads, self.head_dim))
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
