"""Which recurrence a module of transformers is, and its sizes: told by its class and attributes."""

from __future__ import annotations

from typing import Any

from torch import nn

from burst_rt.planning.recurrences import RecurrenceSizes

__all__ = ["recurrence_of"]

# The chunk of flash-linear-attention's kernels of delta rules.
_DELTA_CHUNK = 64


def recurrence_of(module: Any) -> RecurrenceSizes | None:
    """The recurrence of a layer's module; None for other modules."""
    name = type(module).__name__
    convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    convolution: dict[str, int] = {}
    if convolutions:
        convolution = {
            "channels": convolutions[0].out_channels,
            "kernel": convolutions[0].kernel_size[0],
        }
    if name.endswith("ShortConv"):
        channels = convolution["channels"]
        return RecurrenceSizes(rule="convolution", num_heads=channels, **convolution)
    if name.endswith("GatedDeltaNet"):
        return RecurrenceSizes(
            rule="delta",
            num_heads=module.num_v_heads,
            num_key_heads=module.num_k_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
            chunk=_DELTA_CHUNK,
            **convolution,
        )
    if name.endswith("DeltaAttention"):
        size = module.head_dim
        return RecurrenceSizes(
            rule="delta", num_heads=module.num_heads, key_dim=size, value_dim=size,
            chunk=_DELTA_CHUNK, **convolution,
        )  # fmt: skip
    if name.endswith("LightningAttention"):
        size = module.head_dim
        return RecurrenceSizes(
            rule="linear", num_heads=module.num_attention_heads, key_dim=size, value_dim=size,
            chunk=module.block_size,
        )  # fmt: skip
    if name.endswith("RecurrentBlock"):
        return RecurrenceSizes(rule="scan", num_heads=module.lru_width, **convolution)
    if not hasattr(module, "ssm_state_size"):
        return None
    if hasattr(module, "n_groups"):
        return RecurrenceSizes(
            rule="linear",
            num_heads=module.num_heads,
            num_key_heads=module.n_groups,
            key_dim=module.ssm_state_size,
            value_dim=module.head_dim,
            chunk=module.chunk_size,
            **convolution,
        )
    return RecurrenceSizes(
        rule="scan", num_heads=module.intermediate_size, key_dim=module.ssm_state_size,
        **convolution,
    )  # fmt: skip
