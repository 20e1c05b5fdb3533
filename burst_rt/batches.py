"""A training batch over the ranks of a context: cut it, and add up what the ranks find.

Your own model needs three things besides `burst_attention`: this rank's part of the batch
(`shard_batch`), the loss over all ranks' tokens (`cross_entropy`), and gradients that are the same
on every rank (`average_gradients`, or DDP, or FSDP2). `burst_rt.hf` is built on the same three.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn import functional

from burst_rt.arguments import describe_value, holds_values
from burst_rt.attention.sharding import ContextLayout, LayerCosts, choose_layout
from burst_rt.context import Context
from burst_rt.errors import ContractMismatch, InputError
from burst_rt.planning.layouts import FOLLOWING
from burst_rt.planning.masks import (
    Causal,
    Chunked,
    Documents,
    Full,
    Mask,
    PrefixTree,
    SlidingWindow,
)
from burst_rt.runtime.objects import bytes_of
from burst_rt.runtime.refusing import refuse, refuse_kinds

__all__ = [
    "BATCH_NAMES",
    "IGNORED_LABEL",
    "LOSS_WEIGHTS",
    "TOKEN_TYPES",
    "ShardedBatch",
    "shard_batch",
]

_NAME = "shard_batch"
# Label of tokens without a loss, as in torch's cross_entropy.
IGNORED_LABEL = -100
# Names of tensors with one number a token, `[batch, tokens]`.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Numbers by which the losses of tokens count.
LOSS_WEIGHTS = "loss_weights"
_PER_TOKEN = (
    "input_ids", "labels", "shift_labels", LOSS_WEIGHTS, "attention_mask", *TOKEN_TYPES,
)  # fmt: skip
# A `PrefixTree`, the one value of a batch that is no tensor.
_TREE = "prefix_tree"
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k")
# Names of tensors with several numbers a token, `[batch, tokens, ...]`.
_VECTORS = ("inputs_embeds", "per_layer_inputs")
# All names that a batch's tensors may have.
BATCH_NAMES = (*_PER_TOKEN, "position_ids", *_VECTORS, *_PACKING, _TREE)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedBatch:
    """This rank's part of a batch. Tensors are on the context's device, in the layout's order.

    input_ids, inputs_embeds, labels, attention_mask, token_type_ids: this rank's tokens of what
        the batch held of these, and of per_layer_inputs, mm_token_type_ids and loss_weights; the
        others raise AttributeError. `labels` are cut, not shifted.
    position_ids: the tokens' positions, `[batch, tokens]`, or `[1, tokens]` where all rows have the
        same.
    shift_labels: the label of each token's successor, -100 where there is none, for
        `cross_entropy`. None in a batch without labels.
    num_labels: how many labelled tokens the whole batch has, on all ranks of the context, or the
        sum of their loss_weights: what `cross_entropy` divides by. 0 in a batch without labels.
        With micro-batches, their sum is the `count` of a step.
    mask: what packed documents and padding hide. It is not causal by itself: `Causal() & mask`.
    layout: which tokens each rank has. `burst_attention` must get this layout.
    tensors: these, by name.
    largest_positions: the largest of the whole batch's position_ids on each rank.
    places: by which number each token of the whole batch belongs to a chunk, `[1 or batch, tokens]`
        on the CPU; None where that is its index. See `chunks`.
    """

    layout: ContextLayout
    mask: Mask
    tensors: dict[str, torch.Tensor] = field(repr=False)
    position_ids: torch.Tensor = field(repr=False)
    shift_labels: torch.Tensor | None = field(repr=False)
    num_labels: float
    largest_positions: tuple[int, ...] = field(repr=False)
    places: np.ndarray[Any, np.dtype[np.int64]] | None = field(repr=False)
    _chunks: dict[int, Mask] = field(repr=False, default_factory=dict)

    def chunks(self, size: int) -> Mask:
        """A mask of chunks within documents: `Causal() & batch.chunks(8192)`, as Llama 4 has it.

        `Chunked(size)` counts in the whole row instead, and so cuts packed documents elsewhere.
        Here a chunk begins where transformers begins one: in packed rows where a position id is a
        multiple of size, in other rows every size tokens from the first that is not padding. Local.
        """
        mask = self._chunks.get(size)
        if mask is None:
            mask = self.mask.chunks(size) if isinstance(self.mask, PrefixTree) else Chunked(size)
            if isinstance(self.mask, Documents) and self.places is not None:
                mask = self.mask.chunks(size, self.places)
            self._chunks[size] = mask
        return mask

    def window(self, left: int, right: int = 0) -> Mask:
        """A mask of windows, as `SlidingWindow(left, right)` is, but along the paths of a tree.

        Local. Raises InputError for a limited window to the right in a tree: paths part there.
        """
        if not isinstance(self.mask, PrefixTree):
            return SlidingWindow(left, right)
        if right > 0:
            raise InputError(
                f"{_NAME}: window: expected right = 0, or -1 for no limit, in a prefix tree, got "
                f"{right}: paths part there"
            )
        along = self.mask.window(left)
        return along & Causal() if right == 0 else along

    def __getattr__(self, name: str) -> torch.Tensor:
        tensors: dict[str, torch.Tensor] = self.__dict__.get("tensors", {})
        if name in tensors:
            return tensors[name]
        raise AttributeError(f"this batch has no {name!r}: it has {', '.join(tensors)}")


@refuse_kinds
def shard_batch(
    batch: Mapping[str, torch.Tensor | PrefixTree],
    ctx: Context,
    layout: str | ContextLayout = "auto",
    *,
    costs: LayerCosts | None = None,
    check: bool = True,
) -> ShardedBatch:
    """Cuts a batch of whole sequences: this rank's tokens, their positions, labels and mask.

    Every rank of the context gives the same batch. Collective, and blocks as `Context.all_reduce`
    does; with check=False local.

    batch: names as transformers has them. Tensors `[batch, tokens]` on any device:
        input_ids (or inputs_embeds `[batch, tokens, width]`);
        labels: at each position the token at that position, as in input_ids. `shard_batch` shifts
            them, before the cut. A label of -100 has no loss. As in transformers, -100 is up to the
            caller: padding needs it, and so does the first token of each packed document, or the
            document before learns to predict it (`labels[position_ids == 0] = -100`);
        shift_labels: labels that are shifted already, instead of labels;
        attention_mask: 0 for padding, before or after the tokens of a row, 1 elsewhere;
        position_ids: also `[1, tokens]` or `[tokens]`. A document begins wherever a position
            is not one more than the position before it; padding does not count. A document sees
            only itself, with or without an attention_mask. None: 0, 1, 2 ... in every row;
        cu_seq_lens_q, cu_seq_lens_k: `[documents + 1]`, equal: a packed batch of one row by its
            documents' bounds, with no attention_mask or one that is 1 everywhere. They make the
            mask alone: without position_ids, positions go on from one document to the next, which
            is wrong for learned positions;
        loss_weights: by how much the shifted label at each position counts;
        prefix_tree: a `PrefixTree` of the row, in place of position_ids' documents, with
            shift_labels and one row, as `tree_row` makes all of them. Without position_ids,
            positions are those of the paths;
        token_type_ids, mm_token_type_ids;
        per_layer_inputs: `[batch, tokens, ...]`, beside inputs_embeds, as Gemma 4 takes them.
    layout: "auto" takes "zigzag", or "balanced" (under a causal mask) where documents or padding
        hide something. Or a kind of `Context.layout`, or a layout of this length. "whole" keeps
        documents together where that pays, and gives ranks different numbers of tokens.
    costs: for "whole": what a layer of the model has and costs.
    check: whether ranks compare checksums (CRC-32) of their batches. Tensors on a device are
        copied to the host for that.

    Raises InputError for a name that is not known, a shape that does not fit, or fewer tokens than
    ranks. The other ranks raise the same error in the call in which they wait for this rank. Raises
    ContractMismatch on every rank where check finds that batches differ.
    """
    try:
        sharded = _cut(dict(batch), ctx, layout, costs)
    except InputError as error:
        refuse(_NAME, error, ctx.runtime)
    if check:
        _check_same(batch, ctx)
    return sharded


def _check_same(batch: Mapping[str, Any], ctx: Context) -> None:
    checksum = 0
    for name, x in sorted(batch.items()):
        if name == _TREE:
            checksum = zlib.crc32(repr(x).encode(), checksum)
            continue
        checksum = zlib.crc32(f"{name} {tuple(x.shape)} {x.dtype}".encode(), checksum)
        checksum = zlib.crc32(bytes_of(x), checksum)
    checksums = ctx.all_gather(checksum)
    if len(set(checksums)) > 1:  # as every rank sees
        raise ContractMismatch(
            f"{_NAME}: expected the same batch on all ranks of a context, got others (checksums by "
            f"rank: {checksums}); give every rank the same rows, and what draws by chance a "
            "generator of its own, with the same seed on every rank"
        )


def _cut(
    batch: dict[str, Any], ctx: Context, layout: str | ContextLayout, costs: LayerCosts | None
) -> ShardedBatch:
    tree = batch.pop(_TREE, None)
    rows, tokens = _shape(batch)
    if tree is not None:
        _check_tree(tree, batch, rows, tokens)
    given = batch.pop("position_ids", None)
    if given is None and tree is not None:
        given = torch.from_numpy(tree.path_positions(np.arange(tokens)))
    positions = _positions(given, rows, tokens)
    mask = tree or _hidden(batch, positions.cpu().numpy(), tokens)
    layout = _layout(ctx, tokens, mask, layout, costs)
    for name in {"labels", "shift_labels"} & batch.keys():
        if not batch[name].is_floating_point():  # bytes have no room for -100
            batch[name] = batch[name].long()
    shift_labels = batch.pop("shift_labels", None)
    if shift_labels is None and "labels" in batch:
        shift_labels = functional.pad(batch["labels"], (0, 1), value=IGNORED_LABEL)[:, 1:]
    elif shift_labels is not None and "labels" not in batch:
        batch["labels"] = shift_labels

    def mine(x: torch.Tensor) -> torch.Tensor:
        return layout.shard(x).to(ctx.device)

    num_labels: float = 0
    if shift_labels is not None:
        weights = batch.get(LOSS_WEIGHTS)
        labelled = shift_labels != IGNORED_LABEL
        num_labels = int(labelled.sum()) if weights is None else float(weights[labelled].sum())
    largest = tuple(
        max(int(positions[:, run.start : run.stop : run.step].max()) for run in runs if run)
        for runs in layout.map.runs
    )
    return ShardedBatch(
        layout=layout,
        mask=mask,
        tensors={name: mine(x) for name, x in batch.items()},
        position_ids=mine(positions),
        shift_labels=None if shift_labels is None else mine(shift_labels),
        num_labels=num_labels,
        largest_positions=largest,
        places=_places(mask, positions.numpy()),
    )


def _check_tree(tree: Any, batch: dict[str, torch.Tensor], rows: int, tokens: int) -> None:
    if not isinstance(tree, PrefixTree):
        _wrong(_TREE, "a burst_rt.PrefixTree", f"got {type(tree).__name__}")
    if (tree.tokens, rows) != (tokens, 1):
        _wrong(_TREE, f"one of {tokens} tokens, and one row", f"got {tree!r}, and {rows} rows")
    if "labels" in batch:
        reason = "a token's successor on its path need not be the next token; see burst_rt.tree_row"
        _wrong(_TREE, "shift_labels", f"got labels: {reason}")
    others = [name for name in ("attention_mask", *_PACKING) if name in batch]
    if others:
        _wrong(others[0], f"none beside {_TREE}, which says which tokens are padding", "got some")


def _places(mask: Mask, positions: Any) -> Any:
    """See `ShardedBatch.places`; the places are counted as in transformers.

    transformers counts by position_ids where it sees packed documents, and then in all rows of a
    batch without padding; in other rows it counts by the index, from the first token that is not
    padding.
    """
    if not isinstance(mask, Documents):
        return None
    index = np.arange(positions.shape[1]) - mask.padding[:, None]
    packed = mask.counts > 1
    if not mask.padded:
        packed[:] = packed.any()
    return np.where(packed[:, None], positions, index)


def _shape(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Rows and tokens. Raises InputError for what is not known or does not fit."""
    for name, x in batch.items():
        if name not in BATCH_NAMES:
            _wrong(f"{name!r} is not known", f"some of {', '.join(BATCH_NAMES)}", "leave it out")
        if not isinstance(x, torch.Tensor):
            _wrong(name, "a tensor", f"got {type(x).__name__}")
        if not holds_values(x) or x.is_complex():
            _wrong(name, "a dense tensor of real numbers", f"got {describe_value(x)}")
    first = batch.get("input_ids", batch.get("inputs_embeds"))
    if first is None or first.ndim < 2:
        got = "neither" if first is None else f"shape {tuple(first.shape)}"
        _wrong("input_ids or inputs_embeds", "[batch, tokens]", f"got {got}")
    rows, tokens = first.shape[:2]
    if not rows:
        _wrong("input_ids or inputs_embeds", "at least a row", f"got shape {tuple(first.shape)}")
    for name in {*_PER_TOKEN, *_VECTORS}.intersection(batch):
        if batch[name].shape[: 2 if name in _VECTORS else None] != (rows, tokens):
            hint = "; labels of whole sequences cannot be cut" if name == "labels" else ""
            if hint and batch[name].ndim > 1:
                hint = "; an encoder-decoder's labels come with decoder_input_ids"
            got = f"got {tuple(batch[name].shape)}{hint}"
            _wrong(name, f"shape [batch, tokens] = {(rows, tokens)}", got)
    return rows, tokens


