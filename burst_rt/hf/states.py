"""The states of a model's recurrent and convolutional layers, while it generates over ranks.

They are small, and every rank has all of them. A step that is spread over the ranks ends with the
state after its last token on every rank; in other steps every rank runs all new tokens
(`mixers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TypeAlias

import torch

from burst_rt.planning.layouts import Layout

__all__ = ["LayerStates", "States", "dealt_layout"]

# A layer, and how many times it was called in the step before.
_CallOfLayer: TypeAlias = tuple[torch.nn.Module, int]


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
    """The states of all layers, by their modules; those of a step count from its end.

    A layer that is called several times in a step has states for each of these calls.
    """

    def __init__(self) -> None:
        self._kept: dict[_CallOfLayer, dict[str, torch.Tensor]] = {}
        self._new: dict[_CallOfLayer, dict[str, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        """Whether a layer has states in this step."""
        return bool(self._new)

    def of(self, layer: torch.nn.Module) -> LayerStates:
        """The states of one layer in its next call of a step."""
        call = next((layer, n) for n in count() if (layer, n) not in self._new)
        return LayerStates(self._kept.get(call, {}), self._new.setdefault(call, {}))

    def begin(self) -> None:
        """Begins a step, and forgets what one that was interrupted has found."""
        self._new = {}

    def commit(self, counts: Sequence[int] | None = None) -> None:
        """Ends a step. counts: new tokens of each row, where rows differ; one without any keeps
        the state that it had.
        """
        if counts is not None and not all(counts):
            had = torch.tensor(counts, device="cpu") > 0
            for call, states in self._new.items():
                before = self._kept.get(call, {})
                for name, state in states.items():
                    shown = had.view(-1, *[1] * (state.ndim - 1)).to(state.device)
                    states[name] = state.where(shown, before.get(name, torch.zeros_like(state)))
        self._kept = self._kept | self._new

    def copy(self, row: int, batch: int, source: States, source_row: int) -> None:
        """Row `row` of `batch` becomes row `source_row` of other states."""
        kept = dict[_CallOfLayer, dict[str, torch.Tensor]]()
        for call, states in (self._kept | source._kept).items():
            kept[call] = {}
            for name, state in states.items():
                shape = (batch, *state.shape[1:])
                rows = self._kept.get(call, {}).get(name, state.new_zeros(shape))
                taken = source._kept.get(call, {}).get(name, torch.zeros_like(rows))
                # Not in place: what was made in inference mode is not changed outside of it.
                at = torch.tensor([row], device=rows.device)
                source_at = source_row if call in source._kept else row
                kept[call][name] = rows.index_copy(0, at, taken[source_at][None])
        self._kept = kept

    def forget(self) -> None:
        """Forgets all tokens."""
        self._kept, self._new = {}, {}

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        for states in self._kept.values():
            for name, state in states.items():
                states[name] = state.index_select(0, rows.to(state.device))


class LayerStates:
    """The states of one layer by name, as `burst_rt.recurrence` has them: "conv", "recurrent"."""

    def __init__(self, before: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> None:
        self._before, self._new = before, new

    def get(self, name: str) -> torch.Tensor | None:
        """The state before the step; None before all tokens."""
        return self._before.get(name)

    def put(self, name: str, state: torch.Tensor) -> None:
        """The state after the step."""
        self._new[name] = state
