"""Where weights, gradients and AdamW's states are: whole on every rank, or a part of each (FSDP2).

`none`: all are whole on every rank. `zero1`: the states are sharded over all ranks; `zero2`: the
gradients, too; `fsdp`: the weights, too, as `fully_shard` of each layer and of the model does
(arXiv 1910.02054; arXiv 2304.11277). Up to `zero2` the gradients are summed once a backward, which
is as many bytes as a reduce-scatter and a gather of the new weights.

Under `fsdp` a layer's weights are gathered for its forward and again for its backward, and its
gradients are reduced and scattered, all in 16 bits. While a layer computes, the weights of the next
and the gradients of the last are on their way. In the steady state, as it is forecast here, these
are as many bytes as the layer's own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, get_args

__all__ = ["SHARDS", "Shard", "Travel", "held_bytes", "ring_bytes"]

Shard: TypeAlias = Literal["none", "zero1", "zero2", "fsdp"]
SHARDS: tuple[Shard, ...] = get_args(Shard)
_BYTES = 2  # a weight, or a gradient
_ADAMW_BYTES = 12  # a float32 weight and two moments


def held_bytes(shard: Shard, layers: int, outside: int, largest: int, ranks: int) -> int:
    """Bytes of weights, gradients and states that a rank holds in training.

    layers, outside: the weights of all layers, and of embedding and head, that a rank would hold
    unsharded. largest: of one layer. ranks: that share them.
    """
    whole = layers + outside
    part = -(-whole // ranks)
    states = _ADAMW_BYTES * (whole if shard == "none" else part)
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
