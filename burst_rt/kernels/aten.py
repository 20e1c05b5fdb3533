"""cuDNN's attention and Tri Dao's FlashAttention 2, through torch's operators.

Their backward takes O where the protocol has delta. A call of one tile has O itself. Elsewhere they
get the O' of `stand_in.py`, in 16 bits: delta = rowsum(dO * O') is then off by about sqrt(3 /
head_dim) roundoffs of itself. Neither costs accuracy. (Emulated for head sizes 16 to 128, grouped
heads, gradients of lse: 0.6 to 0.8 roundoffs in dq, dk, dv with O, with O' and with delta itself.)

A gradient of lse may make delta so large relative to dO that O' needs the range of bfloat16 (see
`stand_ins_in_16_bits`). float16 has no such range. Only the device knows whether the range is
needed, and nothing here waits for the device. So float16 is taken in the forward only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from burst_rt.kernels.base import QKV, Gradients, State, Tile, Upstream, Work
from burst_rt.kernels.conditions import told_to_repeat, too_old
from burst_rt.kernels.stand_in import stand_ins_in_16_bits
from burst_rt.kernels.vendor import PartOfTile, VendorKernel, calls_of_pieces
from burst_rt.planning.masks import Piece, Shape

__all__ = ["CudnnKernel", "FlashKernel"]

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_cudnn_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

# The shapes of pieces that both compute; stairs, as rectangles.
_SHAPES = (Shape.RECTANGLE, Shape.LOWER, Shape.STAIRS)


class _AtenKernel(VendorKernel):
    """The base of the two kernels that torch has.

    They take bfloat16, and float16 in the forward only; masks whose tiles are rectangles and
    triangles.
    """

    most_head_dim: int

    def _other_inputs(self, work: Work) -> str | None:
        if work.dtype == torch.float16 and not work.forward:
            return (
                f"the {self.name} kernel's backward takes bfloat16 only: its stand-in for the "
                "output does not fit into the range of float16"
            )
        if work.scores.softcap or work.scores.alibi_slopes:
            return (
                f"the {self.name} kernel has no softcap and no ALiBi, and {work.scores} were asked"
            )
        if len(set(work.head_dims)) > 1:
            return (
                f"the {self.name} kernel takes one head_dim for q, k and v, got {work.head_dim} "
                f"and {work.v_head_dim} of v"
            )
        if work.head_dim % 8 or not 8 <= work.head_dim <= self.most_head_dim:
            return (
                f"the {self.name} kernel takes a head_dim that is a multiple of 8, at most "
                f"{self.most_head_dim}, got {work.head_dim}"
            )
        if any(piece.shape not in _SHAPES for pieces in work.tiles for piece in pieces):
            return (
                f"the {self.name} kernel computes rectangles and triangles only, and "
                f"{work.mask!r} cuts this call's tiles into other shapes"
            )
        return self._short_columns(work.tiles)

    def repeatable(self, forward: bool) -> bool:
        """See `Kernel.repeatable`: the forward only.

        The backward adds up in an order that differs every time.
        """
        return forward

    def _short_columns(self, tiles: Iterable[tuple[Piece, ...]]) -> str | None:
        return None

    def _taken(self, upstream: Upstream) -> Upstream:
        """With O or O'."""
        dout, lse, delta, out = upstream
        if out is None:
            dout, out = stand_ins_in_16_bits(dout, delta)
        return Upstream(dout, lse, delta, out)

    def _call_forward(
        self, qkv: QKV, call: PartOfTile, tile: Tile, into: State | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._forward(_heads_first(qkv), call.right == 0, tile.scale)
        # Kernels may pad the rows of lse, or give it one dimension more.
        return out.transpose(1, 2), lse.flatten(2)[:, :, : qkv.q.shape[1]]

    def _call_backward(
        self, qkv: QKV, upstream: Upstream, call: PartOfTile, tile: Tile, into: Gradients | None
    ) -> Sequence[torch.Tensor]:
        dout, lse, delta, out = upstream
        assert out is not None
        turned = Upstream(dout.transpose(1, 2), lse, delta, out.transpose(1, 2))
        grads = self._backward(_heads_first(qkv), turned, call.right == 0, tile.scale)
        return [grad.transpose(1, 2) for grad in grads]

    def _forward(self, qkv: QKV, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse. All tensors have heads before tokens, here and in the backward."""
        raise NotImplementedError

    def _backward(
        self, qkv: QKV, upstream: Upstream, causal: bool, scale: float
    ) -> Iterable[torch.Tensor]:
        """dq, dk and dv."""
        raise NotImplementedError


class FlashKernel(_AtenKernel):
    """FlashAttention 2 (arXiv 2307.08691). head_dim is a multiple of 8, at most 256.

    Its backward gives the same bits every time where torch.use_deterministic_algorithms(True) is in
    force.
    """

    name = "flash"
    most_head_dim = 256

    def repeatable(self, forward: bool) -> bool:
        """See `Kernel.repeatable`."""
        return forward or told_to_repeat()

    def _missing(self, device: torch.device) -> str | None:
        if not torch.backends.cuda.is_flash_attention_available():
            return (
                "the flash kernel needs a torch that was built with FlashAttention; torch "
                f"{torch.__version__} was built without it"
            )
        return too_old(self.name, device)

    def _forward(self, qkv: QKV, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = _flash_forward(*qkv, 0.0, causal, scale=scale)
        return out, lse

    def _backward(
        self, qkv: QKV, upstream: Upstream, causal: bool, scale: float
    ) -> Iterable[torch.Tensor]:
        (q, k, _), (dout, lse, _, out) = qkv, upstream
        assert out is not None
        # The state of a random generator, which is not read without dropout.
        seed, offset = (torch.empty(n, dtype=torch.uint64, device=q.device) for n in (2, 0))
        grads: Iterable[torch.Tensor] = _flash_backward(
            dout, *qkv, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
            scale=scale
        )  # fmt: skip
        return grads


class CudnnKernel(_AtenKernel):
    """cuDNN's attention (9.0 or newer). head_dim is a multiple of 8, at most 128."""

    name = "cudnn"
    most_head_dim = 128

    def _short_columns(self, tiles: Iterable[tuple[Piece, ...]]) -> str | None:
        if any(
            call.columns.stop - call.columns.start == 1
            for pieces in tiles
            for call in calls_of_pieces(pieces)
        ):
            return (
                "the cudnn kernel takes at least 2 keys at a time, and this call has a tile "
                "with a single key"
            )
        return None

    def _missing(self, device: torch.device) -> str | None:
        version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        if version is None or version < 90000:
            return (
                f"the cudnn kernel needs cuDNN 9.0 or newer, and torch {torch.__version__} has "
                f"{version or 'none'}"
            )
        return too_old(self.name, device)

    def _forward(self, qkv: QKV, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = _cudnn_forward(*qkv, None, True, 0.0, causal, scale=scale)
        return out, lse

    def _backward(
        self, qkv: QKV, upstream: Upstream, causal: bool, scale: float
    ) -> Iterable[torch.Tensor]:
        (q, k, _), (dout, lse, _, out) = qkv, upstream
        assert out is not None
        # The state of a random generator, which is not read without dropout.
        seed, offset = (torch.empty((), dtype=torch.int64, device=q.device) for _ in range(2))
        # lse has the shape that the forward gives, because torch hands the shape on to cuDNN. dO
        # and O are made dense, because some versions of torch keep cuDNN graphs by the strides of
        # q, k and v alone, and would reuse a graph for a dO and an O of other strides.
        dout, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, out))
        grads: Iterable[torch.Tensor] = _cudnn_backward(
            dout, *qkv, out, lse.unsqueeze(-1), seed, offset, None, None, None, q.shape[2],
            k.shape[2], 0.0, causal, scale=scale
        )  # fmt: skip
        return grads


def _heads_first(qkv: QKV) -> QKV:
    """[B, S, H, D] -> [B, H, S, D], as views."""
    q, k, v = qkv
    return QKV(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
