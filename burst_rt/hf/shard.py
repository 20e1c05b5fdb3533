"""A batch of transformers, cut for one rank: keywords for a model's forward."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from burst_rt.attention.options import FULL
from burst_rt.attention.sharding import ContextLayout, LayerCosts
from burst_rt.batches import BATCH_NAMES, LOSS_WEIGHTS, TOKEN_TYPES, ShardedBatch, shard_batch
from burst_rt.context import Context, require_context
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.opaque import opaque
from burst_rt.planning.layouts import WHOLE
from burst_rt.planning.masks import Documents, Mask, PrefixTree
from burst_rt.runtime.refusing import refuse
from burst_rt.runtime.runtime import Runtime
from burst_rt.runtime.sums import RanksOrGroup

__all__ = ["KEYWORD", "ShardInfo", "shard"]

# The keyword of a model's forward that tells attention and loss how the batch is cut.
KEYWORD = "burst_rt"
# Names of arguments of kernels that are not used here; a packed batch brings them along.
_OF_KERNELS = ("max_length_q", "max_length_k", "seq_idx")
# Names of arguments that say which tokens are of one document.
_OF_DOCUMENTS = ("position_ids", "cu_seq_lens_q", "prefix_tree")
_DECODER = "decoder_"
# Name of the number of labelled tokens of a step: the loss is the sum over this number.
_NUMBER = "num_items_in_batch"


@opaque
@dataclass(eq=False)
class ShardInfo:
    """How a batch is cut, for the attention function and the loss."""

    ctx: Context
    batch: ShardedBatch
    group: RanksOrGroup  # whose tokens the loss is a mean of
    # The other input of a decoder's attention: its encoder's batch, and the tokens that are not
    # padding.
    encoder: ShardedBatch | None = None
    unpadded: Mask = FULL
    # The types of the whole batch's tokens, by name: which of them are of one image.
    token_types: Mapping[str, torch.Tensor] = field(default_factory=dict)
    # The hooks (`rotary.PositionHook`) of the prepared models that were called with it.
    told: set[object] = field(default_factory=set)
    # The balancing loss of experts: whose tokens it is of, if not group's; this rank's share of it;
    # whether it has been computed.
    balanced_in: RanksOrGroup | None = None
    balanced_share: float = 1.0
    balanced: bool = False
    attended: bool = False  # whether any layer has attended with it
    excused: bool = False  # whether another check covers the case that no layer has attended

    def __del__(self) -> None:
        """Warns of a part with which no layer has attended, except after an error.

        A call of a prepared model attends, or ends with an error.
        """
        ended = bool(self.told) or getattr(sys, "last_type", None) is not None
        said = self.attended or self.excused or ended
        if not said and self.ctx.world_size > 1 and not sys.is_finalizing():
            warnings.warn(
                "burst_rt.hf.shard: a part of a batch is gone, and no layer has attended by it: a "
                "model that was called with it has seen one rank's tokens alone. Load every model "
                "with attn_implementation='burst_rt', and call burst_rt.hf.prepare(model, ctx)",
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardInfo:
        return self  # wrappers copy a model's arguments

    @property
    def past(self) -> int:
        """See `temperature.rescaled`: a batch has no cache."""
        return 0

    @cached_property
    def places(self) -> torch.Tensor:
        """See `temperature.rescaled`."""
        places = self.batch.layout.positions()[None]
        mask = self.batch.mask
        if isinstance(mask, PrefixTree):
            return torch.from_numpy(mask.path_positions(places.cpu().numpy())).to(places.device)
        if isinstance(mask, Documents):
            begins = np.where(mask.counts[:, None] > 1, mask.begins(places[0].cpu().numpy()), 0)
            places = places - torch.from_numpy(begins).to(places.device)
        return places

    @cached_property
    def begins(self) -> torch.Tensor | None:
        """Where documents begin among this rank's tokens, bool `[batch or 1, tokens]`; a row's
        first token after padding begins one. None where nothing is packed or padded.
        """
        mask, layout = self.batch.mask, self.batch.layout
        if not isinstance(mask, Documents):
            return None
        positions = layout.positions()
        begins = mask.begins(positions.cpu().numpy())
        return torch.from_numpy(begins).to(positions.device) == positions

    @cached_property
    def documents(self) -> PrefixTree | torch.Tensor | None:
        """What recurrences follow: a tree without its windows, or where documents begin."""
        mask = self.batch.mask
        return mask.unlimited if isinstance(mask, PrefixTree) else self.begins

    def largest(self, position_ids: torch.Tensor) -> int:
        """The largest position of all ranks, of the sequence that these are positions of."""
        batches = [self.batch, *([self.encoder] if self.encoder else [])]
        batch = next((batch for batch in batches if position_ids is batch.position_ids), self.batch)
        return max(batch.largest_positions)


class _Models(NamedTuple):
    """The models that were prepared for a context."""

    attend: bool  # whether any has softmax attention
    costs: LayerCosts  # the last model's


# By the runtimes of the contexts with which `prepare` was called.
_prepared: weakref.WeakKeyDictionary[Runtime, _Models] = weakref.WeakKeyDictionary()


def set_prepared(ctx: Context, attends: bool, costs: LayerCosts) -> None:
    """Says that a model of such layers was prepared for a context: from now on it has parts."""
    before = _prepared.get(ctx.runtime)
    _prepared[ctx.runtime] = _Models(attends or (before is not None and before.attend), costs)


def shard(
    batch: Mapping[str, Any],
    ctx: Context,
    layout: str | ContextLayout = "auto",
    *,
    group: RanksOrGroup | None = None,
    check: bool = True,
) -> dict[str, Any]:
    """This rank's part of a batch, as keywords: `model(**shard(batch, ctx))`.

    Every rank of the context gives the same batch, as for one process. The model was given to
    `prepare` before. Collective, and blocks as `Context.all_reduce` does; with check=False local.

    batch: what `burst_rt.shard_batch` takes. Other values pass unchanged if they are not tensors,
        or are tensors without dimensions. Among these, num_items_in_batch is a number above 0, the
        same on every rank, and is compared. For encoder-decoders: input_ids and attention_mask of
        the encoder, decoder_input_ids, decoder_attention_mask, and labels, which are the decoder's
        and not shifted.
    layout: as in `burst_rt.shard_batch`; a layout object for models without an encoder only. "auto"
        takes "contiguous" where no model that was prepared has softmax attention: all tokens are
        equal work then, and states go from rank to rank once.
    group: the ranks whose tokens the loss is a mean of: all over which gradients are averaged. As
        in `burst_rt.mean_over_ranks`. None: the context's.
    check: as in `burst_rt.shard_batch`: whether ranks compare their batches.

    Returns the batch's own names with this rank's tokens, shift_labels (shifted before the cut),
    position_ids, and `burst_rt`, without which the attention function refuses a call. The model's
    loss is then the mean over all labelled tokens of all ranks, on every rank: DDP, FSDP2 or
    `burst_rt.average_gradients` make every rank's gradients the gradients of that loss.

    Raises as `burst_rt.shard_batch` does, and InputError where no model was prepared for ctx.
    """
    require_context(ctx, "hf.shard")
    if ctx.world_size > 1 and ctx.runtime not in _prepared:
        error = InputError(
            "hf.shard: expected a model that was prepared for this context, got none yet; call "
            "burst_rt.hf.prepare(model, ctx) once, which says what ranks would get wrong"
        )
        refuse("hf.shard", error, ctx.runtime)
    if not isinstance(batch, Mapping):
        error = InputError(f"hf.shard: batch: expected tensors by name, got {type(batch).__name__}")
        refuse("hf.shard", error, ctx.runtime)
    tensors, others = _by_token(batch)
    numbers = batch.get("seq_idx")
    if (
        isinstance(numbers, torch.Tensor)
        and not any(batch.get(name) is not None for name in _OF_DOCUMENTS)
        and (numbers != numbers[..., :1]).any()
    ):
        error = InputError(
            "hf.shard: seq_idx: expected documents to be told by position_ids or cu_seq_lens_q and "
            "_k, too, as attention goes by these, got seq_idx alone; let the collator return them"
        )
        refuse("hf.shard", error, ctx.runtime)
    if _NUMBER in others:
        _check_number(others[_NUMBER], ctx, check)
    ranks = ctx if group is None else group
    if any(name.startswith(_DECODER) for name in tensors):
        return {**others, **_shard_both(tensors, ctx, layout, ranks, check)}
    known = _prepared.get(ctx.runtime)
    if layout == "auto" and known and not known.attend:
        layout = "contiguous"
    costs = known.costs if known and layout == WHOLE else None
    cut = shard_batch(tensors, ctx, layout, costs=costs, check=check)
    types = {name: tensors[name].to(ctx.device) for name in TOKEN_TYPES if name in tensors}
    info = ShardInfo(ctx, cut, ranks, token_types=types)
    return {**others, **_tagged(_named(cut), info), KEYWORD: info}


def _by_token(batch: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What is cut by tokens, and what is handed on as it is."""
    tensors: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    for name, x in batch.items():
        if name not in _OF_KERNELS:
            per_token = name.removeprefix(_DECODER) in BATCH_NAMES and x is not None
            is_tensor = isinstance(x, torch.Tensor) and x.ndim > 0 and name != _NUMBER
            spread = per_token or is_tensor
            (tensors if spread else others)[name] = x
    return tensors, others


