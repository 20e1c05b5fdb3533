"""The cross-entropy over all ranks' labelled tokens, and what all losses check of labels."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.nn import functional

from burst_rt.arguments import describe_value, holds_values
from burst_rt.batches import IGNORED_LABEL
from burst_rt.errors import InputError
from burst_rt.runtime.mean import weighted_mean
from burst_rt.runtime.sums import RanksOrGroup, refuse_in

__all__ = ["cross_entropy", "plain_labels", "token_losses", "weights_of"]


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    group: RanksOrGroup | None = None,
    count: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """The mean cross-entropy, in nats, of all ranks' labelled tokens, on every rank.

    logits: `[..., classes]`, computed on in float32. labels: `[...]`, int64, shifted already where
    the model predicts the next token. A label of -100 has no loss. weights: `[...]`, by how much
    each label counts; None: all alike. group: as in `mean_over_ranks`, which says how gradients
    come together.
    count: the labelled tokens of the whole step, over all of its micro-batches and all ranks of the
    group, where gradients of several micro-batches add up; see `mean_over_ranks` and
    `ShardedBatch.num_labels`. None: the labelled tokens of this call.

    Collective; blocks as `mean_over_ranks` does. Returns a float32 scalar, NaN where no rank has a
    label. Raises InputError for logits and labels of other shapes or types, and for labels on a CPU
    that are not a class: on every rank that waits for this one if group is a Context, else on this
    rank.
    """
    if not isinstance(logits, torch.Tensor) or not (
        logits.is_floating_point() and logits.ndim and holds_values(logits)
    ):
        error = InputError(
            "cross_entropy: logits: expected dense floating-point numbers [..., classes], got "
            f"{describe_value(logits)}"
        )
        refuse_in(group, "cross_entropy", error)
    if not isinstance(labels, torch.Tensor) or not holds_values(labels):
        _refuse_labels(
            f"expected a dense tensor of torch.int64, got {describe_value(labels)}", group
        )
    if labels.shape != logits.shape[:-1]:
        _refuse_labels(
            f"expected {tuple(logits.shape[:-1])}, one for each of the logits' tokens; got "
            f"{tuple(labels.shape)}; cut both alike",
            group,
        )
    losses = token_losses(logits, labels, group)
    counted = weights_of(labels, weights, group, "cross_entropy")
    return weighted_mean(losses, counted.to(losses.device), group, "cross_entropy", count)


def weights_of(
    labels: torch.Tensor,
    weights: torch.Tensor | None,
    group: RanksOrGroup | None,
    name: str,
    ignore_index: int = IGNORED_LABEL,
) -> torch.Tensor:
    """By how much each label counts, flattened: booleans where there are no weights.

    Raises as `cross_entropy` does, by the name of what was called.
    """
    counted = labels.flatten() != ignore_index
    if weights is None:
        return counted
    if (
        not isinstance(weights, torch.Tensor)
        or not holds_values(weights)
        or weights.shape != labels.shape
        or weights.is_complex()
        or weights.requires_grad
    ):
        error = InputError(
            f"{name}: weights: expected a tensor of real numbers {tuple(labels.shape)}, one for "
            f"each label, that does not require grad; got {describe_value(weights)}"
        )
        refuse_in(group, name, error)
    # Not by a product: a weight may be NaN where nothing counts.
    return weights.flatten().to(counted.device).masked_fill(~counted, 0)


def token_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    group: RanksOrGroup | None,
    ignore_index: int = IGNORED_LABEL,
) -> torch.Tensor:
    """Each token's cross-entropy, flattened, float32; 0 where the label counts for nothing.

    group: in which the losses' mean is to be. Raises as `cross_entropy` does.
    """
    flat = logits.float().reshape(-1, logits.shape[-1])
    flat_labels = plain_labels(labels, logits.shape[-1], group, ignore_index, "cross_entropy")
    return functional.cross_entropy(
        flat, flat_labels.to(flat.device), ignore_index=ignore_index, reduction="none"
    )


def plain_labels(
    labels: torch.Tensor, classes: int, group: RanksOrGroup | None, ignore_index: int, name: str
) -> torch.Tensor:
    """Labels, flattened. Raises as `cross_entropy` does, by the name of what was called."""
    if not holds_values(labels):
        got = describe_value(labels)
        _refuse_labels(f"expected a dense tensor of torch.int64, got {got}", group, name)
    if hasattr(labels, "plain"):  # labels of `burst_rt.hf.shard` refuse torch's losses
        labels = labels.plain()
    if labels.dtype != torch.int64:
        got = f"got {labels.dtype}; give labels.long()"
        _refuse_labels(f"expected torch.int64, {got}", group, name)
    if labels.device.type == "cpu":  # a GPU would have to be waited for
        wrong = labels[((labels < 0) | (labels >= classes)) & (labels != ignore_index)]
        if wrong.numel():
            _refuse_labels(
                f"expected 0 to {classes - 1}, or {ignore_index} for what counts for nothing, got "
                f"{int(wrong[0])}; make labels with the model's own tokenizer",
                group,
                name,
            )
    return labels.flatten()


def _refuse_labels(
    reason: str, group: RanksOrGroup | None, name: str = "cross_entropy"
) -> NoReturn:
    refuse_in(group, name, InputError(f"{name}: labels: {reason}"))
