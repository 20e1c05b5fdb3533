"""Where weights, gradients and an optimizer's states are: whole on each rank, or sharded (FSDP2).

`none`: all are whole on every rank. `zero1`: the states are sharded over all ranks; `zero2`: the
gradients, too; `fsdp`: the weights, too, as `fully_shard` of each layer and of the model does
(arXiv 1910.02054; arXiv 2304.11277). Up to `zero2` the gradients are summed once a backward, which
is as many bytes as a reduce-scatter and a gather of the new weights.

Under `fsdp` a layer's weights are gathered for its forward and again for its backward, and its
gradients are reduced and scattered, all in 16 bits. While a layer computes, the weights of the next
and the gradients of the last are on their way. In the steady state, as it is forecast here, these
are as many bytes as the layer's own.

Weights and gradients have 16 bits, and the optimizer has these besides:

* `adamw`: a float32 copy of the weights, and two moments in float32;
* `adamw-bf16`: two moments in bfloat16, as torch's AdamW has for a bfloat16 model;
* `adamw-8bit`: two moments of 8 bits, and a float32 scale for each 256 of them
  (bitsandbytes' `AdamW8bit`, arXiv 2110.02861);
* `sgd`: nothing.
"""

from __future__ import annotations

from math import ceil
from typing import Literal, NamedTuple, TypeAlias, get_args

__all__ = [
    "OPTIMIZERS", "SHARDS", "Optimizer", "Shard", "Travel", "held_bytes", "ring_bytes",
    "updated_weights",
]  # fmt: skip

Shard: TypeAlias = Literal["none", "zero1", "zero2", "fsdp"]
SHARDS: tuple[Shard, ...] = get_args(Shard)
_BYTES = 2  # a weight, or a gradient


class Optimizer(NamedTuple):
    """What an optimizer takes for each weight that it updates."""

    held: float  # bytes of its states
    moved: float  # bytes read and written in a step: gradient, weight, and states


_SCALED = 2 * (1 + 4 / 256)  # two moments of 8 bits, with their scales
OPTIMIZERS = {
    "adamw": Optimizer(12, 2 + 12 + 12 + 2),
    "adamw-bf16": Optimizer(4, 2 + (2 + 4) * 2),
    "adamw-8bit": Optimizer(_SCALED, 2 + (2 + _SCALED) * 2),
    "sgd": Optimizer(0, 2 + 2 * 2),
}


def updated_weights(shard: Shard, whole: int, ranks: int) -> int:
    """The weights, of `whole`, that a rank's optimizer updates."""
    return whole if shard == "none" else -(-whole // ranks)


def held_bytes(
    shard: Shard, layers: int, outside: int, largest: int, ranks: int, optimizer: str = "adamw"
) -> int:
    """Bytes of weights, gradients and states that a rank holds in training.

    layers, outside: the weights of all layers, and of embedding and head, that a rank would hold
    unsharded. largest: of one layer. ranks: that share them. optimizer: one of OPTIMIZERS.
    """
    whole = layers + outside
    part = -(-whole // ranks)
    states = ceil(OPTIMIZERS[optimizer].held * updated_weights(shard, whole, ranks))
    if shard == "none" or shard == "zero1":
        return states + 2 * _BYTES * whole
    if shard == "zero2":
        return states + _BYTES * (whole + part + largest)
    # The weights of this layer and of the next, the gradient of this one. What no layer has is
    # gathered for the whole step.
    return states + _BYTES * (2 * part + 3 * largest + 2 * outside)


class Travel(NamedTuple):
    """Bytes that a rank sends in a gather, or in a reduce-scatter: to its neighbour in the node,
    and to its counterpart in the next node.
    """

    near: int
    far: int


def ring_bytes(size: int, part: int, ranks: int, per_node: int) -> Travel:
    """What a rank sends so that every rank gets all of `size` bytes, of which each has a part.

    Rings of all ranks, as many as a node has ranks, each with a share of the bytes: so NCCL puts
    all cards of a node to use. part: of the rank that gets nothing from this one. per_node: 1 where
    nodes are not equally large; then there is one ring.
    """
    if per_node in (1, ranks):
        return Travel(size - part, 0)
    nodes = ranks // per_node
    return Travel(size * (per_node - 1) // per_node, size * (nodes - 1) // (nodes * per_node))
