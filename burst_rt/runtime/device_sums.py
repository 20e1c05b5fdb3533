"""Sums of large tensors on devices: a ring of messages between the devices themselves.

The control group would take them through the host's memory. A tensor is summed in pieces of one
size: so one graph does for all of them, and little memory is needed beside the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch

from burst_rt.runtime.collectives import all_reduce, even_parts
from burst_rt.runtime.pipeline import Pipeline, make_pipeline
from burst_rt.runtime.runtime import Runtime
from burst_rt.scheduler import Graph, GraphBuilder, Schedule

__all__ = ["goes_between_devices", "piece_bytes", "sum_between_devices"]

# The size of a piece, but at least so much for each rank: shorter messages take their latency.
_PIECE_BYTES, _A_RANK_BYTES = 64 << 20, 4 << 20
# Fewer bytes are summed sooner by the control group, in one message.
_FROM_BYTES = 1 << 20
_KEPT = 8  # sizes of pieces whose rings are kept

# By the number of elements and their bytes: the schedule of a ring, and the digest of all ranks'.
_Rings = dict[tuple[int, int], tuple[Schedule, str]]
_rings: WeakKeyDictionary[Runtime, _Rings] = WeakKeyDictionary()


def piece_bytes(world_size: int) -> int:
    """Bytes of the pieces in which so many ranks sum."""
    return max(_PIECE_BYTES, _A_RANK_BYTES * world_size)


def goes_between_devices(runtime: Runtime, x: torch.Tensor) -> bool:
    """Whether x is large, and on a device whose memory messages carry; the same on every rank."""
    on_device = x.device.type == "cuda" and not runtime.machine.choice.staged
    return on_device and runtime.world_size > 1 and x.nbytes >= _FROM_BYTES


def sum_between_devices(runtime: Runtime, x: torch.Tensor, words: Mapping[str, str]) -> None:
    """Sums a contiguous tensor over the ranks, in place. Every rank gets the same bits.

    words: the call, which the ranks compare for each piece. Blocks and raises as `Pipeline.run`
    does. A rank sends 2 (W-1)/W of the tensor's bytes, and has two slots of a W-th of a piece.
    """
    rings = _rings.setdefault(runtime, {})
    for piece in x.detach().view(-1).split(piece_bytes(runtime.world_size) // x.itemsize):
        key = (len(piece), x.itemsize)
        if key not in rings:
            while len(rings) >= _KEPT:
                del rings[next(iter(rings))]
            made = make_pipeline(runtime, lambda rank, key=key: _ring(runtime, rank, *key))  # type: ignore[misc]
            rings[key] = made.schedule, made.fingerprint
        Pipeline(runtime, *rings[key], words).run(buffers={"x": piece}, ops={})


def _ring(runtime: Runtime, rank: int, count: int, itemsize: int) -> Graph:
    world = runtime.world_size
    g = GraphBuilder(rank, world, runtime.machine.lanes)
    sizes = [itemsize * part for part in even_parts(count, world)]
    all_reduce(g, g.buffer("x", parts=world, size_bytes=sizes, initialised=True))
    return g.build()
