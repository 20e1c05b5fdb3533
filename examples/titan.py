"""torchtitan's context parallelism by burst_rt: packed documents, in any layout.

    import titan
    titan.install()  # before torchtitan (0.3.0) builds its trainer

`parallelism` needs a context_parallel_degree above 1 and spmd_backend="partial_dtensor", as the
other backends spread attention by themselves. Attention is causal in each document, as torchtitan's
language models have it, and documents are read from the positions. All else is torchtitan's own;
its trainer wants lengths that twice the ranks divide.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.distributed import context_parallel
from torchtitan.models.common.attention import FlexAttention, VarlenAttention

import burst_rt
from burst_rt.errors import InputError

__all__ = ["Adapter", "install"]


class Adapter:
    """Takes the places of torchtitan's two functions of context parallelism."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.ctx: burst_rt.Context | None = None
        self.layout: burst_rt.ContextLayout | None = None  # of the batch that is under way
        self.mask: burst_rt.Mask = burst_rt.Causal()

    def apply_cp_to_forward(self, modules: Sequence[nn.Module], cp_mesh: DeviceMesh) -> None:
        """Makes the modules' attention that of all ranks of the mesh. Collective over it."""
        for module in modules:
            whole = isinstance(module, VarlenAttention) and module.window_size == (-1, 0)
            if not whole and not isinstance(module, FlexAttention):
                raise InputError(f"titan: expected flex or varlen without a window, got {module}")
            module.forward = self.attend
        if self.ctx is None:  # the stages of a pipeline have modules of their own
            self.ctx = burst_rt.init(group=cp_mesh)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """`[batch, tokens, heads, head_dim]` of this rank, in the layout of its inputs."""
        given = {name for name, value in options.items() if value is not None}
        if self.layout is None or given - {"scale", "enable_gqa"}:
            raise InputError(f"titan: expected inputs cut here, and a scale alone; got {given}")
        scale = options.get("scale")
        return burst_rt.burst_attention(q, k, v, layout=self.layout, mask=self.mask, scale=scale)

    def prepare_context_parallel_input(
        self, inputs: torch.Tensor, labels: torch.Tensor, extra_kwargs: dict[str, Any],
        *_: object,  # the mesh and the device, which are the context's; torchtitan's balancing
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:  # fmt: skip
        """This rank's part of `[batch, tokens]`, of labels, and of `extra_kwargs["positions"]`."""
        if self.ctx is None:
            raise InputError("titan: expected parallelism.spmd_backend='partial_dtensor'")
        positions, rest = extra_kwargs["positions"], dict(extra_kwargs)
        self.mask = burst_rt.Causal() & burst_rt.Documents(position_ids=positions)
        _check(rest.pop("attention_masks", None), positions)
        follows = self.mask if self.kind in ("balanced", "whole", "auto") else None
        layout = self.layout = self.ctx.layout(inputs.shape[1], self.kind, mask=follows)
        rest["positions"] = layout.shard(positions)
        return layout.shard(inputs), layout.shard(labels), rest


def _check(mask: object, positions: torch.Tensor) -> None:
    """Raises InputError for a mask of FlexAttention that shows anything else, in some rows."""
    if isinstance(mask, dict):
        raise InputError("titan: expected one mask for all layers, got several")
    if isinstance(mask, BlockMask):
        batch, tokens = positions.shape
        document = (positions == 0).cumsum(1)
        b, kv = torch.arange(batch, device=positions.device)[:, None], torch.arange(tokens)
        for q in range(0, tokens, max(1, tokens // 64)):
            right = (document == document[:, q : q + 1]) & (kv <= q).to(positions.device)
            shown = mask.mask_mod(b, b * 0, b * 0 + q, kv.to(positions.device))
            if not torch.equal(shown.expand_as(right), right):
                raise InputError("titan: expected a mask that is causal in each document")


def install(kind: str = "balanced") -> Adapter:
    """Puts an adapter in the place of torchtitan's functions, in all modules that have them."""
    adapter = Adapter(kind)
    for name in ("apply_cp_to_forward", "prepare_context_parallel_input"):
        theirs = getattr(context_parallel, name)
        for key, module in list(sys.modules.items()):
            if key.startswith("torchtitan.") and getattr(module, name, None) is theirs:
                setattr(module, name, getattr(adapter, name))
    return adapter
