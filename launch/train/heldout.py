"""Perplexity on held-out text, the same number for a world of any size. For: the end of a run, and `burst-rt eval`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from burst_rt.launch.train.data import Bytes, heldout_starts, sequences_at
from burst_rt.launch.train.mesh import Mesh
from burst_rt.launch.train.sharded import ShardedDecoder

__all__ = ["HeldoutLoss", "measure_heldout"]


@dataclass(frozen=True)
class HeldoutLoss:
    """Mean cross-entropy of a byte, in nats, over `num_tokens` of them."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2)


@torch.no_grad()
def measure_heldout(model: ShardedDecoder, mesh: Mesh, stream: Bytes, *, seq_len: int, limit: int) -> HeldoutLoss:
    """Loss over at most `limit` (0: all) sequences of the held-out stream, which holds at least one. Collective over the mesh's world."""
    starts = heldout_starts(stream, seq_len, limit)
    total = torch.zeros(1, dtype=torch.float64, device=mesh.world.device)
    for index in mesh.share_of(len(starts)):
        total += model(*sequences_at(stream, [starts[index]], seq_len))
    mesh.world.all_reduce(total)
    num_tokens = len(starts) * seq_len
    return HeldoutLoss(total.item() / num_tokens, num_tokens)
