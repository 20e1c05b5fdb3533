"""What the layers of a step were called with: one record for all layers called alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from burst_rt.kernels import ScoreOptions
from burst_rt.kernels.decode import SeenColumns
from burst_rt.planning.masks import Mask
from burst_rt.serving.decode_plan import DecodePlan

__all__ = ["LayerCall", "calls_in_words"]


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """A call of `Step.attend` that was checked.

    It serves all layers of the step that are called in the same way: to check each of them would
    take longer than a small task.
    """

    words: str  # what all ranks must have said
    structure: Mask  # what queries see of the cache
    score_options: ScoreOptions  # but for sinks, which are each layer's own
    decode: tuple[DecodePlan, SeenColumns] | None  # None: the tokens are spread


def calls_in_words(called: Sequence[tuple[int, LayerCall]]) -> str:
    """The layers of a step in the order of their calls, and what each was called with."""
    groups = []
    for words, group in groupby(called, lambda layer_and_call: layer_and_call[1].words):
        layers = [layer for layer, _ in group]
        first, last = layers[0], layers[-1]
        in_order = len(layers) > 1 and layers == list(range(first, last + 1))
        told = f"{first} to {last}" if in_order else ", ".join(map(str, layers))
        groups.append(f"layer{'s' * (len(layers) > 1)} {told}: {words}")
    return "; ".join(groups)
