"""Losses over the tokens of all ranks, for models of transformers.

A model's loss function gets the keywords of its forward. Where `shard` is among them, the loss is
the mean over all ranks' tokens; elsewhere it is transformers' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from transformers.loss import loss_utils
from transformers.loss.loss_utils import LOSS_MAPPING

from burst_rt.batches import IGNORED_LABEL, LOSS_WEIGHTS
from burst_rt.errors import InputError
from burst_rt.hf.logits import Unmade
from burst_rt.hf.shard import KEYWORD, ShardInfo, info_of, require_attended, was_cut
from burst_rt.losses import token_losses, weights_of
from burst_rt.runtime.mean import mean_of_sums
from burst_rt.runtime.refusing import refuse
from burst_rt.runtime.sums import add_over_ranks

__all__ = ["register_losses", "wrong_router_loss"]

_Loss = Callable[..., torch.Tensor]


def register_losses() -> None:
    """Puts sharded losses before transformers' own. Idempotent."""
    own = {loss for loss in LOSS_MAPPING.values() if not hasattr(loss, KEYWORD)}
    sharded = {loss: _sharded(loss.__name__.removesuffix("Loss"), loss) for loss in own}
    for name, loss in LOSS_MAPPING.items():
        LOSS_MAPPING[name] = sharded.get(loss, loss)
    # Trainer asks whether a model's loss `is` this one, and counts shifted labels where it is.
    for name in (loss_utils.__name__, "transformers.trainer"):
        if name in sys.modules:
            vars(sys.modules[name])["ForCausalLMLoss"] = LOSS_MAPPING["ForCausalLM"]


def wrong_router_loss(options: dict[str, Any], config: object) -> str | None:
    """Why a call must not have the loss of a mixture's router, in words: where the model's own is
    of one rank's tokens.
    """
    if options.get("output_router_logits") or getattr(config, "output_router_logits", False):
        return (
            "output_router_logits: expected False, or in training a model whose balancing loss is "
            "transformers' load_balancing_loss_func, such as Mixtral or Qwen3-MoE; got True: the "
            "router's loss would be of one rank's tokens; set model.config.output_router_logits = "
            "False, and under TRL SFTConfig(router_aux_loss_coef=0.0), by which TRL sets it anew"
        )
    return None


def _sharded(name: str, original: _Loss) -> _Loss:
    @wraps(original)
    def loss(*args: Any, **options: Any) -> torch.Tensor:
        labels = options.get("labels", args[1] if len(args) > 1 else None)
        if options.get(KEYWORD) is None and not was_cut(labels):
            return original(*args, **options)
        value: torch.Tensor = _over_ranks(name, labels, args, options)
        return value

    setattr(loss, KEYWORD, True)
    return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]  # ranks meet
def _over_ranks(
    name: str, labels: object, args: tuple[Any, ...], options: dict[str, Any]
) -> torch.Tensor:
    info: ShardInfo = options.get(KEYWORD) or info_of(labels)
    require_attended(info)
    compute = _LOSSES.get(name)
    if compute is None:
        error = InputError(
            f"loss {name!r} is not done over ranks; expected one of {', '.join(_LOSSES)}; "
            "compute it of the logits, with burst_rt.mean_over_ranks"
        )
        refuse("loss", error, info.ctx.runtime)
    return compute(*args, **{**options, KEYWORD: info})


def _mean(
    logits: torch.Tensor,
    labels: torch.Tensor,
    info: ShardInfo,
    num_items_in_batch: torch.Tensor | int | None,
    ignore_index: int,
) -> torch.Tensor:
    """The mean over all ranks' labelled tokens; or their sum, over a number that is given."""
    given = info.batch.tensors.get(LOSS_WEIGHTS)
    counted = weights_of(labels, given, info.group, "loss", ignore_index)
    total = None
    if isinstance(logits, Unmade):
        total = logits.sum_of_losses(labels, counted, info.group, ignore_index)
    if total is None:
        losses = token_losses(logits, labels, info.group, ignore_index)
        total = (losses.double() * counted.to(losses.device)).sum()
    if num_items_in_batch is None:
        weight = counted.to(total.device).double().sum()
        return mean_of_sums(total, weight, info.group, "mean_over_ranks").float()
    on_device = isinstance(num_items_in_batch, torch.Tensor) and num_items_in_batch.is_cuda
    # One on a GPU is not compared, because the host would have to wait for it.
    count = None if on_device else float(num_items_in_batch)
    added = add_over_ranks(total, group=info.group, count=count)
    return (added / num_items_in_batch).float()


def _causal(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    shift_labels: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    info: ShardInfo = options[KEYWORD]
    if shift_labels is None:
        error = InputError(
            "loss: expected shift_labels, as burst_rt.hf.shard gives them, as labels cannot be "
            "shifted after the cut; got labels alone"
        )
        refuse("loss", error, info.ctx.runtime)
    return _mean(logits, shift_labels, info, num_items_in_batch, ignore_index)


def _as_labelled(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: object = None,  # token classifiers: their configuration
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED_LABEL,
    **options: Any,
) -> torch.Tensor:
    return _mean(logits, labels, options[KEYWORD], num_items_in_batch, ignore_index)


_LOSSES: dict[str, _Loss] = {
    "ForCausalLM": _causal,
    "ForMaskedLM": _as_labelled,
    "ForTokenClassification": _as_labelled,
}
