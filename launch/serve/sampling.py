"""Which token comes next, and how likely it was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from burst_rt.errors import ConfigError
from burst_rt.launch.generate.loop import sample

__all__ = ["Chosen", "Sampler"]


class Chosen(NamedTuple):
    """A token, and the natural logarithm of its probability; `likely` has the likeliest tokens."""

    token: int
    logprob: float
    likely: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How a request chooses its tokens, in the protocol's words.

    top_k: 0 for all tokens. num_likely: how many of the likeliest tokens are told; None: neither
    these nor the chosen one's probability.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    num_likely: int | None = None

    def choose(self, scores_V: Tensor, generator: torch.Generator) -> Chosen:
        """The next token by these scores. Raises ConfigError where they are not numbers."""
        scores_V = scores_V.float()
        drawn_V = scores_V
        if 0 < self.top_k < len(scores_V):
            least = scores_V.topk(self.top_k).values[-1]
            drawn_V = scores_V.masked_fill(scores_V < least, -torch.inf)
        token = sample(drawn_V, temperature=self.temperature, top_p=self.top_p, generator=generator)
        if token < 0:
            raise ConfigError(
                "the model's scores are not numbers: its weights are damaged, or too large for "
                "--dtype; try --dtype float32."
            )
        if self.num_likely is None:
            return Chosen(token, 0.0)
        logs_V = scores_V.log_softmax(0)
        best = logs_V.topk(min(self.num_likely, len(logs_V)))
        likely = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Chosen(token, float(logs_V[token]), tuple(likely))
