"""A layout bound to a context: cutting tensors into shards, putting them together again. Who owns
what: `planning/layouts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from burst_rt.drivers import raw_bytes
from burst_rt.errors import InputError
from burst_rt.planning.layouts import Layout

if TYPE_CHECKING:
    from burst_rt.context import Context

__all__ = ["ContextLayout"]


@dataclass(frozen=True)
class ContextLayout:
    """A layout of one context: which tokens this rank holds. Made by `Context.layout`."""

    context: Context
    map: Layout

    @property
    def kind(self) -> str:
        return self.map.kind

    @property
    def seq_len(self) -> int:
        return self.map.seq_len

    @property
    def shard_len(self) -> int:
        """Tokens of this rank."""
        return self.map.shard_len(self.context.rank)

    def positions(self, rank: int | None = None) -> torch.Tensor:
        """Global positions of a rank's tokens (default: this rank's) in local order: int64
        `[shard_len]`, on the context's device.
        """
        owner = self.context.rank if rank is None else rank
        if not 0 <= owner < self.context.world_size:
            raise InputError(
                f"layout.positions: rank must be in [0, {self.context.world_size}), got {rank}"
            )
        parts = [
            torch.arange(b.start, b.stop, b.step, device=self.context.device)
            for b in self.map.blocks[owner]
        ]
        return torch.cat(parts)

    def shard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens of a full tensor, along `dim`, in local order. Local, differentiable;
        a copy.
        """
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != self.seq_len:
            raise InputError(
                f"layout.shard: expected {self.seq_len} tokens along dim {dim}, got shape "
                f"{tuple(x.shape)}"
            )
        return x.index_select(dim, self.positions().to(x.device))

    def unshard(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The full tensor, on every rank, from every rank's shard. Collective: blocks at most the
        context's `timeout_s`.

        Not differentiable: a tensor that requires grad is refused (InputError, on every rank); pass
        x.detach().
        """
        ctx = self.context
        error = self._refuses(x, dim)
        if error:
            ctx.refuse("unshard", error)
        others = tuple(n for i, n in enumerate(x.shape) if i != dim % x.ndim)
        about = {
            "call": "unshard",
            "layout": f"{self.kind} {self.seq_len}",
            "other dims": str(others),
            "dim": str(dim),
            "dtype": str(x.dtype),
        }
        mine = x.detach().resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
        pending = ctx.collective(
            about, lambda: ctx.control.allgather(raw_bytes(mine.cpu()).tobytes())
        )
        full = torch.empty((self.seq_len, *mine.shape[1:]), dtype=x.dtype, device=x.device)
        for rank, raw in enumerate(pending.result()):
            if raw:
                shard = torch.frombuffer(bytearray(raw), dtype=x.dtype).view(
                    self.map.shard_len(rank), *mine.shape[1:]
                )
                full[self.positions(rank).to(x.device)] = shard.to(x.device)
        return full.movedim(0, dim)

    def _refuses(self, x: torch.Tensor, dim: int) -> InputError | None:
        """Why `unshard` cannot take this rank's tensor, or None."""
        where = "layout.unshard:"
        if not isinstance(x, torch.Tensor):
            return InputError(f"{where} expected a tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_meta:
            return InputError(
                f"{where} expected a dense tensor that holds values, got {x.layout} on {x.device}"
            )
        if (
            isinstance(dim, bool)
            or not isinstance(dim, int)
            or not -x.ndim <= dim < x.ndim
            or x.shape[dim] != self.shard_len
        ):
            return InputError(
                f"{where} expected {self.shard_len} tokens along dim {dim}, got shape "
                f"{tuple(x.shape)}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            return InputError(f"{where} not differentiable, and x requires grad; pass x.detach()")
        return None