def _positions(given: torch.Tensor | None, rows: int, tokens: int) -> torch.Tensor:
    """`[1 or batch, tokens]`, on the CPU."""
    if given is None:
        return torch.arange(tokens, device="cpu")[None]
    positions = given[None] if given.ndim == 1 else given
    if positions.ndim != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != tokens:
        expected = f"shape [batch, tokens] = {(rows, tokens)}, [1, tokens] or [tokens]"
        _wrong("position_ids", expected, f"got {tuple(given.shape)}")
    if not bool(positions.isfinite().all()):
        _wrong("position_ids", "finite numbers", "got infinite ones or NaN")
    return positions.cpu()


def _hidden(batch: dict[str, torch.Tensor], positions: Any, tokens: int) -> Mask:
    """The mask of documents and padding; takes the bounds of documents out of the batch."""
    bounds = {name: batch.pop(name) for name in _PACKING if name in batch}
    padding = batch.get("attention_mask")
    if bounds:
        return _bounded(bounds, batch, tokens)
    if padding is None:
        ids = np.cumsum(np.diff(positions, prepend=positions[:, :1] - 1) != 1, axis=1)
    else:
        shown = padding.cpu().float().numpy()  # numpy has no bfloat16
        if not np.isin(shown, (0, 1)).all():
            _wrong("attention_mask", "0 for padding and 1 elsewhere", f"got up to {shown.max():g}")
        places = np.broadcast_to(positions, shown.shape)
        ids = np.stack([_documents(*row) for row in zip(shown != 0, places, strict=True)])
    return Documents(ids=ids) if ids.any() else Full()