class _Labels(torch.Tensor):
    """Labels that were cut: what they are a part of goes with them, and torch's own losses, whose
    means would be one rank's, refuse them.
    """

    info: weakref.ref[ShardInfo]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Views and copies are labels too; all else is a plain tensor."""
        name = getattr(func, "__name__", "")
        labels = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)), None)
        if name in _LOSSES and labels is not None:
            _refuse_loss(name, labels)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if name in _KEPT and labels is not None and isinstance(result, torch.Tensor):
            return _labels(result, labels.info)
        return result

    def plain(self) -> torch.Tensor:
        """The labels as a plain tensor, for `burst_rt.cross_entropy`. Raises InputError if no layer
        has attended.
        """
        info = self.info()
        if info is not None:
            require_attended(info)
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Labels:
        return self.clone()  # type: ignore[return-value]  # by the above


# Names of the losses of torch.nn.functional by which torch's modules compute theirs.
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits")
_KEPT = ("to", "long", "view", "reshape", "flatten", "contiguous", "clone", "__getitem__")


def _labels(x: torch.Tensor, info: weakref.ref[ShardInfo]) -> _Labels:
    labels = x.as_subclass(_Labels)
    labels.info = info
    return labels


def _refuse_loss(name: str, labels: _Labels) -> NoReturn:
    info = labels.info()
    error = InputError(
        f"loss: expected a model that asks transformers for its loss, got one that calls torch's "
        f"{name}, whose mean would be that of one rank's tokens; call it without labels (after "
        "burst_rt.hf.prepare(model, ctx, loss=False) where it is to be prepared), and compute "
        "burst_rt.cross_entropy of its logits"
    )
    refuse("loss", error, info.ctx.runtime if info else None)


def require_attended(info: ShardInfo) -> None:
    """Raises InputError, on every rank that waits for this one, where no layer has attended."""
    if info.attended or info.ctx.world_size == 1:
        return
    info.excused = True
    error = InputError(
        "hf: expected attention over ranks, got a model none of whose layers has asked burst_rt "
        "for it: its tokens would see one rank's alone; load it with attn_implementation="
        "'burst_rt', or give each sequence one rank"
    )
    refuse("hf", error, info.ctx.runtime)


def was_cut(labels: object) -> bool:
    """Whether labels were cut by `shard`: some models do not hand the keyword on to their loss."""
    return isinstance(labels, _Labels)


def info_of(labels: object) -> ShardInfo:
    """The part of the batch to which these labels belong."""
    info = labels.info() if isinstance(labels, _Labels) else None
    if info is None:
        raise InputError(
            "loss: labels: expected those of the part that the model was called with; got labels "
            "of a part that is gone; keep what burst_rt.hf.shard returns until the loss is known"
        )
    return info


def _tagged(keywords: dict[str, torch.Tensor], info: ShardInfo) -> dict[str, torch.Tensor]:
    ref = weakref.ref(info)
    return {name: _labels(x, ref) if "labels" in name else x for name, x in keywords.items()}


def _check_number(number: Any, ctx: Context, check: bool) -> None:
    """Raises InputError unless num_items_in_batch is above 0, and ContractMismatch, on every rank,
    where ranks have others. Collective with check.
    """
    try:
        value = float(number)
    except (TypeError, ValueError):
        value = math.nan
    shape = getattr(number, "shape", ())
    if not 0 < value < math.inf or isinstance(number, (str, bytes)) or shape:
        error = InputError(
            "hf.shard: num_items_in_batch: expected the number of labelled tokens of the step, "
            f"above 0; got {number!r}{', which is no single number' if shape else ''}"
        )
        refuse("hf.shard", error, ctx.runtime)
    if check:
        values = ctx.all_gather(value)
        if len(set(values)) > 1:  # as every rank sees
            raise ContractMismatch(
                "hf.shard: num_items_in_batch: expected the same on all ranks of a context, got "
                f"{values} by rank; count the labelled tokens of the whole batch"
            )


def _named(batch: ShardedBatch) -> dict[str, torch.Tensor]:
    tensors = {**batch.tensors, "position_ids": batch.position_ids}
    tensors.pop(LOSS_WEIGHTS, None)  # the loss finds them in the batch
    labels = batch.shift_labels
    return tensors if labels is None else {**tensors, "shift_labels": labels}


def _shard_both(
    tensors: dict[str, torch.Tensor],
    ctx: Context,
    layout: str | ContextLayout,
    ranks: RanksOrGroup,
    check: bool,
) -> dict[str, Any]:
    """The two sequences of an encoder-decoder."""
    _refuse_packed(tensors, ctx, layout)
    of_encoder, of_decoder = {}, {}
    for name, x in tensors.items():
        if name == "labels":  # not shifted: the decoder's inputs are
            of_decoder["shift_labels"] = x
        elif _DECODER in name:
            of_decoder[name.removeprefix(_DECODER)] = x
        else:
            of_encoder[name] = x
    encoder = shard_batch(of_encoder, ctx, layout, check=check)
    decoder = shard_batch(of_decoder, ctx, layout, check=check)
    keywords = {f"{_DECODER}{name}": x for name, x in _named(decoder).items()}
    keywords.pop(f"{_DECODER}labels", None)
    labels = keywords.pop(f"{_DECODER}shift_labels", None)
    if labels is not None:
        keywords["labels"] = labels
    padding = tensors.get("attention_mask")
    unpadded = FULL if padding is None else _unpadded(padding, decoder.layout.seq_len)
    info = ShardInfo(ctx, decoder, ranks, encoder=encoder, unpadded=unpadded)
    return {**_named(encoder), **_tagged(keywords, info), KEYWORD: info}


def _refuse_packed(
    tensors: Mapping[str, torch.Tensor], ctx: Context, layout: str | ContextLayout
) -> None:
    """Raises InputError, on every rank, for what one of two sequences alone could have."""
    packing = [
        name for name in tensors if any(x in name for x in ("position_ids", "cu_seq", "tree"))
    ]
    if packing or isinstance(layout, ContextLayout):
        got = f"{packing[0]}: got packed documents" if packing else "layout: got a layout object"
        error = InputError(
            f"hf.shard: {got}, for a model with an encoder, whose two sequences differ; expected "
            "none, with padding by attention_mask and decoder_attention_mask, and a kind of layout"
        )
        refuse("hf.shard", error, ctx.runtime)


def _unpadded(padding: torch.Tensor, num_queries: int) -> Mask:
    """The mask of an encoder's tokens: every query sees the tokens of each row that are not
    padding.
    """
    shown = padding.cpu() != 0
    before = (shown.cumsum(1) == 0).sum(1).tolist()
    counts = shown.sum(1).tolist()
    return Documents(
        q_lengths=[[0, num_queries, 0] for _ in counts],
        kv_lengths=[
            [first, count, shown.shape[1] - first - count]
            for first, count in zip(before, counts, strict=True)
        ],
    )
