"""Perplexity on held-out text, the same number for a world of any size up to rounding.

For: measurements during a run, and of a checkpoint by itself (`burst-rt eval`). Not for: other
tasks than the next byte.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from burst_rt.context import Context
from burst_rt.launch.train.agreement import same_everywhere, together
from burst_rt.launch.train.data import Bytes, heldout_starts, load_corpus, sequences_at
from burst_rt.launch.train.mesh import Mesh, open_mesh
from burst_rt.launch.train.model import Decoder
from burst_rt.launch.train.restore import read_shared
from burst_rt.launch.train.sharded import ShardedDecoder

__all__ = ["Evaluation", "HeldoutLoss", "evaluate", "measure_heldout"]


@dataclass(frozen=True)
class HeldoutLoss:
    """Mean cross-entropy of a byte, in nats, over `num_tokens` of them."""

    loss: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2)


@torch.no_grad()
def measure_heldout(
    model: ShardedDecoder, mesh: Mesh, stream: Bytes, *, seq_len: int, limit: int
) -> HeldoutLoss:
    """Loss over at most `limit` (0: all) sequences of the held-out stream, which holds at least
    one. Collective over the mesh's world.
    """
    starts = heldout_starts(stream, seq_len, limit)
    total = torch.zeros(1, dtype=torch.float64, device=mesh.world.device)
    for index in mesh.share_of(len(starts)):
        total += model(*sequences_at(stream, [starts[index]], seq_len))
    mesh.world.all_reduce(total)
    num_tokens = len(starts) * seq_len
    return HeldoutLoss(total.item() / num_tokens, num_tokens)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What was measured: loss in nats a byte over `num_tokens` bytes; `same_text` says whether
    training held out the very same.
    """

    checkpoint: str
    step: int
    world_size: int
    data: str
    same_text: bool
    seq_len: int
    num_tokens: int
    loss: float
    perplexity: float
    bits_per_byte: float
    elapsed_s: float


def evaluate(world: Context, path: Path, options: Mapping[str, object]) -> Evaluation | None:
    """Measure the checkpoint that `path` means, its configuration changed by `options`; the result
    on rank 0, None elsewhere.

    Collective. Raises ConfigError or InputError, the same on every rank.
    """
    started_s = time.monotonic()
    shared = read_shared(world, path)
    config = together(world, lambda: shared.manifest.config.evaluated(options, world.world_size))
    corpus = together(world, lambda: load_corpus(config.data_path))
    same_everywhere(world, "the text that --data names", corpus.fingerprint)
    corpus.check_length(config.seq_len)
    with open_mesh(world, config.context_parallel) as mesh:
        decoder = Decoder(config.model, seed=config.seed).to(world.device)
        shared.fill(
            world, {name: parameter.detach() for name, parameter in decoder.named_parameters()}
        )
        model = ShardedDecoder(decoder, mesh.context, config.sharding)
        heldout = measure_heldout(
            model, mesh, corpus.heldout, seq_len=config.seq_len, limit=config.eval_sequences
        )
    if world.rank != 0:
        return None
    return Evaluation(
        checkpoint=str(shared.folder),
        step=shared.manifest.step,
        world_size=world.world_size,
        data=corpus.name,
        same_text=corpus.fingerprint == shared.manifest.corpus,
        seq_len=config.seq_len,
        num_tokens=heldout.num_tokens,
        loss=heldout.loss,
        perplexity=heldout.perplexity,
        bits_per_byte=heldout.bits_per_byte,
        elapsed_s=time.monotonic() - started_s,
    )