def _bounded(bounds: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], tokens: int) -> Mask:
    """The mask of documents of one row, by their bounds."""
    first, *others = bounds
    rows = (batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]).shape[0]
    if rows != 1:
        remedy = "put all documents into one row, or give position_ids instead of the bounds"
        _wrong(first, "bounds of the documents of one row", f"got {rows} rows; {remedy}")
    shown = batch.get("attention_mask")
    if shown is not None and not (shown == 1).all():
        got = f"got another number for {int((shown != 1).sum())} of {tokens} tokens"
        remedy = "leave padding out of the row, or give position_ids instead of the bounds"
        _wrong("attention_mask", f"none beside {first}, or 1 everywhere", f"{got}; {remedy}")
    bounds_list = bounds[first].tolist()
    for name in others:
        if (other := bounds[name].tolist()) != bounds_list:
            got = _difference(bounds_list, other)
            remedy = "queries and keys are the same tokens: give both the same bounds"
            _wrong(name, f"the bounds of {first}", f"got {got}; {remedy}")
    packed = Documents(cu_seqlens=bounds[first])
    reason = packed.refuses(tokens, tokens, 1)
    if reason:
        _wrong(first, f"a last bound of {tokens} tokens", reason)
    return packed if len(bounds_list) > 2 else Full()


