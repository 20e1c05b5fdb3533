"""A batch of transformers, cut for one rank: keywords for a model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from burst_rt.attention.sharding import ContextLayout
from burst_rt.batches import ShardedBatch, shard_batch
from burst_rt.context import Context
from burst_rt.errors import InputError
from burst_rt.planning.masks import Mask
from burst_rt.runtime.mean import RanksOrGroup
from burst_rt.runtime.refusing import refuse

__all__ = ["KEYWORD", "Part", "shard"]

# The keyword of a model's forward that tells attention and loss how the batch is cut.
KEYWORD = "burst_rt"
# Arguments of kernels that are not used here; a packed batch brings them along.
_OF_KERNELS = ("max_length_q", "max_length_k", "seq_idx")
_DECODER = "decoder_"


@dataclass(eq=False)
class Part:
    """How a batch is cut, for the attention function and the loss."""

    ctx: Context
    batch: ShardedBatch
    # What a decoder attends to beside itself: its encoder's batch.
    encoder: ShardedBatch | None
    group: RanksOrGroup  # whose tokens the loss is a mean of
    # Whether rotary embeddings were told the largest position of all ranks (`prepare`).
    told: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Part:
        return self  # wrappers copy a model's arguments


def shard(
    batch: Mapping[str, Any],
    ctx: Context,
    layout: str | ContextLayout = "auto",
    *,
    group: RanksOrGroup | None = None,
) -> dict[str, Any]:
    """This rank's part of a batch, as keywords: `model(**shard(batch, ctx))`.

    Every rank of the context gives the same batch, as for one process. Local: nothing is sent,
    unless an argument is wrong.

    batch: what `burst_rt.shard_batch` takes. What is no tensor, and tensors of no dimension
        (num_items_in_batch), pass unchanged. For encoder-decoders: input_ids and attention_mask of
        the encoder, decoder_input_ids, decoder_attention_mask, and labels of the decoder, which
        are the decoder's and not shifted.
    layout: as in `burst_rt.shard_batch`; a layout object for models without an encoder only.
    group: the ranks whose tokens the loss is a mean of: all over which gradients are averaged. As
        in `burst_rt.mean_over_ranks`. None: the context's.

    Returns the batch's own names with this rank's tokens, shift_labels (shifted before the cut),
    position_ids, and `burst_rt`, without which the attention function refuses a call. The model's
    loss is then the mean over all labelled tokens of all ranks, on every rank: DDP, FSDP2 or
    `burst_rt.average_gradients` make every rank's gradients those of that loss.

    Raises InputError, on every rank that waits for this one.
    """
    tensors = {
        name: x
        for name, x in batch.items()
        if name not in _OF_KERNELS and isinstance(x, torch.Tensor) and x.ndim
    }
    others = {
        name: x for name, x in batch.items() if name not in tensors and name not in _OF_KERNELS
    }
    decoder = {
        name.removeprefix(_DECODER): tensors.pop(name)
        for name in list(tensors)
        if name.startswith(_DECODER)
    }
    ranks = ctx if group is None else group
    if not decoder:
        part = shard_batch(tensors, ctx, layout)
        found = {**others, **part.tensors, "position_ids": part.position_ids}
        if part.shift_labels is not None:
            found["shift_labels"] = part.shift_labels
        return {**found, KEYWORD: Part(ctx, part, None, ranks)}
    if "labels" in tensors:
        decoder["shift_labels"] = tensors.pop("labels")
    if isinstance(layout, ContextLayout):
        error = InputError(
            "hf.shard: layout: expected a kind for a model with an encoder, whose two sequences "
            "may differ in length; got a layout object"
        )
        refuse("hf.shard", error, ctx.runtime)
    encoded = shard_batch(tensors, ctx, layout)
    part = shard_batch(decoder, ctx, layout)
    own = {f"{_DECODER}{name}": x for name, x in part.tensors.items() if name != "labels"}
    own[f"{_DECODER}position_ids"] = part.position_ids
    if part.shift_labels is not None:
        own["labels"] = part.shift_labels
    return {
        **others,
        **encoded.tensors,
        "position_ids": encoded.position_ids,
        **own,
        KEYWORD: Part(ctx, part, encoded, ranks),
    }


def combined(structure: Mask, batch: ShardedBatch) -> Mask:
    """What a layer's own mask and the batch's documents and padding show together."""
    return structure if batch.mask is None else structure & batch.mask
