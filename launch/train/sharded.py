"""The model on a split sequence: whole sequences in, the loss of this rank's tokens out.

For: joining the model (which knows no ranks) to a layout and `burst_attention`. Not for:
optimisation, or choosing sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from burst_rt import burst_attention
from burst_rt.context import Context
from burst_rt.launch.train.config import ShardingOptions
from burst_rt.launch.train.model import Decoder

__all__ = ["ShardedDecoder"]


class ShardedDecoder(nn.Module):
    """A decoder over the ranks of `context`, every one of which holds all weights and a part of
    each sequence.
    """

    def __init__(self, decoder: Decoder, context: Context, options: ShardingOptions) -> None:
        """Lay sequences of `options.seq_len` tokens over the ranks."""
        super().__init__()
        self.decoder = decoder
        self._context = context
        self._options = options
        self._layout = context.layout(options.seq_len, kind=options.layout)
        self._positions = self._layout.positions().to(context.device)

    def forward(self, tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Sum (fp64 scalar, differentiable) of the cross-entropies of this rank's tokens, in nats.

        Takes whole sequences on the CPU, int64, the same on every rank of the context; labels are
        already shifted, which must happen before the sequence is split. Blocks as `burst_attention`
        does, and raises what it raises.
        """
        device = self._context.device
        tokens = self._layout.shard(tokens_BS, dim=1).to(device)
        labels = self._layout.shard(labels_BS, dim=1).to(device)
        with torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=self._options.dtype == "bfloat16"
        ):
            scores_BSV = self.decoder(tokens, self._positions, self._attend)
        losses = functional.cross_entropy(
            scores_BSV.float().flatten(0, 1), labels.flatten(), reduction="none"
        )
        # Summed in fp64, so that how tokens are grouped by ranks does not show in the loss.
        return losses.double().sum()

    def _attend(self, q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor) -> Tensor:
        out_BSHE = burst_attention(
            q_BSHE,
            k_BSGE,
            v_BSGE,
            causal=True,
            layout=self._layout,
            strategy=self._options.strategy,
        )
        assert isinstance(out_BSHE, Tensor)  # lse was not asked for
        return out_BSHE
