"""What a rank holds of a model: weights, gradients, an optimizer's states, activations, caches."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

from burst_rt.launch.plan.layers import TENSOR_PARALLEL, LayerMemory, SpreadLayer
from burst_rt.launch.plan.models import sizes_of
from burst_rt.launch.plan.question import ACTIVATIONS, Activations, Question
from burst_rt.launch.plan.shards import held_bytes

__all__ = ["INPUT_BYTES", "Layers", "held_at_least", "memory_of", "outside_of", "weight_ranks"]

INPUT_BYTES = 2  # an activation, a weight, or a gradient
# How many layers of each kind a stage has, and the kind spread over the stage's ranks.
Layers: TypeAlias = list[tuple[int, SpreadLayer]]


def held_at_least(question: Question, strategy: str) -> int:
    """Bytes that a rank holds on however many ranks, in weights, gradients and states."""
    model = question.model
    if strategy in TENSOR_PARALLEL:
        return 0
    inside = (model.num_weights - model.outside) // (question.tensor * question.pipeline)
    outside = max(0, model.outside) // min(2, question.pipeline)
    if question.phase != "train":
        return INPUT_BYTES * (inside + outside)
    largest = max(sizes_of(layer).num_weights for _, layer in model.layers) // question.tensor
    return held_bytes(question.shard, inside, outside, largest, 1 << 40, question.optimizer)


def memory_of(
    question: Question, layers: Layers, limit: int, *, working: bool = True
) -> tuple[int, Activations | None]:
    """Bytes of the worst rank, and what becomes of activations: what was asked, or what fits.

    working: False leaves out what attention and the products hold for a while.
    """
    training = question.phase == "train"
    first = layers[0][1]
    rank = max(range(first.num_spread), key=first.rows)
    held = [layer.memory(rank, backward=training, working=working) for _, layer in layers]
    held_with = partial(_memory_bytes, question, layers, rank, held)
    if not training:
        return held_with(None), None
    *larger, smallest = ACTIVATIONS
    fitting = (name for name in larger if held_with(name) <= limit)
    taken = question.activations or next(fitting, smallest)
    return held_with(taken), taken


def _memory_bytes(
    question: Question,
    layers: Layers,
    rank: int,
    held: list[LayerMemory],
    activations: Activations | None,
) -> int:
    """Bytes of a rank. held: the bytes of a layer of each kind. activations: None for the first
    token.
    """
    counts = [count for count, _ in layers]
    outside = outside_of(question, layers)
    num_weights = _total(counts, (one.weights // INPUT_BYTES for one in held)) + outside
    working = max(one.working for one in held)
    if activations is None:
        # The caches, and what goes from layer to layer.
        cached = _total(counts, (layer.cached_bytes(rank) for _, layer in layers))
        passing = max(one.activations for one in held)
        return num_weights * INPUT_BYTES + cached + passing + working
    largest = max(one.weights // INPUT_BYTES for one in held)
    inside, ranks = num_weights - outside, weight_ranks(layers)
    states = held_bytes(question.shard, inside, outside, largest, ranks, question.optimizer)
    kept = [one.activations for one in held]
    if activations != "kept":
        with_attention = activations == "attention kept"
        kept = [layer.checkpointed_bytes(rank, attention=with_attention) for _, layer in layers]
    # One layer's activations are all there while its backward runs.
    whole = max(one.activations - each for one, each in zip(held, kept, strict=True))
    in_flight = min(question.pipeline, question.micro_batches)
    return states + in_flight * _total(counts, kept) + whole + working


def outside_of(question: Question, layers: Layers) -> int:
    """The weights outside of all layers on a rank: of the first stage, the embedding alone."""
    first, outside = layers[0][1], question.model.outside
    share = first.share if first.tensor_parallel else min(2, question.pipeline)
    return outside // share


def weight_ranks(layers: Layers) -> int:
    """The ranks over which the same weights are sharded."""
    first = layers[0][1]
    return first.num_ranks // (first.share if first.tensor_parallel else 1)


def _total(counts: Iterable[int], sizes: Iterable[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
