"""Llama 4's attention temperature: queries that grow with the logarithm of their place.

Its layers without rotary positions scale a query at place i by
1 + attn_scale * log(1 + floor((i + 1) / floor_scale)) (`Llama4TextAttention.forward`), so that
nothing changes before place floor_scale - 1. They count places by themselves, from 0 on every rank.
Queries are rescaled here, before they attend, to the places that they have.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["rescale_queries"]


class _CallInfo(Protocol):
    """How a call is cut: `shard.ShardInfo`, or `cache.StepInfo`."""

    @property
    def past(self) -> int:
        """Tokens that the model believes to be in front of this rank's."""

    @property
    def places(self) -> torch.Tensor:
        """`[batch or 1, tokens]`: the places of this rank's tokens, as one process counts them."""


def rescale_queries(module: torch.nn.Module, query: torch.Tensor, info: _CallInfo) -> torch.Tensor:
    """Queries `[batch, heads, tokens, head_dim]` of one rank, scaled by their own places.

    The queries of other models are returned unchanged. In packed rows places count within their
    document, as if the document were alone; in others from the row's first token, padding included.
    """
    layer: Any = module
    if type(layer).__name__ != "Llama4TextAttention":
        return query
    if layer.use_rope or not layer.attn_temperature_tuning:
        return query
    counted = info.past + torch.arange(query.shape[2], device=query.device)
    ratio = _scale(layer, info.places.to(query.device)) / _scale(layer, counted)
    return (query * ratio[:, None, :, None]).to(query.dtype)


def _scale(layer: Any, places: torch.Tensor) -> torch.Tensor:
    steps = torch.floor((places.float() + 1) / layer.floor_scale)
    scale: torch.Tensor = 1 + torch.log1p(steps) * layer.attn_scale
    return scale