def _difference(expected: Any, other: Any) -> str:
    """The first difference between two lists, in words."""
    if not (isinstance(expected, list) and isinstance(other, list) and len(expected) == len(other)):
        return f"{np.size(other)} bounds in place of {np.size(expected)}"
    at = next(at for at, (x, y) in enumerate(zip(expected, other, strict=True)) if x != y)
    return f"{other[at]} in place of {expected[at]} as bound {at}"


def _documents(shown: Any, positions: Any) -> Any:
    """The number of each token's document in one row, -1 for padding."""
    numbers = np.full(len(positions), -1)
    at = np.flatnonzero(shown)
    if len(at) and at[-1] - at[0] + 1 != len(at):
        _wrong(
            "attention_mask",
            "padding before or after the tokens of a row",
            "got padding among them",
        )
    numbers[at] = np.cumsum(np.diff(positions[at], prepend=positions[at][:1] - 1) != 1)
    return numbers


def _layout(
    ctx: Context,
    tokens: int,
    mask: Mask,
    layout: str | ContextLayout,
    costs: LayerCosts | None,
) -> ContextLayout:
    if layout == "auto":
        layout = "zigzag" if mask == Full() else "balanced"
    if not isinstance(layout, ContextLayout):
        followed = Causal() & mask if layout in FOLLOWING else None
        chosen = choose_layout(ctx.attention, tokens, layout, followed, costs or LayerCosts())
        layout = ContextLayout(ctx.attention, chosen)
    elif costs is not None:
        _wrong("costs", "None beside a layout that is made already", "got some")
    elif layout.runtime is not ctx.runtime or layout.seq_len != tokens:
        got = f"got {layout.seq_len} tokens over {layout.runtime.world_size} ranks"
        _wrong("layout", f"one of this context, for {tokens} tokens", got)
    if not all(any(runs) for runs in layout.map.runs):
        _wrong("input_ids", f"at least a token for each of {ctx.world_size} ranks", f"got {tokens}")
    return layout


def _wrong(what: str, expected: str, got: str) -> NoReturn:
    raise InputError(f"{_NAME}: {what}: expected {expected}; {got}")
