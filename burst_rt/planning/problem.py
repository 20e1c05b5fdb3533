"""One attention problem as plain numbers.

A problem is everything that a strategy needs to build the graphs of any rank, without a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from burst_rt.planning.layouts import Layout, blocks_of
from burst_rt.planning.masks import Mask, Piece
from burst_rt.planning.needs import Needs, find_needs

__all__ = ["Problem", "ScoreFlags", "TileShape"]


class ScoreFlags(NamedTuple):
    """The options of a call that change its scores, apart from scaling."""

    softcap: bool = False
    alibi_slopes: bool = False
    sinks: bool = False  # whether each head has a sink
    sinks_need_grad: bool = False

    def __str__(self) -> str:
        return ", ".join(name for name, asked in self._asdict().items() if asked)


_NO_OPTIONS = ScoreFlags()


class TileShape(NamedTuple):
    """The largest tile of a rank, on which a kernel's memory depends."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # the larger one, if v has another head_dim
    q_len: int
    kv_len: int
    # `Mask.num_apart`; 0 where no piece is under the mask itself.
    masked: int = 0
    banded: bool = False  # whether a tile may have bands (`Shape.BAND`)
    scores: ScoreFlags = _NO_OPTIONS
    uneven: int = 0  # the head_dim of q and k less that of v


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Global shapes and placement."""

    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    batch: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # head dimension of q and k
    input_bytes: int  # bytes of one element of the inputs
    sum_bytes: int  # bytes of one element of the sums (gradients, lse and delta)
    needs_grad: tuple[bool, bool, bool]  # whether q, k, v need gradients
    v_head_dim: int = 0  # head dimension of v and out; 0 takes head_dim
    scores: ScoreFlags = _NO_OPTIONS

    def __post_init__(self) -> None:
        if not self.v_head_dim:
            object.__setattr__(self, "v_head_dim", self.head_dim)

    @property
    def world_size(self) -> int:
        return self.q_layout.world_size

    @cached_property
    def q_runs(self) -> tuple[tuple[range, ...], ...]:
        """Runs of queries by rank, at the positions the mask sees.

        Query i is at position i + Skv - Sq (bottom-right alignment).
        """
        shift = self.kv_layout.seq_len - self.q_layout.seq_len

        def shifted(run: range) -> range:
            return range(run.start + shift, run.stop + shift, run.step)

        return tuple(tuple(map(shifted, runs)) for runs in self.q_layout.runs)

    @property
    def kv_runs(self) -> tuple[tuple[range, ...], ...]:
        """Runs of keys by rank."""
        return self.kv_layout.runs

    def pieces(self, q: range, kv: range) -> tuple[Piece, ...]:
        """The pieces that the mask leaves of two runs; see `Mask.pieces`. Kept, for both directions
        ask.
        """
        known = self._pieces.get((q, kv))
        if known is None:
            known = self._pieces[q, kv] = self.mask.pieces(q, kv)
        return known

    @cached_property
    def _pieces(self) -> dict[tuple[range, range], tuple[Piece, ...]]:
        return {}

    def forget(self) -> None:
        """Lets go of what can be found again: pieces and needs."""
        for name in ("needs", "_pieces"):
            vars(self).pop(name, None)

    @cached_property
    def needs(self) -> Needs:
        """The rows that the ranks' blocks need from each other, if every shard travels as two
        blocks.
        """
        count = 1 if self.world_size == 1 else 2
        queries, keys = (
            [blocks_of(own, count) for own in side] for side in (self.q_runs, self.kv_runs)
        )
        return find_needs(self.mask.sent, queries, keys)

    @property
    def q_token_bytes(self) -> int:
        """Bytes of one token of q."""
        return self.batch * self.num_heads * self.head_dim * self.input_bytes

    @property
    def out_token_bytes(self) -> int:
        """Bytes of one token of out (or of dout)."""
        return self.batch * self.num_heads * self.v_head_dim * self.input_bytes

    @property
    def k_token_bytes(self) -> int:
        """Bytes of one token of k."""
        return self.batch * self.num_kv_heads * self.head_dim * self.input_bytes

    @property
    def v_token_bytes(self) -> int:
        """Bytes of one token of v."""
        return self.batch * self.num_kv_heads * self.v_head_dim * self.input_bytes

    @property
    def q_sum_bytes(self) -> int:
        """Bytes of one token of a sum shaped like q."""
        return self.batch * self.num_heads * self.head_dim * self.sum_bytes

    @property
    def out_sum_bytes(self) -> int:
        """Bytes of one token of a sum shaped like out."""
        return self.batch * self.num_heads * self.v_head_dim * self.sum_bytes

    @property
    def k_sum_bytes(self) -> int:
        """Bytes of one token of a sum shaped like k."""
        return self.batch * self.num_kv_heads * self.head_dim * self.sum_bytes

    @property
    def v_sum_bytes(self) -> int:
        """Bytes of one token of a sum shaped like v."""
        return self.batch * self.num_kv_heads * self.v_head_dim * self.sum_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's lse and delta together."""
        return 2 * self.batch * self.num_heads * self.sum_bytes

    @property
    def sink_bytes(self) -> int:
        """Bytes of a rank's share of the sinks' gradient: float64. 0 where it is not needed."""
        return 8 * self.num_heads * self.scores.sinks_need_grad
