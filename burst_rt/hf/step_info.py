"""How one call of a model with a cache over ranks is cut, for the layers that attend and mix.

`AskingStep` takes the place of a step in a call of which nothing is cached: it sees what layers
would keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from burst_rt.attention.sharding import ContextLayout
from burst_rt.context import Context
from burst_rt.hf.states import States
from burst_rt.opaque import opaque
from burst_rt.serving.step import Step

__all__ = ["ASKING_ERRORS", "AskingStep", "StepInfo"]

# What a model raises whose layers ask a cache for something that it does not have.
ASKING_ERRORS = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError)


@opaque
@dataclass(eq=False)
class StepInfo:
    """One call of a model with a cache, for the attention function. See `shard.ShardInfo`."""

    ctx: Context
    step: Step | AskingStep
    position_ids: torch.Tensor  # position ids of this rank's tokens
    past: int  # tokens of each sequence that are cached, left padding included
    places: (
        torch.Tensor
    )  # `[batch, tokens]`: places of this rank's tokens in their sequence, padding included
    largest_position: int  # largest position of all ranks' tokens
    layers: dict[int, int]  # numbers of layers that attend, as `step` counts them
    # The states of recurrent layers; which of the new tokens each rank has, in a spread step; and
    # the left padding of the rows. Models without such layers need none.
    states: States | None = None
    layout: ContextLayout | None = None
    padding: tuple[int, ...] = ()
    # The number of the layer that gave the cache its keys and values, and attends next.
    current: int | None = None
    # The hooks of the models that were called with it (`rotary.PositionHook`).
    told: set[object] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> StepInfo:
        return self  # wrappers copy a model's arguments

    def largest(self, position_ids: torch.Tensor) -> int:
        """The largest position of all ranks' tokens."""
        return self.largest_position

    @cached_property
    def begins(self) -> torch.Tensor | None:
        """Where rows begin after padding, bool `[batch, tokens]`; None where they have none."""
        if not any(self.padding):
            return None
        return self.places == torch.tensor(self.padding, device=self.places.device)[:, None]

    def attending(self) -> int | None:
        """The layer that attends now, as `step` counts it; None where it gave the cache no keys."""
        layer, self.current = self.current, None
        return None if layer is None else self.layers[layer]

    def wrong_positions(self, given: torch.Tensor | None) -> str | None:
        """Why these are not the positions of this rank's tokens, in words."""
        if given is None or given is self.position_ids or torch.equal(given, self.position_ids):
            return None
        return "position_ids: expected those of the cache's step, got others in a layer"


class _Numbers(dict[int, int]):
    """Numbers in the order in which they are asked for."""

    def __missing__(self, key: int) -> int:
        return self.setdefault(key, len(self))


class AskingStep:
    """See the module. layers: the numbers of the layers that attend, as a step counts them."""

    num_tokens = 1

    def __init__(self) -> None:
        self.layers: dict[int, int] = _Numbers()
        self._shapes: set[tuple[int, int, int, torch.dtype]] = set()

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """Sees the keys and values that attention gets; zeros for a result. See `Step.attend`."""
        self._shapes.add((*k.shape[2:], v.shape[3], k.dtype))
        return v.new_zeros(*q.shape[:3], v.shape[3])

    def refuses(self, name: str, keeps_states: bool) -> str | None:
        """Why a model of this name has no cache over ranks, in words."""
        if not self._shapes and not keeps_states:
            return (
                "expected layers that attend by transformers' attention functions, or keep states "
                f"of known kinds, got {name}, none of whose layers does; generate on one process"
            )
        if len(self._shapes) > 1:
            return (
                f"expected layers of {name} that keep tensors of one shape, got (kv heads, "
                f"head_dim, v_head_dim, dtype) of {sorted(map(str, self._shapes))}"
            )
        return None

    def shape(self) -> dict[str, Any]:
        """The arguments of a `KVCache` that fits the layers."""
        heads, head_dim, v_head_dim, dtype = next(iter(self._shapes), (1, 1, 1, torch.float32))
        return {
            "num_layers": len(self.layers), "num_kv_heads": heads, "head_dim": head_dim,
            "v_head_dim": v_head_dim, "dtype": dtype,
        }  # fmt: skip
