"""A ContextParallelSharder of NeMo Automodel by burst_rt. For nemo-automodel 0.7.

    ctx = burst_rt.init(group=device_mesh["cp"])
    automodel.give_to(model, ctx)  # before the recipe's first step

The recipe then cuts batches by a layout of ctx, and runs the model's forward and backward in
`burst_rt.over_ranks`. The model must call torch's scaled_dot_product_attention, causally. Rows of
padding after their tokens are fine; packed rows (THD), padding before tokens and masks of four
dimensions are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from nemo_automodel.components.distributed.context_parallel.sharder import (
    ContextParallelSharder,
    ShardLayout,
)
from torch import nn
from torch.nn import functional

import burst_rt
from burst_rt.errors import InputError

__all__ = ["Cut", "give_to"]


class Cut:
    """How batches are cut. kind: "zigzag", "contiguous" or "striped"."""

    def __init__(self, ctx: burst_rt.Context, kind: str) -> None:
        self.ctx, self.kind = ctx, kind
        # One of each length, so that compiled programs find the same one again.
        self.layouts: dict[int, burst_rt.ContextLayout] = {}

    def layout(self, tokens: int) -> burst_rt.ContextLayout:
        if tokens not in self.layouts:
            self.layouts[tokens] = self.ctx.layout(tokens, self.kind)
        return self.layouts[tokens]

    def indices(self, _: object, tokens: int, device: torch.device | None = None) -> torch.Tensor:
        """The positions of this rank's tokens, of `tokens` with their padding."""
        return self.layout(tokens).positions().to(device)

    def shard_batch(
        self, _: object, __: object, batch: dict[str, Any], *,
        loss_mask: torch.Tensor | None = None, padding_token_id: int = 0,
    ) -> tuple[Any, dict[str, Any], ShardLayout]:  # fmt: skip
        """See ContextParallelSharder.shard_batch. Pads, since its verbs want ranks alike."""
        batch = {**batch, "loss_mask": loss_mask}
        batch = {name: value for name, value in batch.items() if value is not None}
        rows, tokens = batch["input_ids"].shape
        mask = batch.pop("attention_mask", torch.ones(rows, tokens))
        if mask.ndim != 2 or bool((mask.diff(dim=1) > 0).any()):
            raise InputError(
                f"automodel: attention_mask: expected padding after tokens, got {mask.shape}"
            )
        place = torch.arange(tokens, device=batch["input_ids"].device).expand(rows, -1)
        batch.setdefault("position_ids", place)
        fills = {"input_ids": padding_token_id, "labels": -100, "position_ids": 0, "loss_mask": 0,
                 "padding_mask": True}  # fmt: skip
        unknown = batch.keys() - fills.keys()
        if unknown:
            raise InputError(f"automodel: expected {sorted(fills)}, got also {sorted(unknown)}")
        short = -tokens % (2 * self.ctx.world_size)
        layout = self.layout(tokens + short)
        parts = {
            name: layout.shard(functional.pad(value, (0, short), value=fills[name]))
            for name, value in batch.items()
        }
        lengths = ShardLayout(original_seq_len=tokens, padded_seq_len=tokens + short)
        return partial(burst_rt.over_ranks, self.ctx, layout), parts, lengths


def give_to(model: nn.Module, ctx: burst_rt.Context, kind: str = "zigzag") -> None:
    """Makes the model say, where Automodel asks it, that its batches are cut by burst_rt."""
    cut = Cut(ctx, kind)

    def prepare_model_inputs_for_cp(batch: dict[str, Any], **_: object) -> dict[str, Any]:
        sharder = ContextParallelSharder(
            shard_batch=cut.shard_batch, local_token_global_indices=cut.indices
        )
        return {"cp_sharder": sharder}

    model.prepare_model_inputs_for_cp = prepare_model_inputs_for_cp  # type: ignore[assignment]
