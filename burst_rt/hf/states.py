"""The states of a model's recurrent and convolutional layers, while it generates over ranks.

They are small, and every rank has all of them. A step that is spread over the ranks ends with the
state after its last token on every rank (`mixers.py`). In other steps every rank runs all new
tokens through transformers' own layer, to which a `LayerStates` is a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from burst_rt.planning.layouts import Layout

__all__ = ["LayerStates", "States", "dealt_layout"]


def dealt_layout(before: int, tokens: int, block: int, world_size: int) -> Layout:
    """Which new tokens each rank has, where positions are dealt out in blocks, in turn.

    before: number of tokens that are cached.
    """
    end, runs = before + tokens, [[range(0)] for _ in range(world_size)]
    for number in range(before // block, -(-end // block)):
        first, last = max(before, number * block), min(end, (number + 1) * block)
        runs[number % world_size].append(range(first - before, last - before))
    digest = f"blocks of {block} from {before} on"
    return Layout("dealt", tokens, world_size, tuple(map(tuple, runs)), digest)


class States:
    """The states of all layers, by their number; those of a step count from its end."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._new: dict[int, dict[str, torch.Tensor]] = {}

    def of(self, layer: int) -> LayerStates:
        """The states of one layer in a step."""
        return LayerStates(self._kept.get(layer, {}), self._new.setdefault(layer, {}))

    def begin(self) -> None:
        """Begins a step, and forgets what one that was interrupted has found."""
        self._new = {}

    def commit(self) -> None:
        """Ends a step."""
        self._kept = self._kept | self._new

    def forget(self) -> None:
        """Forgets all tokens."""
        self._kept, self._new = {}, {}

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        for states in self._kept.values():
            for name, state in states.items():
                states[name] = state.index_select(0, rows.to(state.device))


class LayerStates:
    """The states of one layer: by name, and as what transformers' layers ask of a cache.

    "conv": `[batch, channels, taps - 1]`, the tokens before. "recurrent": as the layer's recurrence
    has it.
    """

    def __init__(self, before: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
        self._before, self._new = before, new

    def get(self, name: str) -> torch.Tensor | None:
        """The state before the step; None before all tokens."""
        return self._before.get(name)

    def put(self, name: str, state: torch.Tensor) -> None:
        """The state after the step."""
        self._new[name] = state

    def _updated_in_place(self, name: str) -> torch.Tensor | None:
        state = self.get(name)
        if state is not None:
            self.put(name, state.clone())
        return self._new.get(name)

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """The tokens before, which layers may replace in place."""
        return self._updated_in_place("conv")

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """The state before, which layers may replace in place."""
        return self._updated_in_place("recurrent")

    def update_conv_state(
        self, new: torch.Tensor, *_: Any, conv_kernel_size: int, **__: Any
    ) -> torch.Tensor:
        """The tokens before, if any, and the new ones `[batch, channels, tokens]`."""
        before, least = self.get("conv"), conv_kernel_size - 1
        tokens = new if before is None else torch.cat([before.to(new.dtype), new], -1)
        missing = max(0, least - tokens.shape[-1])
        self.put("conv", torch.nn.functional.pad(tokens, (missing, 0))[..., -least:].clone())
        return tokens

    def update_recurrent_state(self, new: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Keeps the state after the new tokens."""
        self.put("recurrent", new)
        return new

    def is_recording_past(self, *_: Any) -> bool:
        """False: states are not taken back."""
        return False
